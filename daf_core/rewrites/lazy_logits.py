"""Logits that are computed only if somebody looks at them."""

# pyright: reportPrivateUsage=false
# torch documents `_make_wrapper_subclass` for tensors without memory of their own, underscore or not.

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self

from daf_core.autograd.functions import apply, once_differentiable
from daf_core.errors import ModifiedInPlaceError, ReaderError
from daf_core.rewrites.base import autocast_device
from daf_core.rewrites.chunked_loss import Bend

_METADATA: set[Any] = {
    Tensor.dim,
    Tensor.ndimension,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf")
    ),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested")),
}
"""What is known of logits that were not computed."""

_GUARDS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
"""Modules whose hooks on what a model returns look at how backward is run, and at no gradient."""

_OF_GRADIENTS: set[Any] = {Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad}

_DIVISIONS: set[Any] = {Tensor.div, Tensor.true_divide, torch.div, torch.true_divide}
_PRODUCTS: set[Any] = {Tensor.mul, Tensor.multiply, torch.mul, torch.multiply}
_TANH: set[Any] = {Tensor.tanh, torch.tanh}
"""What models do to their logits before the loss, one by one: Gemma limits them by a tanh, Cohere and Granite scale."""

Change = tuple[Any, ...]
"""A function of a tensor, and what it is given beside it."""

_WITHOUT_AUTOCAST = (torch.float64, torch.complex64, torch.complex128)


class Updates:
    """Counts the steps of optimizers that hold one of some parameters.

    An optimizer that writes to ``parameter.data``, or by a kernel of its own, leaves no trace in a tensor's version.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.count = 0
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        step = weakref.WeakMethod(self._add)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            add = step()
            if add is not None:
                add(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def watch(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the parameters are these, and not what sharding or a functional call has put in their place."""
        given = list(parameters)
        known = [reference() for reference in self._parameters]
        return len(given) == len(known) and all(one is other for one, other in zip(given, known, strict=True))

    def _add(self, optimizer: Optimizer) -> None:
        watched = [parameter for parameter in (reference() for reference in self._parameters) if parameter is not None]
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.count += any(one is other for other in held for one in watched)


class LogitsSource:
    """What logits (..., vocabulary) are computed from, in the state in which the output projection ran.

    Args:
        hidden: Hidden states, (..., hidden size), as autograd recorded them.
        weight: Weight of the projection, (vocabulary, hidden size).
        bias: Its bias, (vocabulary,), or None.
        updates: Counts the steps of optimizers that train weight or bias; None if nobody does.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, updates: Updates | None = None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
        self.dtype = _result_dtype(hidden)
        self.gave_loss = False  # the loss was computed from the hidden states, so that logits have no gradient
        self._updates = updates
        self._state = self._current_state()
        self._logits: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits: (..., vocabulary)."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def is_computed(self) -> bool:
        """Whether somebody has looked at the logits."""
        return self._logits is not None

    def logits(self) -> Tensor:
        """Returns the logits, recorded by autograd; from the second call on, the same tensor again."""
        if self._logits is None:
            self._check()
            autocast = torch.autocast(autocast_device(self.hidden), enabled=False)
            with torch.inference_mode(False), torch.enable_grad(), autocast:
                self._logits = torch.nn.functional.linear(*(tensor.to(self.dtype) for tensor in self.inputs))
        return self._logits

    def _current_state(self) -> tuple[Any, ...]:
        versions = [(tensor._version, tensor.data_ptr()) for tensor in self.inputs]
        return versions, None if self._updates is None else self._updates.count

    def _check(self) -> None:
        released = any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in self.inputs)
        if released or self._current_state() != self._state:
            raise ModifiedInPlaceError(
                "these logits were not computed in the forward pass, as the loss needed none, and the weight of the "
                "output projection or the hidden states have changed since, as in an optimizer's step. Read them "
                "before that, or set chunked_loss=False"
            )


class LazyLogits(Tensor):
    """Logits without memory. Whatever is done with them, but for asking their shape and the like, computes them.

    What it is done with is then an ordinary tensor, part of the graph that the output projection would have recorded.
    Lazy logits again are given by `float`, `to` a type that has all their values, and `clone`, which mixed precision
    and distributed training put around a model, and by what models do to their logits: a factor, and one tanh.
    """

    source: LogitsSource
    changes: tuple[Change, ...]
    _logits: Tensor | None = None

    def __new__(cls, source: LogitsSource, changes: tuple[Change, ...]) -> Self:
        """Makes the tensor alone, without a graph."""
        dtype = next((change[1] for change in reversed(changes) if change[0] is Tensor.to), source.dtype)
        lazy = Tensor._make_wrapper_subclass(cls, source.shape, dtype=dtype, device=source.hidden.device)
        lazy.source, lazy.changes = source, changes
        return lazy

    @classmethod
    def of(cls, source: LogitsSource, changes: tuple[Change, ...] = ()) -> Self:
        """Returns the logits of a source, with a node of autograd's for code that passes the tensor on as it is."""
        return cast("Self", apply(_Project, source.hidden, source.weight, source.bias, source, changes))

    @property
    def bend(self) -> Bend:
        """How the logits follow from what the output projection gives."""
        scale, limit = 1.0, None
        for function, *numbers in self.changes:
            if function in _TANH:
                limit = 1.0
            elif function is not Tensor.to:
                factor = 1 / numbers[0] if function in _DIVISIONS else numbers[0]
                scale, limit = (scale * factor, None) if limit is None else (scale, limit * factor)
        return Bend(scale, limit)

    def computed(self) -> Tensor:
        """Returns the logits as an ordinary tensor, with a graph where these have one."""
        if self._logits is None:
            with torch.inference_mode(False), torch.enable_grad():
                self._logits = _changed(self.source.logits(), self.changes)
        return self._logits if self.requires_grad else self._logits.detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owners = {getattr(getattr(hook, "func", hook), "__module__", None) for hook in args[1:]}
        if func in _METADATA or (func is Tensor.register_hook and not owners.isdisjoint(_GUARDS)):
            return super().__torch_function__(func, types, args, kwargs or {})
        lazies = [each for each in tree_leaves((args, kwargs)) if isinstance(each, LazyLogits)]
        if func in _OF_GRADIENTS and any(each.source.gave_loss for each in lazies):
            raise ReaderError(  # it would find no gradient, and say nothing
                "these logits have no gradient, as the loss was computed from the hidden states. Set chunked_loss=False"
            )
        again = _again(func, args, kwargs)
        if again is not None:
            return again
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd has recorded the operator already, with the node that `of` made.
        args, kwargs = tree_map_only(LazyLogits, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Project(torch.autograd.Function):
    """Stands in the graph for the output projection."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: LogitsSource,
        changes: tuple[Change, ...],
    ) -> Tensor:
        ctx.source, ctx.changes = source, changes
        return LazyLogits(source, changes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source: LogitsSource = ctx.source
        # By hand: with tied embeddings the hidden states depend on the weight as well.
        with torch.enable_grad():
            logits = source.logits().detach().requires_grad_()
            (gradient,) = torch.autograd.grad(_changed(logits, ctx.changes), logits, gradient)
        slopes = gradient.reshape(-1, gradient.shape[-1])
        states = source.hidden.detach().reshape(-1, source.hidden.shape[-1]).to(source.dtype)
        hidden, weight, bias = ctx.needs_input_grad[:3]
        return (
            (slopes @ source.weight.detach().to(source.dtype)).view_as(source.hidden) if hidden else None,
            slopes.t() @ states if weight else None,
            slopes.sum(0) if bias else None,
            None,
            None,
        )


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> LazyLogits | None:
    """Returns lazy logits for the operators that give such."""
    if kwargs or not args or not isinstance(args[0], LazyLogits) or args[0].source.is_computed:
        return None
    lazy, rest = args[0], args[1:]
    if func in (Tensor.clone, torch.clone) and not rest:
        return LazyLogits.of(lazy.source, lazy.changes)
    change = _as_change(func, rest, lazy)
    if change is None:
        return None
    return lazy if change[1:] == (lazy.dtype,) else LazyLogits.of(lazy.source, (*lazy.changes, change))


def _as_change(func: Any, rest: tuple[Any, ...], lazy: LazyLogits) -> Change | None:
    """Returns what an operator does to logits, where it is known."""
    if func in _TANH:
        return None if rest or any(change[0] in _TANH for change in lazy.changes) else (func,)
    if len(rest) == 1 and func in _DIVISIONS | _PRODUCTS:
        number = rest[0]
        return (func, number) if isinstance(number, float | int) and math.isfinite(number) and number else None
    if func is Tensor.float and not rest:
        rest = (torch.float32,)
    elif func is not Tensor.to:
        return None
    wide = rest[0] if len(rest) == 1 else None
    if not isinstance(wide, torch.dtype) or not wide.is_floating_point:
        return None
    return (Tensor.to, wide) if torch.promote_types(wide, lazy.dtype) is wide else None


def _changed(logits: Tensor, changes: tuple[Change, ...]) -> Tensor:
    for function, *rest in changes:
        logits = function(logits, *rest)
    return logits


def _values(lazy: LazyLogits) -> Tensor:
    return lazy.computed().detach()


def _result_dtype(hidden: Tensor) -> torch.dtype:
    """Returns the type that a linear layer's result has now."""
    device = autocast_device(hidden)
    autocast = torch.is_autocast_enabled(device) and hidden.dtype not in _WITHOUT_AUTOCAST
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype
