"""A model's forward replaced on the model itself, so that nothing else notices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from daf_core.autograd.torch_compile import Around, leave_to_run, run_uncompiled

_WRAPPER = "_daf_wrapper"  # attribute of a function that says which wrapper made it


class ForwardPatch:
    """Runs `around`, given a model's forward and its arguments, in place of that forward until `remove`.

    The signature stays, as trainers read columns off it, and so do class, state_dict and pickles. A deep copy of the
    model runs its plain forward.
    Where it is `hidden`, torch.compile sees the forward alone, where somebody compiles the model afterwards. It
    compiles `around` as well otherwise.
    """

    def __init__(self, model: nn.Module, around: Around, hidden: bool = False) -> None:
        self.model, self._hidden = model, hidden
        self._replaced = vars(model).get("forward")
        self._bound: object = None
        # Not by `setattr`: Lightning Fabric's wrapper of a model sets what it is given on the model inside, too.
        vars(model)["forward"] = self._wrapped(
            model.forward, functools.partial(run_uncompiled, around) if hidden else around
        )

    def remove(self) -> None:
        """Puts back what was there."""
        if self._replaced is None:
            del vars(self.model)["forward"]
        else:
            vars(self.model)["forward"] = self._replaced

    def is_leftover(self, function: object, module: nn.Module) -> bool:
        """Whether a function is this wrapper's, and a module a copy of the model: it runs what was wrapped."""
        return function is self._bound and module is not self.model

    def _wrapped(self, forward: Callable[..., Any], around: Around) -> Callable[..., Any]:
        function = getattr(forward, "__func__", None)
        if function is None or getattr(forward, "__self__", None) is not self.model:
            # A compiled model's forward is a function of no object.
            @functools.wraps(forward)
            def unbound(*args: Any, **kwargs: Any) -> Any:
                return around(forward, args, kwargs)

            return self._made(unbound)

        @functools.wraps(function)
        def bound(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self.model:
                return function(module, *args, **kwargs)
            return around(functools.partial(function, module), args, kwargs)

        setattr(bound, _WRAPPER, self)
        self._bound = self._made(bound)
        return MethodType(bound, self.model)

    def _made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._hidden:
            leave_to_run(function)
        return function


def runs_own_forward(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class.

    A copy of a wrapped module, or one that was read from a pickle, does so by way of an attribute.
    """
    forward = vars(module).get("forward")
    function = type(module).forward if forward is None else getattr(forward, "__func__", None)
    if forward is not None and getattr(forward, "__self__", None) is not module:
        return False
    while function is not type(module).forward:
        wrapper = getattr(function, _WRAPPER, None)
        if not isinstance(wrapper, ForwardPatch) or not wrapper.is_leftover(function, module):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
