"""Runs a model aside of its training: nothing that training goes on with is changed."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Gives random generators and the model's buffers (running statistics) back as they were.

    Gradients and parameters are left to what runs inside.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, name, buffer, before in buffers:
            setattr(module, name, _restored(buffer, before))


def _restored(buffer: Tensor, before: Tensor) -> Tensor:
    """Returns the buffer with its content of before, written where it has changed: a graph may need what has not.

    Contents are compared because batch normalization updates its running statistics without counting a version. They
    are written without counting one, too. A sparse buffer, or one of another size, is replaced.
    """
    if buffer.layout is not torch.strided or buffer.shape != before.shape:
        return before
    if not torch.equal(_bytes(buffer), _bytes(before)):
        buffer.data.copy_(before)
    return buffer


def _bytes(buffer: Tensor) -> Tensor:
    """Returns the content as bytes, in which a NaN equals itself and every type can be compared."""
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
