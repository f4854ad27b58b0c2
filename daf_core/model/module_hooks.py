"""Hooks that belong to one model, and not to copies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InstanceHook:
    """Calls a function, and does nothing in a copy: of a deep copy of a model, or one from a pickle, hooks are copies.

    Args:
        function: What is called, with a hook's arguments; its result is dropped.
    """

    def __init__(self, function: Callable[..., object] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Calls the function, if this is no copy."""
        if self._function is not None:
            self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[type[InstanceHook], tuple[()]]:
        return InstanceHook, ()
