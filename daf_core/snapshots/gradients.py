"""The gradients of a model, put aside."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def gradients_aside(model: nn.Module) -> Generator[None]:
    """Puts gradients of zero in place of those there are, so that a pass adds none to them and none to memory.

    Hooks that wait for gradients see none of it: they may be those of an optimizer that steps in backward.
    """
    before = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
    # Torch has no public way to ask for hooks, and keeps the dictionary itself.
    hooks = [found for parameter, _ in before if (found := getattr(parameter, "_post_accumulate_grad_hooks", None))]
    contents = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    for parameter, _ in before:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for found, content in zip(hooks, contents, strict=True):
            found.update(content)
        for parameter, gradient in before:
            parameter.grad = gradient
