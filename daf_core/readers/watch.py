"""Sees what torch's functions return: the graph that they have built tells who has saved what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function
from typing_extensions import override

from daf_core.autograd.torch_private import Node

CANCELLING = frozenset({"corrcoef", "cosine_similarity", "cov"})
"""Functions of torch whose gradient is what is left where terms cancel that are up to a thousand times as large: all
that is saved while they run stays exact. At 4 bits the error of the gradient was above .5."""

MOST_SHOWN = 64
"""Values that are looked at in what a forward pass returns: it may be a list of anything."""

_HANDLE: CodeType = handle_torch_function.__code__


class Watch(TorchFunctionMode):
    """Calls a function with each tensor that torch's functions return. It takes 2 us a call.

    `exact` returns a context manager inside which everything that is saved is kept exact.
    """

    def __init__(self, show: Callable[[Tensor], None], exact: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._show = show
        self._exact = exact

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._exact() if getattr(func, "__name__", "") in CANCELLING else nullcontext():
            result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # a function is compiled that the model calls: it is no part of it
            return result
        for tensor in _tensors(result):
            self._show(tensor)
        return result


_WATCH: CodeType = Watch.__torch_function__.__code__


def unwatched(frame: FrameType | None) -> FrameType | None:
    """Returns the function that would be running if nothing was watched, where `frame` is.

    A function of torch's that is written in Python is called once more by the watch, with two functions between.
    """
    while frame is not None and frame.f_code is _WATCH:
        frame = frame.f_back
        if frame is not None and frame.f_code is _HANDLE and frame.f_back is not None:
            frame = frame.f_back.f_back
    return frame


def _tensors(result: object) -> Iterator[Tensor]:
    if type(result) in (Tensor, nn.Parameter):
        yield result  # pyright: ignore[reportReturnType]
    elif isinstance(result, tuple | list):
        for each in result:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(each)  # pyright: ignore[reportUnknownArgumentType]


def nodes_of(result: object) -> Iterator[Node]:
    """Yields the nodes that have made the first tensors in what a forward pass returns, whatever holds them."""
    pending: list[Any] = [result]
    for each in pending:
        found: Iterable[Any] = ()
        if isinstance(each, Tensor):
            with suppress(RuntimeError):  # a view whose base was changed has none
                if each.grad_fn is not None:
                    yield each.grad_fn
        elif isinstance(each, Mapping):
            found = each.values()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(each, tuple | list):
            found = each  # pyright: ignore[reportUnknownVariableType]
        elif hasattr(each, "__dict__"):
            found = vars(each).values()
        pending += islice(found, MOST_SHOWN - len(pending))  # pyright: ignore[reportUnknownArgumentType]
