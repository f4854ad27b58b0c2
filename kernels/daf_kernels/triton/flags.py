"""Flags that kernels set where they find what they do not encode, and how the host learns of them."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from daf_kernels.backend import DeviceFlag, is_capturing
from daf_kernels.triton.launch import stream_number, stream_of

FLAGS = 1024
"""Flags of an array: zeros for so many activations are one call. A report copies 16 kB for them."""

WORDS = 4
"""Numbers of 32 bits of a flag: kernels are compiled for addresses that 16 divides, as those of tensors are."""


class _Report:
    """A copy of an array on the host, of which all flags are answered whose kernels were launched before.

    Attributes:
        numbers: The copy, of shape (FLAGS, WORDS); None as long as nobody has asked for it.
        copied: When it is there.
    """

    def __init__(self) -> None:
        self.numbers: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def is_set(self, number: int) -> bool:
        """Says whether a flag is set, once the copy is there."""
        assert self.numbers is not None
        return bool(self.numbers.numpy()[number, 0])  # torch takes 5 us to look at a number


class _Array:
    """Flags of one stream, each of which is used once: no answer has to be read before another kernel may run.

    Zeros, kernels and copies are given to the same stream, so they happen in this order without being waited for. Torch
    gives the memory of an array that is no longer used to what the stream does after them.

    Attributes:
        flags: A tensor of shape (WORDS,) for each flag.
        origin: Address of the first.
        taken: How many are in use.
        report: The next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(FLAGS, WORDS, dtype=torch.int32, device=device)
        stream = stream_of(device)
        assert stream is not None
        self._stream = stream
        self._lock = threading.Lock()
        self.flags = self._numbers.unbind()
        self.origin: int = self._numbers.data_ptr()
        self.taken = 0
        self.report = _Report()

    def _on_its_stream(self) -> AbstractContextManager[object]:
        """To make another stream the current one takes as long as the copy, and nearly always it is."""
        is_current = stream_number(self._numbers.device) == self._stream.cuda_stream
        return nullcontext() if is_current else torch.cuda.stream(self._stream)

    def send(self, report: _Report) -> torch.cuda.Event:
        """Has the device copy the flags, unless it has done so for this report; returns when they are there."""
        with self._lock:
            if report.copied is None:
                self.report = _Report()  # first, so that whoever launches meanwhile does not rely on this copy
                with self._on_its_stream():
                    # To pinned memory, to which a GPU copies without being waited for.
                    report.numbers = self._numbers.to("cpu", non_blocking=True, copy=True)
                    copied = torch.cuda.Event()
                    copied.record(self._stream)
                report.copied = copied
            return report.copied


class AsyncFlag:
    """Yes, unless kernels have set a flag of a GPU; made after they were launched.

    Args:
        array: Has the flag.
        number: Which one it is.
    """

    def __init__(self, array: _Array, number: int) -> None:
        self._array = array
        self._number = number
        self._report = array.report

    def ask(self) -> None:
        """See `DeviceFlag.ask`; all flags of its stream that were not asked for are sent with it."""
        if self._report.copied is None:
            self._array.send(self._report)

    @property
    def is_known(self) -> bool:
        """See `DeviceFlag.is_known`."""
        copied = self._report.copied
        return copied is not None and copied.query()

    def __bool__(self) -> bool:
        """See `DeviceFlag.__bool__`."""
        self._array.send(self._report).synchronize()
        return not self._report.is_set(self._number)


class Flag(NamedTuple):
    """A flag that is not set yet.

    Attributes:
        pointer: What kernels set to 1, an int32.
        array: Has the flag; None where the device is waited for with each kernel, or never, in a CUDA graph.
        number: Which one of the array it is.
    """

    pointer: Tensor
    array: _Array | None = None
    number: int = 0

    @property
    def address(self) -> int:
        """Where it lies, if it is one of an array."""
        assert self.array is not None
        return self.array.origin + self.number * WORDS * self.pointer.element_size()

    def unless(self) -> bool | DeviceFlag:
        """Returns whether the kernels that were launched with it have not set it, or will not; yes in a CUDA graph."""
        if self.array is not None:
            return AsyncFlag(self.array, self.number)
        return is_capturing() or not self.pointer.item()


class Flags:
    """The flags of all devices and streams. Thread-safe."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[torch.device, int], _Array] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> Flag:
        """Returns a flag for kernels that the calling thread launches."""
        stream = stream_number(device)
        if stream is None or is_capturing():  # what a graph sets to zero belongs to the graph
            return Flag(torch.zeros(1, dtype=torch.int32, device=device))
        key = device, stream
        with self._lock:
            array = self._arrays.get(key)
            if array is None or array.taken == FLAGS:
                array = self._arrays[key] = _Array(device)
            number = array.taken
            array.taken += 1
        return Flag(array.flags[number], array, number)
