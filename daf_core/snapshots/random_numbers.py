"""The states of random generators: those that a process has, and those that a model has of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    RandomGenerator = random.Random | np.random.RandomState | np.random.Generator | torch.Generator


class RandomNumbers:
    """Random generators as they are now: Python's, numpy's, torch's of the CPU and of some devices, and others."""

    def __init__(self, devices: Collection[torch.device] = (), others: Collection[RandomGenerator] = ()) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        with_generator = [device for device in devices if device.type not in ("cpu", "meta")]
        self._devices = [(device, _module(device).get_rng_state(*_place(device))) for device in with_generator]
        states = map(state_of, others)
        self._others = [(write, read()) for read, write in filter(None, states)]

    def restore(self) -> None:
        """Takes them back, any number of times."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            _module(device).set_rng_state(state, *_place(device))
        for write, state in self._others:
            write(state)


def generators_of(model: nn.Module) -> list[RandomGenerator]:
    """Returns the generators that modules have as attributes."""
    return [value for module in model.modules() for value in vars(module).values() if _is_generator(type(value))]


@lru_cache(maxsize=1024)
def _is_generator(kind: type) -> bool:
    # Asked of each type once: a model of 478 modules has 11,000 attributes. Not looked up when this file is imported:
    # numpy loads 14 modules for them.
    return issubclass(kind, (random.Random, np.random.RandomState, np.random.Generator, torch.Generator))


def state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Returns what reads and what writes the state of a generator; None for anything else."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator
        return lambda: numbers.state, lambda state: setattr(numbers, "state", state)
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    return None


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
