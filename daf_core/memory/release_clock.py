"""What was released, and when: released things count with the pager's next call, and not before their time."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Generic, TypeVar

from daf_core.memory.system.mortal import at_death

Item = TypeVar("Item")


class ReleaseClock(threading.local):
    """The time of each thread, in activations that were saved in a forward pass.

    Where activations are packed in the background, the thread that saves them is ahead of the one that packs them. What
    it releases meanwhile must not be free yet for activations that were saved before: what the pager gives up would
    depend on how far ahead it is.
    """

    def __init__(self) -> None:
        self.now = 0  # the time in this thread
        self.horizon = math.inf  # releases up to this time count in this thread; all, unless it packs in the background


class OwnerReference(weakref.ref[Any]):
    """A reference to the owner of something, which is released when the owner dies."""

    __slots__ = ("item",)
    item: Any  # what is released; its `reference` is this one


class Releases(Generic[Item]):
    """Collects what was released. Adding takes no lock: it may happen inside a garbage collection.

    Args:
        clock: Says when it is; by default all that was added is due.
    """

    def __init__(self, clock: ReleaseClock | None = None) -> None:
        self._clock = clock or ReleaseClock()
        self._now: Callable[[], int] = partial(attrgetter("now"), self._clock)
        self.items: deque[tuple[int, Item]] = deque()  # what was released, with the time
        self.dead: deque[tuple[int, int]] = deque()  # numbers of owners that have died, with the time
        # References to owners that have died of what counts at once, whatever the time (see `note_death`).
        self.untimed: deque[OwnerReference] = deque()
        # Is called by an `OwnerReference` when the owner has died; what it has as its item is due then, as long as that
        # keeps the reference.
        self.note_death = self.untimed.append
        self._owned: dict[int, tuple[Item, object]] = {}
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self.dead or self.items or self.untimed)

    def add(self, item: Item, owner: object | None = None) -> None:
        """Notes that something was released now, or will be when its owner dies."""
        if owner is None:
            self.items.append((self._clock.now, item))
            return
        number = next(self._numbers)
        self._owned[number] = item, at_death(owner, self._now, number, self.dead.append)

    @property
    def timed(self) -> bool:
        """Whether releases have to wait for their time in this thread, which packs for another one."""
        return self._clock.horizon is not math.inf

    def due(self) -> Iterator[Item]:
        """Takes out what was released up to this thread's horizon: each once, or again after an interrupt."""
        while self.untimed:
            reference = self.untimed[0]
            if reference.item.reference is reference:  # otherwise it was released before, and has another owner
                yield reference.item
            self.untimed.popleft()
        while self.dead:
            time, number = self.dead[0]
            if (owned := self._owned.get(number)) is not None:
                self.items.append((time, owned[0]))
            self._owned.pop(number, None)
            self.dead.popleft()
        for _ in range(len(self.items)):
            time, item = self.items[0]
            if time <= self._clock.horizon:
                yield item
            else:
                self.items.append((time, item))
            self.items.popleft()
