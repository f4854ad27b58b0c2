"""How much memory is really available, and a budget that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

RESERVE_SHARE = 0.05
LEAST_RESERVE = 128 << 20
"""Of all memory, this share and at least these bytes stay free: passing a control group's limit is no exception that
could be caught, it ends the process."""

HEAD_ROOM = 1.3
PATIENCE = 10
"""A budget falls at once, and rises after `PATIENCE` steps in a row with `HEAD_ROOM` times as much room."""

TIGHTER = 0.8
STEPS_BEFORE_RETRY = 100
"""Where memory has run out, the next try may take `TIGHTER` times as much as planned; after `STEPS_BEFORE_RETRY` steps
the ceiling rises by as much, as failing takes a step or two."""

PROC = Path("/proc/self/cgroup")
"""The file that names this process's control groups; where it is missing there are none."""

MOUNT = Path("/sys/fs/cgroup")
"""Where control groups are mounted, versions 1 and 2."""


class AutoBudget:
    """A memory budget for one device: what is available there beside a reserve.

    Args:
        device: The device.
        most: Bytes that it never exceeds.
        relieve: Is called before the budget is lowered, to give back memory that is only kept for later.
    """

    def __init__(
        self, device: torch.device, most: int | None = None, relieve: Callable[[], None] | None = None
    ) -> None:
        self._device = device
        self._most = most
        self._relieve = relieve
        self._budget: int | None = None
        self._room = 0
        self._roomy_steps = 0
        self._ceiling: int | None = None
        self._steps_below = 0

    def update(self, own: int, reserved: int = 0) -> int:
        """Returns the budget for the next forward pass.

        Args:
            own: Bytes on the device that saved activations hold or held: they may be used again.
            reserved: Bytes of the budget that something else will take.
        """
        self._room = self._measure(own)
        lower = self._room < (self._most or 0) if self._budget is None else self._room < self._budget
        if lower and self._relieve is not None:
            self._relieve()
            self._room = self._measure(own)
        if self._budget is None or self._room < self._budget:
            self._budget, self._roomy_steps = self._room, 0
        left = max(self._budget - reserved, 0)
        return left if self._ceiling is None else min(left, self._ceiling)

    def lower(self, ceiling: int) -> None:
        """Sets a ceiling below the budget, as memory has run out; `finish_step` raises it again."""
        self._ceiling, self._steps_below = ceiling, 0

    def remove_ceiling(self) -> bool:
        """Removes the ceiling; returns whether there was one."""
        found, self._ceiling = self._ceiling, None
        return found is not None

    def _measure(self, own: int) -> int:
        total, available = device_memory(self._device)
        room = beside_reserve(total, available + own)
        return room if self._most is None else min(room, self._most)

    def finish_step(self) -> bool:
        """Ends a step, which may raise the budget or the ceiling; returns whether the ceiling has risen."""
        roomy = self._budget is not None and self._room > HEAD_ROOM * self._budget
        self._roomy_steps = self._roomy_steps + 1 if roomy else 0
        if self._roomy_steps >= PATIENCE:
            self._budget, self._roomy_steps = self._room, 0
        self._steps_below += 1
        if self._ceiling is None or self._steps_below < STEPS_BEFORE_RETRY:
            return False
        self.lower(int(self._ceiling / TIGHTER))
        if self._most is not None and self._ceiling >= self._most:
            self._ceiling = None
        return True


def beside_reserve(total: int, available: int) -> int:
    """Returns how many of the available bytes may be used."""
    return max(available - max(int(total * RESERVE_SHARE), LEAST_RESERVE), 0)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Returns the total and the available bytes of a device's memory; the host's for a device without its own."""
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total, free + cached


def host_memory() -> tuple[int, int]:
    """Returns total and available bytes of main memory, within all limits of control groups and of the process."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in (*_limits(), *_limits_of_process()):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _limits_of_process() -> Iterator[tuple[int, int]]:
    """Yields the limit and the use of this process's address space, and of its data (``ulimit -v`` and ``-d``)."""
    if resource is None:
        return
    used = psutil.Process().memory_info()
    # Only Linux says how much data there is; what it counts has the stack as well, 8 MB at most.
    for kind, size in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield limit, size


def _limits() -> Iterator[tuple[int, int]]:
    """Yields the limit and the use of each control group that this process is in, and of those above them.

    What the kernel can take back from a group's file cache does not count as used.
    """
    try:
        lines = PROC.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_of(MOUNT, path, ("memory.max", "memory.high"), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits_of(
                MOUNT / "memory", path, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits_of(
    root: Path, path: str, limit_files: tuple[str, ...], usage_file: str, cache: str
) -> Iterator[tuple[int, int]]:
    group = root / path.lstrip("/")
    # Inside a container the path is that of the host, and only the root of the mount is there.
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        used = _number(folder / usage_file)
        if used is None:
            continue
        used -= _cache(folder / "memory.stat", cache)
        yield from ((limit, used) for name in limit_files if (limit := _number(folder / name)) is not None)


def _number(file: Path) -> int | None:
    """Returns the number in a file; None where there is no file, or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cache(file: Path, name: str) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in file.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))
