"""What a fork leaves of DAF: the child has the memory of its parent, and of its threads only the one that forked.

So before a fork DAF's own threads come to rest, and nobody else holds a lock of DAF's: what the child inherits is not
in the middle of a change. It starts threads of its own when it needs them.
"""

from __future__ import annotations

import os
import threading
from enum import IntEnum
from itertools import count
from typing import Protocol

from daf_core.memory.system.mortal import WeakValues

PATIENCE = 10.0
"""Seconds that a fork waits for each of them: 64 MB, the most that is in flight, are packed in a fraction of one. A
signal handler that forks would wait for the thread that it has interrupted."""


class Level(IntEnum):
    """What a lock guards. While one is held, only those of later levels are taken."""

    DOUBTS = 0
    KEPT = 1
    DEVICES = 2
    READ_AHEAD = 3
    PAGER = 4
    TIER = 5
    POOL = 6


class Worker(Protocol):
    """Has a thread of its own."""

    def rest(self, seconds: float) -> None:
        """Returns when the thread has done what it was given, or after so many seconds."""
        ...

    def revive(self) -> None:
        """Forgets the thread, which is not there in a child; the next work starts another one."""
        ...


_numbers = count()
_locks: WeakValues[tuple[Level, int], threading.Lock] = WeakValues()
_workers: WeakValues[int, Worker] = WeakValues()
_held: list[list[threading.Lock]] = []


def lock(level: Level) -> threading.Lock:
    """Returns a new lock that no other thread holds when the process forks."""
    made = threading.Lock()
    _locks[level, next(_numbers)] = made
    return made


def follow(worker: Worker) -> None:
    """Has a worker rest before forks, and revive in children, as long as it lives."""
    _workers[next(_numbers)] = worker


def _before() -> None:
    for _, worker in _workers.items():
        worker.rest(PATIENCE)
    locks = dict(_locks.items())
    _held.append([locks[key] for key in sorted(locks) if locks[key].acquire(timeout=PATIENCE)])


def _after() -> None:
    for each in _held.pop():
        each.release()


def _in_child() -> None:
    _after()
    for _, worker in _workers.items():
        worker.revive()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
