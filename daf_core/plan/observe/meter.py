"""How much memory tensors take while something runs, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from daf_core.autograd.torch_private import storage_id
from daf_core.memory.system.mortal import at_death


class AllocatorMeter:
    """Reads the counters of a GPU's caching allocator, and resets its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    @property
    def level(self) -> int:
        """Bytes that are allocated now."""
        return torch.cuda.memory_allocated(self._device) - self._start

    def take_peak(self) -> int:
        """Returns the most bytes that were allocated at once since the last call."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._start
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def __enter__(self) -> Self:
        self._start = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TensorMeter(TorchDispatchMode):
    """Follows the storages that torch's operators return, in this thread and in its backward passes.

    Memory that an operator takes and gives back inside of itself is not seen. Each operator takes about 20 us more.
    `beside` returns bytes that are taken outside of tensors; `after` gets the level after each operator.
    """

    def __init__(self, beside: Callable[[], int] = int, after: Callable[[int], object] = int) -> None:
        super().__init__()
        self._beside, self._after = beside, after
        self._known: dict[int, tuple[int, object]] = {}
        self._freed: deque[tuple[int, int]] = deque()
        self._tensors = 0
        self._peak = 0

    @property
    def level(self) -> int:
        """Bytes that tensors made inside take now, and what is beside them."""
        self._forget_freed()
        return self._tensors + self._beside()

    def take_peak(self) -> int:
        """Returns the most bytes that were taken at once since the last call."""
        peak, self._peak = max(self._peak, self.level), self.level
        return peak

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._known.clear()
        self._freed.clear()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            self._note(value, own=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, own=True)
        level = self.level
        self._peak = max(self._peak, level)
        self._after(level)
        return result

    def _note(self, value: Any, own: bool) -> None:
        """Looks at the tensors in an operator's arguments, which were there before, or in its result."""
        if isinstance(value, list | tuple):
            for item in value:
                self._note(item, own)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            number = storage_id(value)
            self._forget_freed()
            if number not in self._known:
                size = storage.nbytes() if own else 0
                self._tensors += size
                self._known[number] = size, at_death(storage, int, number, self._freed.append)

    def _forget_freed(self) -> None:
        while self._freed:
            size, _ = self._known.pop(self._freed.popleft()[1])
            self._tensors -= size


MemoryMeter = AllocatorMeter | TensorMeter
"""Measures the bytes of a device's memory, inside a ``with`` block, above those at its beginning."""


def meter_on(device: torch.device) -> MemoryMeter:
    """Returns a meter for a device."""
    return AllocatorMeter(device) if device.type == "cuda" else TensorMeter()
