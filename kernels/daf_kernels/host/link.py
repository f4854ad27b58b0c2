"""What connects a GPU with the memory of its host: pinned memory, copies beside its other work, and waiting for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


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


class HostBridge:
    """The link of a GPU that torch calls "cuda", which works on its own while its host goes on.

    Pinned memory has one address for the host and for all GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._reads: dict[int, torch.cuda.Event] = {}

    def reserve(self, size: int) -> Tensor:
        """Returns uninitialized bytes of host memory that the device can read.

        Raises:
            MemoryError: The system has none.
        """
        return pinned_memory(size)

    def mark(self) -> torch.cuda.Event:
        """Returns the moment at which all is done that the calling thread has given the device so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, moment: torch.cuda.Event) -> Generator[None]:
        """Inside, the device does what the calling thread gives it after a moment, and beside what others give it."""
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, values: Tensor, into: Tensor) -> torch.cuda.Event:
        """Begins to copy values of the device to memory of `reserve`; until the moment, neither may be touched."""
        into.copy_(values, non_blocking=True)
        return self.mark()

    def note_reads(self) -> None:
        """Notes that the device may still be reading host memory as the calling thread has told it to.

        The last read of a stream stands for those before it.
        """
        self._reads[torch.cuda.current_stream(self._device).cuda_stream] = self.mark()

    def await_reads(self) -> None:
        """Returns when the device has done all reads that were noted."""
        for read in list(self._reads.values()):
            read.synchronize()


def host_bridge(device: torch.device) -> HostBridge | None:
    """Returns the link of a device to its host; None for one that needs none, or that DAF knows none for."""
    return HostBridge(device) if device.type == "cuda" else None
