"""A thread that reads spilled pages back before backward needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from daf_core.memory import forks


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
        self._lock = forks.lock(forks.Level.READ_AHEAD)
        forks.follow(self)

    def start(self, serial: int) -> None:
        """Goes on before activation `serial`, unless it is at work already."""
        with self._lock:
            if self._running is not None and not self._running.done():
                return
            self._stopping = False
            if self._queued:
                self._run(nullcontext(), serial)
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="daf-read-ahead")
            self._running = self._executor.submit(self._run, _stream_of_caller(self._device), serial)

    def stop(self) -> None:
        """Waits until the activation that is being loaded is there, and loads no further ones."""
        with self._lock:
            running, self._stopping = self._running, True
        if running is not None:
            running.result()

    def rest(self, seconds: float) -> None:
        """See `Worker.rest`; the next `start` goes on."""
        if self._running is not None:
            self._stopping = True
            wait([self._running], seconds)

    def revive(self) -> None:
        """See `Worker.revive`."""
        self._executor = self._running = None

    def _run(self, stream: AbstractContextManager[object], serial: int) -> None:
        following: int | None = serial
        with stream, suppress(Exception):  # whoever needs the activation reads it again, and gets the error
            while following is not None and not self._stopping and (load_next := self._load_next()) is not None:
                following = load_next(following)


def _stream_of_caller(device: torch.device | None) -> AbstractContextManager[object]:
    """Returns what has another thread use the calling one's CUDA stream: each thread has a current one of its own."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))
