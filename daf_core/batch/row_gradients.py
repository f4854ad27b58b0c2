"""Gradients of a few rows, in hardly more memory than a pass without gradients takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from daf_core.batch.rows import by_rows, tensors_in
from daf_core.model.blocks import Block, layers_of
from daf_core.model.forward_patch import ForwardPatch

ELEMENTS = 4096  # of the gradient of each parameter that are compared

LARGE = 1 << 22
"""Elements of a parameter from which on its gradient is left out: that of GPT-2's embedding takes 154 MB."""


class RowGradients(NamedTuple):
    """Some elements of those of parameters, and of what the last block gives, for each of its rows."""

    parameters: Tensor
    outputs: list[Tensor | None]


def gradients_of(model: nn.Module, loss_of: Callable[[], Tensor]) -> RowGradients:
    """Returns those of parameters outside of blocks, and of what the last block gives.

    In blocks nothing is kept for backward: no plan has room for the activations of so many rows. Those of large
    parameters, as of embeddings, are left at zero unless all others are zero, as those of a head of zeros are.
    """
    blocks = layers_of(model)
    inside = {id(each) for block in blocks for each in block.module.parameters()}
    outside = [each for each in model.parameters() if each.requires_grad and id(each) not in inside]
    small = [each for each in outside if each.numel() <= LARGE]
    with _without_graph(blocks) as outputs:
        loss = loss_of()
        gradients = _gradients(loss, [*outputs, *small])
        if len(small) < len(outside) and not any(bool(each.any()) for each in gradients.values()):
            gradients |= _gradients(loss, outside)
    found = [_some_elements(each, gradients.get(id(each))) for each in outside]
    of_rows = [_spaced(by_rows(gradients[id(each)])) if id(each) in gradients else None for each in outputs]
    return RowGradients(torch.cat([*found, torch.zeros(0, device="cpu")]), of_rows)


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns those of the leaves that a loss depends on, by their `id`; `grad` of the leaves stays."""
    if not leaves or not loss.requires_grad:
        return {}
    found = cast("Sequence[Tensor | None]", torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True))
    known = {id(leaf): each for leaf, each in zip(leaves, found, strict=True) if each is not None}
    return {key: each if each.layout is torch.strided else each.to_dense() for key, each in known.items()}


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

    def around(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves.clear()
        with torch.no_grad():
            output = forward(*args, **kwargs)
        # Elastic training looks for graphs that begin where nothing is trained.
        needs_gradient = any(each.requires_grad for each in (*module.parameters(), *tensors_in((args, kwargs))))
        return tree_map(leaf, output) if needs_gradient and torch.is_grad_enabled() else output

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(ForwardPatch(block.module, partial(around, block.module)).remove)
        yield leaves


def _some_elements(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Returns some elements of the gradient of a parameter, zeros where it has none."""
    if gradient is None:
        return torch.zeros(-(-parameter.numel() // _step(parameter.numel())), dtype=torch.float64, device="cpu")
    return _spaced(gradient.reshape(1, -1)).flatten()


def _spaced(rows: Tensor) -> Tensor:
    """Returns up to `ELEMENTS` of each row, evenly spaced, in float64 on the CPU."""
    return rows[:, :: _step(rows.shape[1])].to("cpu", torch.float64)


def _step(size: int) -> int:
    return math.ceil(size / ELEMENTS) or 1
