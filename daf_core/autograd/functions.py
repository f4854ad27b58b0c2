"""Operators of DAF's own, each with a backward of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function

from daf_core.errors import ReaderError


def apply(cls: type[Function], *arguments: Any) -> Any:
    """Calls ``cls.apply``, and has a frame while it saves: from torch 2.14 on torch's own is written in C.

    The frame tells who is saving. Without it values wait until the graph does, and the first step takes more memory.
    """
    return cls.apply(*arguments)


NOT_TWICE = (
    "the gradient of a gradient is asked for (create_graph=True), and DAF computes the loss of a language model, and "
    "with a memory budget gated layers and dropouts of attention, in a form that can be differentiated once. Set "
    "chunked_loss=False, and memory_budget to None"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Has a static method `backward` refuse gradients that are to be differentiated.

    Torch's decorator of this name does so where the gradient that `backward` gets was made of others, and where the
    second backward comes by what `backward` has returned. A loss gets a constant, and `torch.autograd.grad` of
    parameters does not come there: what it lacks would be taken for zero.

    Raises:
        ReaderError: By the method, where ``create_graph`` is True.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ReaderError(NOT_TWICE)
        return backward(ctx, *gradients)

    return once
