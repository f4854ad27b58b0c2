"""How modules are set: what their forward passes read and do not write, such as the names of active adapters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from daf_core.snapshots.attributes import REGISTERED

LARGEST = 100  # items of a collection up to which it is no data

_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = (*_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

Written = set[tuple[int, str]]
"""What passes write themselves: by the identity of a module's attributes, and the name of one of them."""


class Settings:
    """How the modules of a model are set as a pass begins.

    That is: attributes that are plain values, or lists or dictionaries of a few of these, which parameters need
    gradients, and hooks of forward passes, but for DAF's own, which are switched on and off beside them. What passes
    change themselves, such as caches, counts and the flags of a first call, is no setting; `written` collects it.
    """

    def __init__(self, model: nn.Module, written: Written) -> None:
        # What torch.jit has made keeps its attributes elsewhere.
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._modules = [_ModuleSettings(vars(module)) for module in modules]
        self._written = written

    def end_pass(self) -> None:
        """The pass has ended."""
        for module in self._modules:
            self._written.update((id(module.attributes), name) for name in module.changed())

    @contextmanager
    def again(self) -> Generator[None]:
        """Sets the modules inside as they were, and afterwards as they were just before."""
        undo = list[Callable[[], None]]()
        try:
            for module in self._modules:
                changed = [name for name in module.changed() if (id(module.attributes), name) not in self._written]
                undo += [module.set_again(name) for name in changed]
            yield
        finally:
            for each in undo:
                each()


class _ModuleSettings:
    """How a module with these attributes is set now."""

    __slots__ = ("_hooks", "_need_gradients", "_values", "attributes")

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        self._values = {name: value for name, value in attributes.items() if _is_setting(name, value)}
        self._hooks = _hooks(attributes)
        parameters = attributes["_parameters"].items()
        self._need_gradients = {name: each.requires_grad for name, each in parameters if each is not None}

    def changed(self) -> Iterator[str]:
        """Yields the names of what is set otherwise now."""
        attributes = self.attributes
        for name, value in self._values.items():
            if (now := attributes.get(name, attributes)) is not value and _is_setting(name, now) and now != value:
                yield name
        if self._hooks != _hooks(attributes):
            yield _HOOKS[0]
        for name, needs_gradient in self._need_gradients.items():
            parameter = attributes["_parameters"].get(name)
            if parameter is not None and parameter.requires_grad is not needs_gradient and parameter.is_leaf:
                yield name

    def set_again(self, name: str) -> Callable[[], None]:
        """Sets what has a name as it was, and returns what sets it as it is now."""
        attributes = self.attributes
        if name == _HOOKS[0]:
            now = _hooks(attributes)
            _set_hooks(attributes, self._hooks)
            return lambda: _set_hooks(attributes, now)
        if name in self._need_gradients:
            parameter = attributes["_parameters"][name]
            parameter.requires_grad_(self._need_gradients[name])
            return lambda: parameter.requires_grad_(not self._need_gradients[name])
        value = attributes[name]
        attributes[name] = self._values[name]
        return lambda: attributes.update({name: value})


def _is_setting(name: str, value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if (kind is not list and kind is not dict) or name in REGISTERED or len(value) > LARGEST:
        return False
    return not value or all(type(each) in _PLAIN for each in (value if kind is list else value.values()))


def _hooks(attributes: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """Returns all about the hooks of a module but DAF's own; nothing where there are none."""
    if not (attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]):
        return {}
    own = _own_hooks(attributes)
    found = {name: {n: hook for n, hook in attributes[name].items() if n not in own} for name in _ABOUT_HOOKS}
    return found if any(found.values()) else {}


def _set_hooks(attributes: dict[str, Any], hooks: dict[str, dict[int, Any]]) -> None:
    own = _own_hooks(attributes)
    for name in _ABOUT_HOOKS:
        kept = {number: hook for number, hook in attributes[name].items() if number in own}
        attributes[name].clear()
        attributes[name].update(hooks.get(name, {}) | kept)


def _own_hooks(attributes: dict[str, Any]) -> set[int]:
    """Returns the numbers of DAF's hooks of forward passes."""
    return {number for name in _HOOKS for number, hook in attributes[name].items() if is_of_daf(hook)}


def is_of_daf(hook: object) -> bool:
    """Says whether a hook is DAF's."""
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").partition(".")[0] == "daf_core"
