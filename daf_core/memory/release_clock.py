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

    Attributes:
        now: The time in this thread.
        horizon: Releases up to this time count in this thread; all, unless it packs in the background.
    """

    def __init__(self) -> None:
        self.now = 0
        self.horizon = math.inf

    def set_back(self, time: int) -> None:
        """This thread packs now what was saved at some time."""
        self.now = self.horizon = time


class OwnerReference(weakref.ref[Any]):
    """A reference to the owner of something, which is released when the owner dies.

    Attributes:
        item: What is released; its `reference` is this one.
    """

    __slots__ = ("item",)
    item: Any


class Releases(Generic[Item]):
    """Collects what was released. Adding takes no lock: it may happen inside a garbage collection.

    Args:
        clock: Says when it is; by default all that was added is due.
    """

    def __init__(self, clock: ReleaseClock | None = None) -> None:
        self._clock = clock or ReleaseClock()
        self._now: Callable[[], int] = partial(attrgetter("now"), self._clock)
        self._items: deque[tuple[int, Item]] = deque()
        self._dead: deque[tuple[int, int]] = deque()
        self.untimed: deque[OwnerReference] = deque()
        """Gets the references of owners that have died to what counts at once, whatever the time (see `at_once`)."""
        self._owned: dict[int, tuple[Item, object]] = {}
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._dead or self._items or self.untimed)

    def add(self, item: Item, owner: object | None = None) -> None:
        """Notes that something was released now, or will be when its owner dies."""
        if owner is None:
            self._items.append((self._clock.now, item))
            return
        number = next(self._numbers)
        self._owned[number] = item, at_death(owner, self._now, number, self._dead.append)

    @property
    def timed(self) -> bool:
        """Whether releases have to wait for their time in this thread, which packs for another one."""
        return self._clock.horizon is not math.inf

    def at_once(self, owner: object) -> OwnerReference:
        """Returns what is to be given an item, and kept by it: the item is due as soon as the owner has died."""
        return OwnerReference(owner, self.untimed.append)

    def due(self) -> Iterator[Item]:
        """Takes out what was released up to this thread's horizon: each once, or again after an interrupt."""
        while self.untimed:
            reference = self.untimed[0]
            if reference.item.reference is reference:  # otherwise it was released before, and has another owner
                yield reference.item
            self.untimed.popleft()
        while self._dead:
            time, number = self._dead[0]
            if (owned := self._owned.get(number)) is not None:
                self._items.append((time, owned[0]))
            self._owned.pop(number, None)
            self._dead.popleft()
        for _ in range(len(self._items)):
            time, item = self._items[0]
            if time <= self._clock.horizon:
                yield item
            else:
                self._items.append((time, item))
            self._items.popleft()
