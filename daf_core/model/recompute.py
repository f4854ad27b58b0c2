"""Blocks that keep only their input for backward, and are computed once more there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from daf_core.autograd.torch_private import in_backward
from daf_core.model.blocks import Block
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.rng_and_buffers import Buffers, RandomNumbers

Watch = Callable[[int, bool], None]
"""Is told of a recomputation: the block's number, and whether it begins or ends."""


class Recomputation:
    """Switches, from one forward pass to the next, which blocks of a model are recomputed.

    A block that is recomputed saves the tensors among its positional arguments, and nothing else; hooks for saved
    tensors see these, but nothing of what is inside. Random numbers are those of the first time, and buffers, such as
    running statistics, change once.

    Args:
        blocks: The blocks.
        watch: Is told when one is being recomputed.
    """

    def __init__(self, blocks: Sequence[Block], watch: Watch | None = None) -> None:
        self._blocks = blocks
        self._watch = watch
        self._switches: dict[int, _Switch] = {}

    def select(self, numbers: Collection[int]) -> None:
        """Has these blocks recomputed, and no others; not to be called between a forward pass and its backward."""
        for number in [number for number in self._switches if number not in numbers]:
            self._switches.pop(number).remove()
        for number in numbers:
            if number not in self._switches:
                watch = None if self._watch is None else functools.partial(self._watch, number)
                self._switches[number] = _Switch(self._blocks[number], watch)


class _Switch:
    """Has one block recomputed until `remove`."""

    def __init__(self, block: Block, watch: Callable[[bool], None] | None) -> None:
        self._module = block.module
        self._watch = watch
        self._wrapper = ForwardPatch(block.module, self._around)

    def remove(self) -> None:
        self._wrapper.remove()

    def _around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes tensors on as positional arguments, wherever they are: only those are saved, others stay alive.

        Keywords that need no gradient stay: blocks share them, as they do masks and the angles of rotary embeddings.
        """
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = _without_caches(self._module, args, kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        inputs = len(tree_flatten(args)[0])
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (place < inputs or leaf.requires_grad)
        ]

        def with_tensors(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            inner_args, inner_kwargs = tree_unflatten(filled, structure)
            return forward(*inner_args, **inner_kwargs)

        tensors = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None
        return self._run(with_tensors, *tensors)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(self._watched(function), *args, use_reentrant=False, context_fn=self._contexts)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        watch = self._watch
        if watch is None:
            return function

        def watched(*args: Any) -> Any:
            if not in_backward():
                return function(*args)
            watch(True)
            try:
                return function(*args)
            finally:
                watch(False)

        return watched

    def _contexts(self) -> tuple[AbstractContextManager[None, None], AbstractContextManager[None, None]]:
        recorded = _Recorded()
        return recorded, _Replayed(recorded, self._module)


def _without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leaves out the caches of keys and values that layers of transformers fill: they would be filled twice."""
    if getattr(module, "_can_checkpoint_with_cache", False):  # it only reads them
        return args, kwargs
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: object) -> bool:
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


class _Recorded:
    """Notes the random numbers of Python and numpy; those of torch are replayed by the checkpoint itself."""

    def __enter__(self) -> None:
        self.numbers = RandomNumbers()

    def __exit__(self, *_: object) -> None:
        pass


class _Replayed:
    """Replays them, as often as backward runs, and has buffers change only the first time.

    Args:
        first: The first time.
        module: The module that is recomputed.
    """

    def __init__(self, first: _Recorded, module: nn.Module) -> None:
        self._first = first
        self._module = module

    def __enter__(self) -> None:
        self._now, self._buffers = RandomNumbers(), Buffers(self._module)
        self._first.numbers.restore()

    def __exit__(self, *_: object) -> None:
        self._buffers.restore()
        self._now.restore()
