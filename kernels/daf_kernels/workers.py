"""A small pool of threads that kernels of large tensors are split over."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


class WorkerPool:
    """Runs a function over ranges of elements on this thread and `threads` - 1 others.

    The function must release the GIL to run at the same time. Threads start with the first use, and again after a fork.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._process = 0
        self._executor: ThreadPoolExecutor | None = None

    def run(self, function: Callable[[int, int], Result], elements: int, tile: int, least: int) -> list[Result]:
        """Calls ``function(first, stop)`` for ranges that cover [0, elements) and returns the results in order.

        Ranges begin at multiples of `tile` and hold at least `least` elements, except the last.
        """
        parts = min(self.threads, max(1, elements // least))
        step = -(-elements // (parts * tile)) * tile
        first, *others = [(start, min(start + step, elements)) for start in range(0, elements, step)]
        futures = [self._pool().submit(function, *part) for part in others]
        try:
            return [function(*first), *(future.result() for future in futures)]
        except BaseException:
            wait(futures)  # kernels hold addresses: one that went on would write into memory that the caller frees
            raise

    def _pool(self) -> ThreadPoolExecutor:
        if self._executor is None or self._process != os.getpid():
            # In this order: another thread never meets the new process number beside the executor of the old process.
            self._executor = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="daf-worker")
            self._process = os.getpid()
        return self._executor
