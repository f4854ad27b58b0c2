"""The tier below memory: a file that holds pages."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from daf_core.errors import SpillError
from daf_core.memory import forks
from daf_core.memory.pages.free_list import FreeList, runs
from daf_core.memory.tiers.base import Tier
from daf_kernels import PageMemory, Pages

CHUNK_BYTES = 1 << 20
"""Bytes that are copied between pages and file at a time: the only memory that spilling takes."""

SLOTS_STEP = 4096
"""Slots by which the file's table grows: 200 kB of bookkeeping for 16 MB."""


class SpillFile(Tier):
    """A tier on disk: a file with a slot for each page that was written to it. Thread-safe.

    It has no name in its folder, so that the system deletes it when the process ends, in whatever way. It is read and
    written, not mapped: where a disk is full or broken, a mapped page ends the process with a signal, while a call
    returns an error. What is read must have the sums of what was written: to add up the words of each page takes 20 us
    for a megabyte (one core of an EPYC), where a CRC takes 155 us, and a change of one word always shows.

    A forked child has a file of its own, and cannot read what its parent has written.

    Raises:
        SpillError: The folder takes no file.
    """

    queued = False  # what `read` and `write` return from is done

    def __init__(self, folder: str | Path, page_bytes: int) -> None:
        self._folder = Path(folder)
        self._page_bytes = page_bytes
        self._slots = FreeList()
        self._end = 0
        self._sums = np.empty(0, np.int64)
        self._writers = np.empty(0, np.int64)
        self._lock = forks.lock(forks.Level.TIER)
        self._open()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    @override
    def write(self, memory: PageMemory, pages: Pages) -> Pages:
        """Copies pages into the file and returns their slots.

        Raises:
            SpillError: The disk is full or does not answer.
        """
        with self._lock:
            if os.getpid() != self._process:
                self._file.close()
                self._open()
            slots = self._take(pages.size)
            try:
                for start, rows in self._chunks(slots):
                    content = memory.read(pages[rows]).cpu().numpy()
                    self._sums[slots[rows]] = _sums_of(content)
                    self._write_at(start, content.data.cast("B"))
                self._writers[slots] = self._process
            except BaseException as error:
                self._slots.give(slots)
                if not isinstance(error, OSError):
                    raise
                from humanfriendly import format_size  # 10 ms that a program without the error does not pay

                raise SpillError(
                    f"cannot write {format_size(pages.size * self._page_bytes)} of activations to the spill file in "
                    f"{str(self._folder)!r}: {error}. Free space there, name another spill_dir, or raise memory_budget"
                ) from error
        return slots

    @override
    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        """Copies what lies in the slots back into pages.

        Raises:
            SpillError: The file is not what was written to it, another process has written it, or the disk does not
                answer.
        """
        if (self._writers[slots] != os.getpid()).any():
            raise SpillError(
                "activations that were saved before this process was forked lie in the spill file of its parent, which "
                "goes on writing to it. Run the forward pass again in this process, or fork before it"
            )
        try:
            for start, rows in self._chunks(slots):
                content = torch.empty((rows.stop - rows.start, self._page_bytes), dtype=torch.uint8, device="cpu")
                with self._lock:
                    self._read_at(start, content.numpy().data.cast("B"))
                if not np.array_equal(_sums_of(content.numpy()), self._sums[slots[rows]]):
                    raise OSError("the file was changed after it was written")
                memory.write(pages[rows], content)
        except OSError as error:
            raise SpillError(
                f"cannot read activations back from the spill file in {str(self._folder)!r}: {error}. This step is "
                "lost; check the disk, or name another spill_dir"
            ) from error

    @override
    def free(self, slots: Pages) -> None:
        """Gives slots back."""
        with self._lock:
            self._slots.give(slots)
            if not self._slots.used:
                self._end = 0  # a file that was cut is as good as new

    def _open(self) -> None:
        try:
            # Open for as long as this object lives: no block of code ends with it.
            self._file: Any = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SpillError(
                f"cannot make a spill file in {str(self._folder)!r}: {error}. Name a folder that exists and may be "
                "written to"
            ) from error
        self._process, self._end = os.getpid(), 0

    def _take(self, count: int) -> Pages:
        missing = count - self._slots.count
        if missing > 0:
            self._slots.extend(max(missing, SLOTS_STEP))
            self._sums, self._writers = (np.resize(each, self._slots.total) for each in (self._sums, self._writers))
        return self._slots.take(count)

    def _chunks(self, slots: Pages) -> Iterator[tuple[int, slice]]:
        """Cuts slots into runs of neighbours of at most `CHUNK_BYTES`: (first slot, rows of `slots`)."""
        most = max(CHUNK_BYTES // self._page_bytes, 1)
        for run in runs(slots):
            for start in range(run.start, run.stop, most):
                yield int(slots[start]), slice(start, min(start + most, run.stop))

    def _write_at(self, slot: int, content: memoryview) -> None:
        length = os.fstat(self._file.fileno()).st_size
        if length < self._end:  # writing behind the end would fill the gap with zeros
            raise OSError(f"the file was cut from {self._end} to {length} bytes")
        self._file.seek(slot * self._page_bytes)
        while content:
            content = content[self._file.write(content) :]
        self._end = max(self._end, self._file.tell())

    def _read_at(self, slot: int, content: memoryview) -> None:
        self._file.seek(slot * self._page_bytes)
        while content:
            count = self._file.readinto(content)
            if not count:
                raise OSError(f"the file ends {len(content)} bytes early")
            content = content[count:]


def _sums_of(content: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the sum of the words of each page."""
    return content.view(np.int64).sum(1)
