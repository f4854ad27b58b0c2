"""Gradients of a few rows, in hardly more memory than a pass without gradients takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from daf_core.batch.rows import by_rows
from daf_core.model.blocks import Block, layers_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.step import backward_beside, gradients_aside

ELEMENTS = 4096  # of the gradient of each parameter that are compared


class RowGradients(NamedTuple):
    """Some elements of those of parameters, and of what the last block gives, for each of its rows."""

    parameters: Tensor
    outputs: list[Tensor | None]


def gradients_of(model: nn.Module, loss_of: Callable[[], Tensor]) -> RowGradients:
    """Returns those of parameters outside of blocks, and of what the last block gives.

    In blocks nothing is kept for backward: no plan has room for the activations of so many rows.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    with gradients_aside(model), _without_graph(layers_of(model)) as outputs:
        loss = loss_of()
        if loss.requires_grad:
            backward_beside(loss, (*trained, *outputs))
        found = [_some_elements(each.grad.reshape(1, -1)) for each in trained if each.grad is not None]
        of_rows = [None if each.grad is None else _some_elements(by_rows(each.grad)) for each in outputs]
    return RowGradients(torch.cat([*found, torch.zeros(1, 0, device="cpu")], 1).flatten(), of_rows)


def as_vectors(whole: RowGradients, single: list[RowGradients]) -> tuple[Tensor, list[Tensor]]:
    """Returns gradients as one vector each: in those of single rows what a block gives for others has none."""
    count = len(single)

    def is_of_rows(*gradients: Tensor | None) -> bool:
        sizes = {None if each is None else each.shape[1] for each in gradients}
        return len(sizes) == 1 and [None if each is None else len(each) for each in gradients] == [count, *[1] * count]

    outputs = [each.outputs for each in (whole, *single)]
    alike = len({len(each) for each in outputs}) == 1
    places = [place for place, each in enumerate(zip(*outputs, strict=alike)) if alike and is_of_rows(*each)]
    found: list[list[Tensor]] = [[each.parameters] for each in (whole, *single)]
    for place in places:
        rows = [cast("Tensor", each[place]) for each in outputs]
        found[0].append(rows[0].flatten())
        for row, each in enumerate(rows[1:]):
            alone = torch.zeros_like(rows[0])
            alone[row] = each[0]
            found[1 + row].append(alone.flatten())
    first, *others = map(torch.cat, found)
    return first, others


@contextmanager
def _without_graph(blocks: Collection[Block]) -> Generator[list[Tensor]]:
    """Gives a list of leaves for what the last of some blocks gives inside; none keeps how it came to that."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[-1].clone()  # of a leaf nothing may be written to

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves.clear()
        with torch.no_grad():
            output = forward(*args, **kwargs)
        return tree_map(leaf, output) if torch.is_grad_enabled() else output

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(ForwardPatch(block.module, around).remove)
        yield leaves


def _some_elements(rows: Tensor) -> Tensor:
    """Returns up to `ELEMENTS` of each row, evenly spaced, in float64 on the CPU."""
    return rows[:, :: math.ceil(rows.shape[1] / ELEMENTS) or 1].to("cpu", torch.float64)
