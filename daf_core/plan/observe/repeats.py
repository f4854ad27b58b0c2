"""Finds the blocks that compute something else when they run again, as those do that read a state which they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from daf_core.model.blocks import Block
from daf_core.model.caches import as_it_is, is_cache, layers_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.model.recompute import SecondRun
from daf_core.plan.run.retry import is_out_of_memory
from daf_core.snapshots.random_numbers import generators_of
from daf_core.snapshots.step import devices_of

ROUNDING = 1e-3  # relative difference that is none, as twice that of a type is: GPUs may add up in another order


class _NotKept(BaseException):
    """A gradient was asked for. What a loss does with errors does not concern it."""


def unlike_blocks(blocks: Sequence[Block], forward_pass: Callable[[], object]) -> set[str]:
    """Returns the names of the blocks of which a second run gives something else, or saves it, than the first one.

    Each block runs twice in the forward pass, with the same arguments and random numbers. It has no backward pass, as
    nothing is kept for one; where the pass itself needs gradients, blocks after that are not looked at. Where the pass
    fails, blocks run twice one by one, and those are unlike that it fails with. Where there are none it raises.
    """
    found, error = _unlike(blocks, forward_pass)
    if error is None:
        return found
    alone = {block.name: _unlike([block], forward_pass) for block in blocks}
    if all(each is None for _, each in alone.values()):
        raise error
    return {name for name, (found, each) in alone.items() if found or each is not None}


def _unlike(blocks: Sequence[Block], forward_pass: Callable[[], object]) -> tuple[set[str], Exception | None]:
    """Returns the names of those that are unlike, and with what the pass has failed, unless for want of memory."""
    found: set[str] = set()
    try:
        with ExitStack() as stack, suppress(_NotKept):
            for block in blocks:
                stack.callback(ForwardPatch(block.module, partial(_twice, block, found)).remove)
            forward_pass()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return set(), error
    return found, None


def _twice(
    block: Block, found: set[str], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layers = layers_of(block.module)

    def before(value: Any) -> Any:
        return as_it_is(value, layers) if is_cache(value) else value

    args_again, kwargs_again = tree_map(before, (args, kwargs), is_leaf=is_cache)
    again = SecondRun(block.module, set(), devices_of(block.module), generators_of(block.module))
    with again.after(nullcontext()):
        first, saved = _with_shapes_saved(partial(forward, *args, **kwargs))
    with again:
        second, saved_again = _with_shapes_saved(partial(forward, *args_again, **kwargs_again))
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
            raise _NotKept
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
    allowed = max(ROUNDING, 2 * torch.finfo(first.dtype).eps)
    return bool(difference.norm() <= allowed * first.float().nan_to_num().norm())
