"""States that a model hands to its blocks, which read them and write theirs: transformers' caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from daf_core.errors import ProfileError
from daf_core.model.module_hooks import InstanceHook

_given = WeakSet[Any]()
"""The caches that models were called with."""

_left_empty = WeakKeyDictionary[Any, WeakSet[nn.Module]]()
"""The caches that blocks have left empty, and these blocks."""

_filling = WeakSet[nn.Module]()
"""Modules whose blocks fill every cache, as an earlier call's was given to a later one."""


class LeftEmptyError(ProfileError):
    """A cache is given to a model that its blocks have left empty; from then on they fill all."""


def is_cache(value: object) -> bool:
    """Says whether a value is one: of keys and values, or of states of a recurrence."""
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)


def layers_of(module: nn.Module) -> frozenset[int]:
    """Returns the numbers of the layers of a cache that a block reads and writes; none where it does not say."""
    numbers = (getattr(each, "layer_idx", None) for each in module.modules())
    return frozenset(number for number in numbers if isinstance(number, int))


def holds_state(cache: Any, layers: Collection[int]) -> bool:
    """Says whether a cache holds anything for some layers; for any, if these are unknown.

    A single number is none: layers with a window have its size in a tensor.
    """
    return any(tensor.numel() > 1 for tensor in _tensors(cache, layers))


def watch_callers(model: nn.Module, blocks: Collection[nn.Module]) -> ExitStack:
    """Notes the caches that the modules around blocks are called with, until what it returns is closed.

    Those who call them may read what blocks have written. The hooks raise LeftEmptyError where a plain step would read
    what blocks have left out.
    """
    stack = ExitStack()
    for module in model.modules():
        if module not in blocks and any(each in blocks for each in module.modules()):
            stack.callback(module.register_forward_pre_hook(InstanceHook(_note_given), with_kwargs=True).remove)
    return stack


def _note_given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for cache in filter(is_cache, (*args, *kwargs.values()) if torch.is_grad_enabled() else ()):
        # Another block of the same call may have left it empty, as where layers are blocks or hold such.
        if any(block in _left_empty.get(cache, ()) for block in model.modules()):
            _filling.update(model.modules())
            del _left_empty[cache]
            raise LeftEmptyError(
                f"the loss gives the model a {type(cache).__name__} that an earlier call has made, and layers that are "
                "recomputed have left it empty. They fill such caches from now on: run the step again"
            )
        _given.add(cache)


def is_left_empty(cache: Any, block: nn.Module, layers: Collection[int]) -> bool:
    """Says whether a cache has nothing for the layers of a block, and nobody reads it later; notes it if so."""
    read = block in _filling or any(part in _given for part in (cache, *filter(is_cache, vars(cache).values())))
    if read or holds_state(cache, layers):
        return False
    _left_empty.setdefault(cache, WeakSet()).add(block)
    return True


def _tensors(value: Any, layers: Collection[int]) -> Iterator[Tensor]:
    """Yields the tensors that a cache, or a part of one, has for some layers, or for all."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _tensors(each, layers)
    elif isinstance(value, dict) or _is_part(value):
        for name, each in (value if isinstance(value, dict) else vars(value)).items():
            if layers and name == "layers" and isinstance(each, list):
                each = [part for place, part in enumerate(each) if place in layers]
            yield from _tensors(each, layers)


def _is_part(value: Any) -> bool:
    """Says whether a value is a cache, or a layer of one."""
    return any("Cache" in kind.__name__ for kind in type(value).__mro__)


def as_it_is(value: Any, layers: Collection[int]) -> Any:
    """Returns a copy of a cache: writes to some layers of either, or to any if these are unknown, are not the other's.

    Copied tensors are detached, and no leaves, as blocks may write to them. They need gradients as theirs do, so that
    autograd saves the same where a block runs again.
    """
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad).clone()
    if isinstance(value, dict):
        return {key: as_it_is(each, layers) for key, each in value.items()}
    if isinstance(value, list):
        return [as_it_is(each, layers) for each in value]
    if not _is_part(value):
        return value
    new = copy(value)
    for name, each in vars(value).items():
        if layers and name == "layers" and isinstance(each, list):
            found = [as_it_is(part, layers) if place in layers else copy(part) for place, part in enumerate(each)]
        else:
            found = as_it_is(each, layers)
        object.__setattr__(new, name, found)
    return new
