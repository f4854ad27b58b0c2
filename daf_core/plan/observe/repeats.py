"""Finds the blocks that compute something else when they run again, as those do that read a state which they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from daf_core.model.blocks import Block
from daf_core.model.caches import as_it_is, is_cache, layers_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.step import RandomNumbers, devices_of

ROUNDING = 1e-3  # relative difference that is none: kernels of GPUs may add up in another order


class _NotKeptError(Exception):
    """A gradient was asked for."""


def unlike_blocks(blocks: Sequence[Block], forward_pass: Callable[[], object]) -> set[str]:
    """Returns the names of the blocks of which a second run gives something else, or saves it, than the first one.

    Each block runs twice in the forward pass, with the same arguments and random numbers. It has no backward pass, as
    nothing is kept for one; where the pass itself needs gradients, blocks after that are not looked at.
    """
    found: set[str] = set()
    with ExitStack() as stack, suppress(_NotKeptError):
        for block in blocks:
            stack.callback(ForwardPatch(block.module, partial(_twice, block, found)).remove)
        forward_pass()
    return found


def _twice(
    block: Block, found: set[str], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layers, devices = layers_of(block.module), devices_of(block.module)

    def before(value: Any) -> Any:
        return as_it_is(value, layers) if is_cache(value) else value

    args_again, kwargs_again = tree_map(before, (args, kwargs), is_leaf=is_cache)
    numbers = RandomNumbers(devices)
    first, saved = _with_shapes_saved(partial(forward, *args, **kwargs))
    now = RandomNumbers(devices)
    numbers.restore()
    second, saved_again = _with_shapes_saved(partial(forward, *args_again, **kwargs_again))
    now.restore()
    if saved != saved_again or not all(map(_alike, tree_leaves(first), tree_leaves(second))):
        found.add(block.name)
    return first


def _with_shapes_saved(run: Callable[[], Any]) -> tuple[Any, list[tuple[torch.Size, torch.dtype]]]:
    """Returns what a function returns, and the shapes and types of what autograd saves in it."""
    kept: list[Tensor] = []
    shapes: list[tuple[torch.Size, torch.dtype]] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        shapes.append((tensor.shape, tensor.dtype))
        return len(kept) - 1

    def unpack(place: int) -> Tensor:
        if not kept:
            raise _NotKeptError
        return kept[place]

    with saved_tensors_hooks(pack, unpack):
        result = run()
    kept.clear()
    return result, shapes


def _alike(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.layout != torch.strided:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    first, second = first.detach(), second.detach()
    difference = (first - second).float().nan_to_num()  # rows that are masked out may be none
    return bool(difference.norm() <= ROUNDING * first.float().nan_to_num().norm())
