"""Hooks that belong to one model, and not to copies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from daf_core.autograd.torch_private import in_backward


class InstanceHook:
    """Calls a function and drops its result; does nothing in a copy, which deep copies and pickles of a model make."""

    def __init__(self, function: Callable[..., object] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Calls the function, if this is no copy."""
        if self._function is not None:
            self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[type[InstanceHook], tuple[()]]:
        return InstanceHook, ()


class CallHooks:
    """Watches the calls of modules until `remove`."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def watch(self, module: nn.Module, enter: Callable[[Any], None], leave: Callable[[Any, Any], None]) -> None:
        """Watches a module.

        Before its forward, `enter` gets the pair of its arguments and keyword arguments; after it, `leave` gets this
        pair and the output.
        """

        def before(_module: nn.Module, *arguments: Any) -> None:
            enter(arguments)

        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            leave((args, kwargs), output)

        self._handles.append(module.register_forward_pre_hook(InstanceHook(before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(InstanceHook(after), with_kwargs=True))

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_training_pass() -> bool:
    """Whether a forward pass is one of training: not a recomputation, and not without gradients."""
    return torch.is_grad_enabled() and not in_backward()
