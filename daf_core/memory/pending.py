"""Results that are not known yet, and the tensors that are kept alive until then."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

PENDING_BYTES = 64 << 20
"""Bytes of tensors that may wait at once: five of the largest of RoBERTa-base at batch 8 x 128. A GPU is seldom further
behind: it reads them in a fraction of a millisecond."""


class Signal:
    """Is set once, by one thread, and awaited by others.

    `threading.Event` takes a lock in Python code: an interrupt such as Ctrl-C in `wait` can leave it taken, and `set`
    would wait for it for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Ends all waits; further calls do nothing."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self) -> None:
        """Returns when it is set."""
        while not self._is_set:
            # After an interrupt between the two calls, others notice within the timeout.
            if self._lock.acquire(timeout=1):
                self._lock.release()


class Pending(ABC):
    """A result that another thread or a device works out.

    Attributes:
        size: Bytes of the tensor that waits for it.
    """

    size: int

    @abstractmethod
    def settle(self) -> object:
        """Waits for the result, and lets go of the tensor if it is not needed any more."""


P = TypeVar("P", bound=Pending)


class PendingWindow(Generic[P]):
    """The results of one kind that are not known yet, oldest first.

    Attributes:
        size: Bytes of all tensors that wait.
    """

    def __init__(self) -> None:
        self.size = 0
        self._items: deque[tuple[Callable[[], P | None], int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, pending: P, reference: Callable[[], P | None]) -> None:
        """Adds the newest; `reference` returns it, or None where nobody needs it any more."""
        self._items.append((reference, pending.size))
        self.size += pending.size

    @property
    def oldest(self) -> P | None:
        """The oldest, of at least one; None where nobody needs it any more."""
        return self._items[0][0]()

    def settle_oldest(self) -> P | None:
        """Waits for the oldest, takes it out and returns it; one that raises an error stays."""
        reference, size = self._items[0]
        if (pending := reference()) is not None:
            pending.settle()
        self._items.popleft()
        self.size -= size
        return pending
