"""GELU written as several operators, each of which saves a result: one operator saves its input alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.base import Undo, is_bare, own_attributes

Activation = Callable[[Tensor], Tensor]

QUICK = 1.702  # the factor of the approximation ``x * sigmoid(1.702 * x)``
REACH, SAMPLES = 8.0, 257  # inputs that are compared: from minus to plus 8, beyond which GELU is 0 or its input to 1e-9

_CONSTANT = (int, float, str, type(None))

TOLERANCE = 1e-9
"""Largest difference in float64. The forms differ from each other by 5e-4 and more, and constants that are written with
ten digits by 1e-10."""


def quick_gelu(inputs: Tensor) -> Tensor:
    """Returns ``x * sigmoid(1.702 * x)``, of which autograd saves one tensor and not two."""
    return functional.silu(inputs * QUICK) / QUICK


FORMS: tuple[Activation, ...] = (partial(functional.gelu, approximate="tanh"), functional.gelu, quick_gelu)
"""What a module may be equal to."""


def find_gelu(module: nn.Module) -> Activation | None:
    """Returns what a module that is called GELU computes, if it saves more than it must; None for all others.

    It is called on a few numbers: a name alone says nothing of the formula. A copy of it is, in training and in
    evaluation, with random numbers of its own, so that nothing of that is left behind.
    """
    named = "gelu" in type(module).__name__.lower()
    if not named or not is_bare(module) or any(True for _ in module.children()):
        return None
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    try:
        found = [_probe_copy(module, training) for training in (True, False)]
    except Exception:  # whatever a stranger's module raises, it is none that takes a tensor alone
        return None

    def agrees(form: Activation) -> bool:
        other = _probe(form)
        return all(_agrees(own, other) for own in found)

    return next(filter(agrees, FORMS), None)


def rewrite_gelu(module: nn.Module, form: Activation) -> Undo:
    """Makes a module compute the form from `find_gelu` where autograd records it; returns what undoes it.

    As long as its attributes are those with which it was found to do so.
    """
    known = own_attributes(module)

    def around(forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if kwargs or len(args) != 1 or not torch.is_grad_enabled() or own_attributes(module) != known:
            return forward(*args, **kwargs)
        inputs = args[0]
        overflows = form is quick_gelu and inputs.dtype is torch.float16  # from 38,000 on
        return form(inputs) if inputs.is_floating_point() and not overflows else forward(inputs)

    return ForwardPatch(module, around).remove


def _probe_copy(module: nn.Module, training: bool) -> tuple[Tensor, Tensor, int]:
    """Returns what `_probe` does of a copy of a module.

    Raises:
        ValueError: It may change when it is called, and somebody read that.
    """
    twin = copy.deepcopy(module).train(training)
    before = own_attributes(twin)
    with torch.random.fork_rng(devices=[]):
        found = _probe(twin.forward)
    if not all(callable(value) or isinstance(value, _CONSTANT) for value in before.values()):
        raise ValueError(f"{type(module).__name__} has attributes that may change")
    if own_attributes(twin) != before:
        raise ValueError(f"{type(module).__name__} changes when it is called")
    return found


def _probe(function: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor, int]:
    """Returns values, derivatives, and how many tensors autograd saves."""
    saved: set[int] = set()
    inputs = torch.linspace(-REACH, REACH, SAMPLES, dtype=torch.float64, device="cpu").requires_grad_()

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == SAMPLES:
            saved.add(tensor.data_ptr())
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        values = function(inputs)
        (slopes,) = torch.autograd.grad(values.sum(), inputs)
    return values.detach(), slopes, len(saved)


def _agrees(own: tuple[Tensor, Tensor, int], form: tuple[Tensor, Tensor, int]) -> bool:
    near = partial(torch.allclose, rtol=0.0, atol=TOLERANCE)
    alike = own[2] > form[2] and own[0].shape == form[0].shape and own[0].dtype is form[0].dtype
    return alike and near(own[0], form[0]) and near(own[1], form[1])
