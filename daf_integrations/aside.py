"""Runs a user's code for its value alone: what it counts and collects on the way is as before afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

LARGEST = 10_000
"""Items of a collection up to which it is looked into: what is larger is data."""


@contextmanager
def attributes_kept(owner: object, private: bool = False) -> Generator[None]:
    """Gives an object's attributes back, and what was in its lists, dictionaries and sets, also inside each other.

    Args:
        owner: The object.
        private: Whether those with a leading underscore are its user's own too.
    """
    before = _attributes(owner, private)
    contents: dict[int, tuple[Any, Any]] = {}
    _note(before, contents)
    try:
        yield
    finally:
        for name in _attributes(owner, private).keys() - before.keys():
            del vars(owner)[name]
        vars(owner).update(before)
        for collection, content in contents.values():
            if _differs(collection, content):
                _refill(collection, content)


def _attributes(owner: object, private: bool) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if private or not name.startswith("_")}


def _note(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Adds copies of a collection and of those in it."""
    if not isinstance(value, list | deque | dict | set) or len(value) > LARGEST or id(value) in contents:
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
