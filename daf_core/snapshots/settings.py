"""How modules are set: what their forward passes read besides tensors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from daf_core.snapshots.attributes import REGISTERED

LARGEST = 100  # items of a collection up to which it is no data

_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}

_COLLECTIONS = {list, dict}

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = (*_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Settings:
    """How the modules of a model are set now, such as which of their adapters are active.

    That is: attributes that are plain values or small lists and dictionaries of these, which parameters need gradients,
    and hooks of forward passes, but for DAF's own, which are switched on and off beside them. An attribute that has
    become something else, such as a tensor, is a state rather than a setting.
    """

    def __init__(self, model: nn.Module) -> None:
        # What torch.jit has made keeps its attributes elsewhere.
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._modules = [_ModuleSettings(vars(module)) for module in modules]

    @contextmanager
    def again(self) -> Generator[None]:
        """Sets the modules so inside, and afterwards as they were just before."""
        before = [module.set_again() for module in self._modules]
        try:
            yield
        finally:
            for module in before:
                module.put_back()


class _ModuleSettings:
    """How a module with these attributes is set now."""

    __slots__ = ("_attributes", "_contents", "_hooks", "_known", "_need_gradients", "_values")

    def __init__(self, attributes: dict[str, Any]) -> None:
        values, contents = dict[str, Any](), dict[str, Any]()
        for name, value in attributes.items():  # some 30
            if _is_setting(name, value):
                values[name] = value
                if type(value) in _COLLECTIONS:
                    contents[name] = value.copy()
        self._attributes, self._known, self._values, self._contents = attributes, list(attributes), values, contents
        self._hooks = dict[str, Any]()
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            self._hooks = {name: dict(attributes[name]) for name in _ABOUT_HOOKS}
        parameters = attributes["_parameters"].items()
        self._need_gradients = {name: each.requires_grad for name, each in parameters if each is not None}

    def set_again(self) -> _ModuleSettings:
        """Sets the module so, but for attributes that are no settings now; returns how it was set.

        Collections are copies: what is written to them is gone with them.
        """
        now = _ModuleSettings(self._attributes)
        values = self._values | {name: content.copy() for name, content in self._contents.items()}
        others = self._attributes.keys() - now._values.keys()
        self._write({name: value for name, value in values.items() if name not in others})
        return now

    def put_back(self) -> None:
        """Sets the module so, with the collections themselves."""
        self._write(self._values)

    def _write(self, values: dict[str, Any]) -> None:
        attributes = self._attributes
        for name in attributes.keys() - self._known:
            if _is_setting(name, attributes[name]):
                del attributes[name]  # its class may have another value
        attributes.update(values)
        if self._hooks or attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            self._write_hooks()
        for name, needs_gradient in self._need_gradients.items():
            parameter = attributes["_parameters"].get(name)
            if parameter is not None and parameter.requires_grad is not needs_gradient and parameter.is_leaf:
                parameter.requires_grad_(needs_gradient)

    def _write_hooks(self) -> None:
        hooks = [self._attributes[name] for name in _ABOUT_HOOKS]
        before = [self._hooks.get(name, {}) for name in _ABOUT_HOOKS]
        called = [*hooks[: len(_HOOKS)], *before[: len(_HOOKS)]]
        own = {number for each in called for number, hook in each.items() if _is_own(hook)}
        for now, then in zip(hooks, before, strict=True):
            kept = {number: hook for number, hook in now.items() if number in own}
            now.clear()
            now.update({number: hook for number, hook in then.items() if number not in own} | kept)


def _is_own(hook: object) -> bool:
    """Says whether a hook is DAF's."""
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").partition(".")[0] == "daf_core"


def _is_setting(name: str, value: Any) -> bool:
    """Says whether an attribute is a plain value, or a collection of few such values."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind not in _COLLECTIONS or name in REGISTERED or len(value) > LARGEST:
        return False
    return not value or all(type(each) in _PLAIN for each in (value if kind is list else value.values()))
