"""What connects a GPU with the memory of its host: pinned memory, copies beside its other work, and waiting for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Moment(Protocol):
    """A point in what a device was given to do."""

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        ...


class HostBridge(Protocol):
    """A device that works on its own while its host goes on, and that reads host memory at the host's addresses."""

    def reserve(self, size: int) -> Tensor:
        """Returns uninitialized bytes of host memory that the device can read.

        Raises:
            MemoryError: The system has none.
        """
        ...

    def mark(self) -> Moment:
        """Returns the moment at which all is done that the calling thread has given the device so far."""
        ...

    def after(self, moment: Moment) -> AbstractContextManager[None]:
        """Inside, the device does what the calling thread gives it after a moment, and beside what others give it."""
        ...

    def copy(self, values: Tensor, into: Tensor) -> Moment:
        """Begins to copy values of the device to memory of `reserve`; until the moment, neither may be touched."""
        ...

    def note_reads(self) -> None:
        """Notes that the device may still be reading host memory as the calling thread has told it to."""
        ...

    def await_reads(self) -> None:
        """Returns when the device has done all reads that were noted."""
        ...


def host_bridge(device: torch.device) -> HostBridge | None:
    """Returns the link of a device to its host; None for one that needs none, or that DAF knows none for."""
    return CudaBridge(device) if device.type == "cuda" else None


def pinned_memory(size: int) -> Tensor:
    """Returns uninitialized bytes of host memory that every GPU can read, and copy while its host goes on.

    Torch rounds the size up to a power of two, and keeps what is freed for itself.

    Raises:
        MemoryError: The system has none.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(f"the system gives no {size / 1e6:.0f} MB of pinned memory: {error}") from error


class CudaBridge:
    """The link of a GPU that torch calls "cuda". Pinned memory has one address for the host and for all GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._reads: dict[int, torch.cuda.Event] = {}

    def reserve(self, size: int) -> Tensor:
        """See `HostBridge.reserve`."""
        return pinned_memory(size)

    def mark(self) -> Moment:
        """See `HostBridge.mark`."""
        return self._event()

    @contextmanager
    def after(self, moment: Moment) -> Generator[None]:
        """See `HostBridge.after`."""
        assert isinstance(moment, torch.cuda.Event)
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, values: Tensor, into: Tensor) -> Moment:
        """See `HostBridge.copy`."""
        into.copy_(values, non_blocking=True)
        return self.mark()

    def note_reads(self) -> None:
        """See `HostBridge.note_reads`: the last read of a stream stands for those before it."""
        self._reads[torch.cuda.current_stream(self._device).cuda_stream] = self._event()

    def await_reads(self) -> None:
        """See `HostBridge.await_reads`."""
        for read in list(self._reads.values()):
            read.synchronize()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
