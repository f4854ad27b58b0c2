"""A model's forward replaced on the model itself, so that nothing else notices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a forward and its arguments, and returns what it returns."""


class ForwardWrapper:
    """Runs something around a model's forward until `remove`.

    The signature stays, as trainers read columns off it, and so do class, state_dict and pickles. A deep copy of the
    model runs its plain forward.

    Args:
        model: The model.
        around: What runs instead.
    """

    def __init__(self, model: nn.Module, around: Around) -> None:
        self.model = model
        self._replaced = vars(model).get("forward")
        model.forward = self._wrapped(model.forward, around)

    def remove(self) -> None:
        """Puts back what was there."""
        if self._replaced is None:
            del self.model.forward
        else:
            self.model.forward = self._replaced

    def _wrapped(self, forward: Callable[..., Any], around: Around) -> Callable[..., Any]:
        function = getattr(forward, "__func__", None)
        if function is None or getattr(forward, "__self__", None) is not self.model:
            # A compiled model's forward is a function of no object.
            @functools.wraps(forward)
            def unbound(*args: Any, **kwargs: Any) -> Any:
                return around(forward, args, kwargs)

            return unbound

        @functools.wraps(function)
        def bound(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self.model:
                return function(module, *args, **kwargs)
            return around(functools.partial(function, module), args, kwargs)

        return MethodType(bound, self.model)
