"""A model and a batch that `daf bench` makes of this file."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Four equal layers, and a loss of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(4)))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean(1)), labels)


class Restless(Net):
    """Has another loss in each process."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        torch.seed()
        return super().forward(x, labels) + torch.rand(())


class Broken(Net):
    """Does not train."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(x, labels)
        if loss.requires_grad:
            loss.register_hook(_fail)
        return loss


def _fail(_: Tensor) -> None:
    raise RuntimeError("boom")


def net(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Net(), _batch(rows, length)


def restless(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Restless(), _batch(rows, length)


def broken(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Broken(), _batch(rows, length)


def single(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Has no blocks."""
    model = Net()
    model.layers = nn.Sequential(model.layers[0])
    return model, _batch(rows, length)


def alone(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Is made in other processes than that of the tests."""
    assert "pytest" not in sys.modules
    return net(rows, length)


def ending(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Ends the process."""
    print("no more of this", file=sys.stderr, flush=True)
    os._exit(7)


def killed(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Is ended by the system, as where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return net(rows, length)


def _batch(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, length, 32, generator=generator)
    return {"x": x, "labels": torch.randint(3, (rows,), generator=generator)}
