"""A GPU that does not exist: Triton compiles for it, and what would be launched is written down.

All that is private of Triton's and that tests lean on is here (tried with triton 3.6 and 3.9).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_87": GPUTarget("cuda", 87, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    """What a GPU would have been given."""

    grid: tuple[int, ...]
    stream: int
    function: int
    arguments: tuple[Any, ...]


class _Utilities:
    """What Triton asks of a driver to load what it compiled: each load gives another number as its handle."""

    def __init__(self) -> None:
        self.loaded = 0

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.loaded += 1
        module, registers, spills, largest_program = self.loaded, 0, 0, 1024
        return module, self.loaded, registers, spills, largest_program

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 64 << 10}  # of a program: what gfx942 has, the least of all

    def unload_module(self, module: int) -> None:
        """Nothing to unload."""


class FakeDriver:
    """Driver of a machine with any number of GPUs of one kind.

    Attributes:
        device: Number of the current one.
        launches: What it was given, in order.
    """

    def __init__(self, target: str) -> None:
        self._target = TARGETS[target]
        self.utils = _Utilities()
        self.device = 0
        self.launches: list[Launch] = []

    def launcher_cls(self, source: object, metadata: object) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            # Between the function and its arguments: metadata of the kernel and of the launch, and two hooks.
            self.launches.append(Launch((x, y, z), stream, function, rest[4:]))

        return launch

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    @contextmanager
    def device_guard(self, device: torch.device) -> Iterator[None]:
        """What ``torch.cuda.device`` is; a CPU counts as the first GPU."""
        before, self.device = self.device, device.index or 0
        yield
        self.device = before


def pretend(target: str) -> FakeDriver:
    """Makes this process take tensors of the CPU for those of a GPU that is one of `TARGETS`, for good."""
    driver = FakeDriver(target)
    triton.runtime.driver.set_active(driver)
    torch.cuda.device = driver.device_guard
    return driver
