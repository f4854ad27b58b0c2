"""Random generators and buffers as they are now, and their way back."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] what all have in common


class RandomNumbers:
    """The random generators as they are now: Python's, numpy's, torch's of the CPU and of these devices."""

    def __init__(self, devices: Collection[torch.device] = ()) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        with_generator = [device for device in devices if device.type not in ("cpu", "meta")]
        self._devices = [(device, _module(device).get_rng_state(*_place(device))) for device in with_generator]

    def restore(self) -> None:
        """Takes them back, any number of times."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            _module(device).set_rng_state(state, *_place(device))


NORMALIZATION = _NormBase
"""What batch and instance normalizations have in common: running statistics, which no pass of training reads."""


class Buffers:
    """The buffers of a model as they are now, such as running statistics.

    Up to `largest` bytes, if given, those are kept that are no statistics of normalizations.
    """

    def __init__(self, model: nn.Module, largest: int | None = None) -> None:
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if largest is None
            or isinstance(module, NORMALIZATION)
            or buffer.layout is not torch.strided
            or buffer.nbytes <= largest
        ]

    def restore(self) -> None:
        """Takes them back, any number of times."""
        for module, name, buffer, before in self._buffers:
            setattr(module, name, _restored(buffer, before))


def devices_of(model: nn.Module) -> set[torch.device]:
    """Returns the devices that parameters of the model are on."""
    return {parameter.device for parameter in model.parameters()}


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


def _restored(buffer: Tensor, before: Tensor) -> Tensor:
    """Returns the buffer with its content of before, written where it has changed: a graph may need what has not.

    Contents are compared because batch normalization updates its running statistics without counting a version. They
    are written without counting one, too. A sparse buffer is replaced.
    """
    if buffer.layout is not torch.strided:
        return before.clone()
    if buffer.shape != before.shape:
        buffer.data = before.clone()
    if not torch.equal(_bytes(buffer), _bytes(before)):
        buffer.data.copy_(before)
    return buffer


def _bytes(buffer: Tensor) -> Tensor:
    """Returns the content as bytes, in which a NaN equals itself and every type can be compared."""
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
