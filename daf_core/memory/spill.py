"""The tier below memory: a file that holds pages, and a thread that reads them back before backward needs them."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from daf_core.errors import SpillError
from daf_core.memory.free_list import FreeList, runs
from daf_kernels import PageMemory, Pages

CHUNK_BYTES = 1 << 20
"""Bytes that are copied between pages and file at a time: the only memory that spilling takes."""

SLOTS_STEP = 4096
"""Slots by which the file's table grows: 128 kB of bookkeeping for 16 MB."""


class SpillFile:
    """A `Tier` on disk: a file with a slot for each page that was written to it. Thread-safe.

    It has no name in its folder, so that nobody can change it and the system deletes it when the process ends, in
    whatever way. It is read and written, not mapped: where a disk is full or broken, a mapped page ends the process
    with a signal, while a call returns an error.

    Args:
        folder: Where the file lies.
        page_bytes: Bytes in a page.

    Raises:
        SpillError: The folder takes no file.
    """

    queued = False

    def __init__(self, folder: str | Path, page_bytes: int) -> None:
        self._folder = Path(folder)
        self._page_bytes = page_bytes
        self._slots = FreeList()
        self._end = 0
        self._lock = threading.Lock()
        try:
            # Open for as long as this object lives: no block of code ends with it.
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SpillError(
                f"cannot make a spill file in {str(folder)!r}: {error}. Name a folder that exists and may be written to"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    @property
    def used_slots(self) -> int:
        """Slots that hold a page."""
        return self._slots.used

    def write(self, memory: PageMemory, pages: Pages) -> Pages:
        """Copies pages into the file and returns their slots.

        Raises:
            SpillError: The disk is full or does not answer.
        """
        with self._lock:
            if pages.size > self._slots.count:
                self._slots.extend(max(pages.size - self._slots.count, SLOTS_STEP))
            slots = self._slots.take(pages.size)
            try:
                for start, rows in self._chunks(slots):
                    self._write_at(start, memory.read(pages[rows]).cpu().numpy().data.cast("B"))
            except BaseException as error:
                self._slots.give(slots)
                if not isinstance(error, OSError):
                    raise
                raise SpillError(
                    f"cannot write {pages.size * self._page_bytes / 1e6:.1f} MB of activations to the spill file in "
                    f"{str(self._folder)!r}: {error}. Free space there, name another spill_dir, or raise memory_budget"
                ) from error
        return slots

    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        """Copies what lies in the slots back into pages.

        Raises:
            SpillError: The file is shorter than what was written to it, or the disk does not answer.
        """
        try:
            for start, rows in self._chunks(slots):
                content = torch.empty((rows.stop - rows.start, self._page_bytes), dtype=torch.uint8, device="cpu")
                with self._lock:
                    self._read_at(start, content.numpy().data.cast("B"))
                memory.write(pages[rows], content)
        except OSError as error:
            raise SpillError(
                f"cannot read activations back from the spill file in {str(self._folder)!r}: {error}. This step is "
                "lost; check the disk, or name another spill_dir"
            ) from error

    def wait(self, slots: Pages | None = None) -> None:
        """See `Tier.wait`: what `read` and `write` return from is done."""

    def finish_step(self) -> None:
        """See `Tier.finish_step`: there is no memory to give back."""

    def free(self, slots: Pages) -> None:
        """Gives slots back."""
        with self._lock:
            self._slots.give(slots)
            if not self.used_slots:
                self._end = 0  # a file that was cut is as good as new

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


class ReadAhead:
    """Loads spilled activations in backward order, on a thread of its own where that takes time.

    Args:
        load_next: A method that loads the one that is needed next before a serial number and returns its own, or None
            to stop. Its object is not kept alive.
        queued: Whether it only queues the loads: the thread that starts it then does so at once.
        device: What it loads them to. A GPU loads in the order of what the thread that starts it has it compute.
    """

    def __init__(
        self, load_next: Callable[[int], int | None], queued: bool = False, device: torch.device | None = None
    ) -> None:
        self._load_next = weakref.WeakMethod(load_next)
        self._device = device
        self._queued = queued
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._stopping = False
        self._lock = threading.Lock()

    def start(self, serial: int) -> None:
        """Goes on before activation `serial`, unless it is at work already."""
        with self._lock:
            if self._running is not None and not self._running.done():
                return
            self._stopping = False
            if self._queued:
                self._run(serial)
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="daf-read-ahead")
            self._running = self._executor.submit(self._run_on, _stream_of_caller(self._device), serial)

    def stop(self) -> None:
        """Waits until the activation that is being loaded is there, and loads no further ones."""
        with self._lock:
            running, self._stopping = self._running, True
        if running is not None:
            running.result()

    def _run_on(self, stream: AbstractContextManager[object], serial: int) -> None:
        with stream:
            self._run(serial)

    def _run(self, serial: int) -> None:
        following: int | None = serial
        while following is not None and not self._stopping:
            load_next = self._load_next()
            if load_next is None:
                return
            try:
                following = load_next(following)
            except Exception:
                return  # whoever needs the activation reads it again, and gets the error


def _stream_of_caller(device: torch.device | None) -> AbstractContextManager[object]:
    """Returns what has another thread use the calling one's CUDA stream: each thread has a current one of its own."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))
