"""The tier below a GPU's memory: memory of the host, pinned where it can be, and the stream that copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor

from daf_core.errors import SpillError
from daf_core.memory import forks
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.system.available import beside_reserve, host_memory
from daf_kernels import PageMemory, Pages, pinned_memory, system_memory

CHUNK_BYTES = 4 << 20
"""Bytes that are gathered on the GPU, or scattered there, at a time: twice as many are the memory that a copy takes."""

STEP_BYTES = 64 << 20
"""Bytes by which pinned memory grows; torch rounds what it pins up to a power of two."""

CPU = torch.device("cpu")

NOT_PINNED = (
    "%s. What moves off the GPU goes to pageable memory from now on, and training waits for its copies. A larger "
    "memory_budget moves less"
)

log = getLogger("daf")

Mark = Any
"""A copy that can be waited for."""


class SideStream:
    """Copies between a device and the host on a CUDA stream of their own, one after the other, behind what is computed.

    A device is taken to compute on one stream, which is current in each thread that saves activations or reads them
    back; autograd sees to that in backward. The copies share one stream, in either direction: so no slot is written
    before it was read, nor read before it was written, and only computations are to be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None]) -> Mark:
        """Queues a copy, after all copies and computations that were queued before it; the thread does not wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                copy()
        except BaseException:
            self._stream.synchronize()  # the pages of what was queued are given back
            raise
        return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Has what is computed from now on come after a copy: the stream waits, the thread does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class PinnedFirst:
    """Memory of the host for pages of a GPU: pinned, and pageable once the system pins no more, as WSL2 soon does."""

    def __init__(self) -> None:
        self._pins = True

    def reserve(self, size: int) -> Tensor:
        """Returns so many uninitialized bytes, and says once where they are pageable.

        Raises:
            MemoryError: The system has none.
        """
        if self._pins:
            try:
                return pinned_memory(size)
            except MemoryError as error:
                self._pins = False
                log.warning(NOT_PINNED, error)
        return system_memory(size, CPU)


class HostMemory:
    """A `Tier` in the host's memory: a GPU copies to and from pinned slots behind what is computed."""

    queued = True

    def __init__(self, device: torch.device, slots: PagePool, copies: SideStream) -> None:
        self._device = device
        self._slots = slots
        self._copies = copies
        self._last: Mark | None = None
        self._arrivals: dict[int, Mark] = {}
        self._lock = forks.lock(forks.Level.TIER)

    def write(self, memory: PageMemory, pages: Pages) -> Pages:
        """See `Tier.write`."""
        with self._lock:
            slots = self._take(pages.size)
            try:
                self._last = self._copies.run(partial(copy_to_host, memory, pages, self._slots, slots))
            except BaseException:
                self._slots.give(slots)
                raise
            return slots

    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        """See `Tier.read`."""
        with self._lock:
            self._last = self._copies.run(partial(copy_to_device, self._slots, slots, memory, pages, self._device))
            self._arrivals[int(slots[0])] = self._last

    def wait(self, slots: Pages | None = None) -> None:
        """See `Tier.wait`."""
        with self._lock:
            if slots is not None:
                mark = self._arrivals.pop(int(slots[0]), None)
            else:
                mark, self._last = self._last, None
            if mark is not None:
                self._copies.wait(mark)

    def free(self, slots: Pages) -> None:
        """See `Tier.free`."""
        with self._lock:
            self._arrivals.pop(int(slots[0]), None)
            self._slots.give(slots)

    def finish_step(self) -> None:
        """See `Tier.finish_step`; torch keeps pinned memory for whoever asks for some next."""
        self.wait()  # copies of what is gone may not be made yet
        with self._lock:
            self._slots.finish_step()

    def _take(self, count: int) -> Pages:
        pool = self._slots
        missing = (pool.used_pages + count) * pool.page_bytes - pool.reserved_bytes
        try:
            return self._grow(count, missing) if missing > 0 else pool.take(count)
        except MemoryError as error:
            from humanfriendly import format_size  # 10 ms that a program without the error does not pay

            raise SpillError(
                f"cannot move {format_size(count * pool.page_bytes)} of activations to main memory: {error}. "
                "Free main memory, name a spill_dir, or raise memory_budget"
            ) from error

    def _grow(self, count: int, missing: int) -> Pages:
        """Takes slots that are not there yet: too much pinned memory ends processes, without an exception."""
        total, available = host_memory()
        room = beside_reserve(total, available)
        if room < missing:
            from humanfriendly import format_size

            raise MemoryError(f"{format_size(room)} are left beside the reserve")
        return self._slots.take(count, self._slots.reserved_bytes + room)


def host_memory_of(device: torch.device, page_bytes: int) -> HostMemory | None:
    """Returns the tier below a device's memory; None where that is the host's."""
    if device.type != "cuda":
        return None
    slots = PagePool(CPU, STEP_BYTES, page_bytes, PinnedFirst().reserve)
    return HostMemory(device, slots, SideStream(device))


def copy_to_host(memory: PageMemory, pages: Pages, host: PagePool, slots: Pages) -> None:
    """Copies pages of a device to those of the host in `slots`; a GPU does so later, where these are pinned."""
    chunk = max(CHUNK_BYTES // memory.page_bytes, 1)
    for start in range(0, pages.size, chunk):
        content = memory.read(pages[start : start + chunk])
        for rows, there in host.runs(slots[start : start + chunk]):
            there.copy_(content[rows], non_blocking=there.is_pinned())


def copy_to_device(host: PagePool, slots: Pages, memory: PageMemory, pages: Pages, device: torch.device) -> None:
    """Copies the host's pages in `slots` to those of a device; a GPU does so later, where these are pinned."""
    chunk = max(CHUNK_BYTES // memory.page_bytes, 1)
    for start in range(0, pages.size, chunk):
        part = pages[start : start + chunk]
        content = torch.empty((part.size, memory.page_bytes), dtype=torch.uint8, device=device)
        for rows, there in host.runs(slots[start : start + chunk]):
            content[rows].copy_(there, non_blocking=there.is_pinned())
        memory.write(part, content)
