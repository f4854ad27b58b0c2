"""Users choose what torch makes tensors of and where by default; DAF computes the same whatever that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from daf_integrations import prepare
from daf_kernels.cpu.backend import warm_up

WIDTH, HEADS, WORDS = 64, 4, 500


class Block(nn.Module):
    """Attention with dropout and a mask, a gated layer, and a GELU: all that is rewritten where that pays."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.given = nn.LayerNorm(WIDTH, device="cpu"), nn.Linear(WIDTH, 3 * WIDTH, device="cpu")
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, device="cpu") for _ in range(2))
        self.down, self.act, self.dropout = nn.Linear(2 * WIDTH, WIDTH, device="cpu"), nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.given(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").tril()
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=seen, dropout_p=0.1)
        x = x + attended.transpose(1, 2).reshape(x.shape)
        return x + self.dropout(self.down(self.act(self.gate(x)) * self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, device="cpu")
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WORDS, device="cpu")

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.words(words))[:, ::2]  # with holes
        return functional.cross_entropy(self.head(hidden.relu() * hidden).flatten(0, 1), words[:, ::2].flatten())


@contextmanager
def default(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Makes both what torch takes where nothing is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def gradients(options: dict[str, Any] | None) -> list[Tensor]:
    """Returns those of a third step."""
    torch.manual_seed(0)
    model: nn.Module = Net().float()
    if options is not None:
        model = prepare(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    words = torch.randint(WORDS, (8, 64), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(words).backward()
        optimizer.step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.float16)])
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "exact"},
        {"precision": 8},
        {"precision": 8, "packing": "workers"},
        {"precision": 8, "memory_budget": "5MB", "budget_covers": "step"},
    ],
    ids=["exact", "8 bits", "workers", "a step's budget"],
)
def test_gradients_do_not_depend_on_them(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    with default(device, dtype):
        plain, found = gradients(None), gradients({**options, "audit_every": None})
    for known, gradient in zip(plain, found, strict=True):
        assert (gradient - known).norm() <= (0.02 if options["precision"] == 8 else 0) * known.norm()


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.float16)])
def test_kernels_are_loaded_whatever_they_are(device: str, dtype: torch.dtype) -> None:
    with default(device, dtype):
        assert warm_up() > 0
