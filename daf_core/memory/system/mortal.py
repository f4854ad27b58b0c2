"""What is done when objects die, without Python code.

Of what a signal handler raises inside a ``__del__``, or in another Python function that Python calls by itself, such as
KeyboardInterrupt, nobody would ever learn, and the rest of the function would be left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

SWEPT = 256
"""Entries that are never looked through for dead ones."""


def at_death(owner: object, time: Callable[[], int], item: Item, do: Callable[[tuple[int, Item]], object]) -> object:
    """Has something done with (the time then, an item) when an owner dies, as long as what is returned is kept.

    Args:
        owner: The owner.
        time: Returns the time; written in C.
        item: The item.
        do: What is done, once; written in C.
    """
    at_once = map(do, zip(iter(time, None), (item,)))  # noqa: B905  # strict would go on after the first
    return weakref.ref(owner, partial(next, at_once))


class WeakValues(Generic[Key, Value]):
    """A mapping that keeps no value alive, as `weakref.WeakValueDictionary` does with a function in Python."""

    def __init__(self) -> None:
        self._references: dict[Key, weakref.ref[Value]] = {}
        self._swept = SWEPT

    def get(self, key: Key) -> Value | None:
        """Returns a value; None where there is none, or where it died."""
        found = self._references.get(key)
        return None if found is None else found()

    def items(self) -> list[tuple[Key, Value]]:
        """Returns what is alive."""
        found = [(key, reference()) for key, reference in list(self._references.items())]
        return [(key, value) for key, value in found if value is not None]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._references[key] = weakref.ref(value)
        if len(self._references) > self._swept:
            alive = {each: reference for each, reference in list(self._references.items()) if reference() is not None}
            self._references, self._swept = alive, max(2 * len(alive), SWEPT)
