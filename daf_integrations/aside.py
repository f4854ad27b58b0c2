"""Runs a user's code for its value alone: what it counts and collects on the way is as before afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

LARGEST = 10_000
"""Items of a collection up to which it is looked into: what is larger is data."""

MOST = 1000
"""Collections that are looked into: where there are more, they are data, too."""


class KeptAttributes:
    """An object's attributes as they are now, and what is in its lists, dictionaries and sets, also inside each other.

    Args:
        owner: The object.
        private: Whether those with a leading underscore are its user's own too.
    """

    def __init__(self, owner: object, private: bool = False) -> None:
        self._owner, self._private = owner, private
        self._before = _attributes(owner, private)
        self._contents: dict[int, tuple[Any, Any]] = {}
        _note(self._before, self._contents)

    def restore(self) -> None:
        """Takes them back, any number of times."""
        for name in _attributes(self._owner, self._private).keys() - self._before.keys():
            del vars(self._owner)[name]
        vars(self._owner).update(self._before)
        for collection, content in self._contents.values():
            if _differs(collection, content):
                _refill(collection, content)


@contextmanager
def attributes_kept(owner: object, private: bool = False) -> Generator[None]:
    """Gives an object's attributes back, as `KeptAttributes` does."""
    kept = KeptAttributes(owner, private)
    try:
        yield
    finally:
        kept.restore()


def _attributes(owner: object, private: bool) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if private or not name.startswith("_")}


def _note(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Adds copies of a collection and of those in it."""
    if not isinstance(value, list | deque | dict | set) or len(value) > LARGEST or id(value) in contents:
        return
    if len(contents) >= MOST:
        return
    contents[id(value)] = value, copy(value)
    for item in value.values() if isinstance(value, dict) else value:
        _note(item, contents)


def _differs(collection: Collection[Any], content: Collection[Any]) -> bool:
    """Compares by identity, as equality may be anything, such as a tensor."""
    if len(collection) != len(content):
        return True
    if isinstance(collection, Mapping) and isinstance(content, Mapping):
        return any(name not in collection or collection[name] is not value for name, value in content.items())
    if isinstance(collection, set):
        return collection != content
    return any(one is not other for one, other in zip(collection, content, strict=True))


def _refill(collection: Any, content: Any) -> None:
    collection.clear()
    if isinstance(collection, list | deque):
        collection.extend(content)
    else:
        collection.update(content)
