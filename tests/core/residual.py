"""Residual networks whose activations follow from others, and a look at what they are stored as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine
from daf_core.codecs.relu_output import ReluOutputActivation
from tests.core.harness import assert_empty, engine_for, error, normal, trainable, watch

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMALIZATIONS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SHAPES = {1: (8, 16, 100), 2: (8, 16, 12, 12), 3: (4, 16, 6, 6, 6)}

PLAIN, NORMALIZED, SUM = "planes", "normalized", "sum"
"""What the values of a ReLU's result are stored as."""


class Net(nn.Module):
    """Residual blocks of 16 channels, their shortcuts, and a head that saves the last result."""

    def __init__(self, blocks: int = 1, dims: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution, norm = CONVOLUTIONS[dims], NORMALIZATIONS[dims]
        self.first, self.second, self.short = (
            nn.ModuleList(convolution(16, 16, 3, padding=1, bias=False) for _ in range(blocks)) for _ in range(3)
        )
        self.norm_1, self.norm_2, self.norm_short = (
            nn.ModuleList(norm(16, **options) for _ in range(blocks)) for _ in range(3)
        )
        self.stem, self.head = (convolution(16, 16, 1) for _ in range(2))
        for module in self.modules():
            if isinstance(module, norm) and module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.uniform_(module.bias, -1, 1)

    def norm(self, x: Tensor) -> Tensor:
        return self.norm_1[0](self.first[0](x))


Loss = Callable[[Net], Tensor]
Function = Callable[[Net, Tensor], Tensor]


def relu_in_place(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


RELUS = {"relu": F.relu, "relu-in-place": relu_in_place}


def blocks(net: Net, x: Tensor, relu: Callable[[Tensor], Tensor] = relu_in_place, short: bool = False) -> Tensor:
    """As in torchvision: the shortcut comes last, and the addition is in place."""
    for i in range(len(net.first)):
        y = net.norm_2[i](net.second[i](relu(net.norm_1[i](net.first[i](x)))))
        begin = net.norm_short[i](net.short[i](x)) if short else x
        y += begin
        x = relu(y)
    return x


def train(
    net: Net, function: Function, inputs: Tensor | None = None, precision: Any = 8, heads_only: bool = False
) -> tuple[float, list[str]]:
    """Returns the error of the gradient, and what the values of each ReLU's result are that others use.

    Args:
        net: It is trained from the same state with and without DAF.
        function: Gives what the head gets.
        inputs: Of the stem.
        precision: Code bits.
        heads_only: Takes the head's gradient only: what is before was changed, and autograd would find out.
    """
    dims = net.stem.weight.dim() - 2
    results, found = [], []
    for engine in (None, engine_for(net, precision)):
        x = normal(*SHAPES[dims]) if inputs is None else inputs
        loss = forward(net, function, x, engine, found)
        parameters = list(net.head.parameters()) if heads_only else trainable(net)
        taken = torch.autograd.grad(loss, parameters, allow_unused=True)
        results.append([gradient.float() for gradient in taken if gradient is not None])
        del loss
        if engine:
            assert_empty(engine)
    return error(results[1], results[0]), found


def forward(net: Net, function: Function, x: Tensor, engine: ActivationEngine | None, found: list[str]) -> Tensor:
    def loss_of() -> Tensor:
        outputs = net.head(function(net, net.stem(x)))
        return (outputs * normal(*outputs.shape, seed=1).to(outputs.dtype)).sum()

    if engine is None:
        return loss_of()
    seen: set[int] = set()
    watch(engine, lambda packed: _note(getattr(packed, "stored", None), seen, found))
    with engine.compress():
        return loss_of()


def _note(stored: Any, seen: set[int], found: list[str]) -> None:
    """Counts what is shared once."""
    if isinstance(stored, ReluOutputActivation) and id(stored) not in seen:
        seen.add(id(stored))
        found.append(stored.values.name)


def gradients_of(net: Net) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in trainable(net) if parameter.grad is not None]
