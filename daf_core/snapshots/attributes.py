"""The attributes of objects as they are now, with what is in them, and their way back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGEST = 10_000
"""Items of a collection up to which it is looked into: what is larger is data."""

MOST = 1000
"""Collections and objects of one owner that are looked into: where there are more, they are data, too."""

LARGEST_ARRAY = 1 << 20
"""Bytes of a numpy array up to which it is copied."""

FRAMEWORKS = {"torch", "transformers", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
"""Packages whose objects are not looked into: of what they count themselves their integrations know."""


REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose contents are called as if they were its own."""

_PLAIN = (bool, int, float, complex, str, bytes, type)


class Attributes:
    """An object's attributes as they are now, and what is in its lists, dictionaries and sets, also inside each other.

    Args:
        owner: The object.
        private: Whether those with a leading underscore are its user's own too.
    """

    def __init__(self, owner: object, private: bool = False) -> None:
        self._owner, self._private = owner, private
        self._before = _attributes(owner, private)
        self._contents = Contents()
        for name, value in self._before.items():
            self._contents.add(name, value)

    def restore(self) -> None:
        """Takes them back, any number of times."""
        for name in _attributes(self._owner, self._private).keys() - self._before.keys():
            del vars(self._owner)[name]
        vars(self._owner).update(self._before)
        self._contents.restore()


@contextmanager
def attributes_kept(owner: object, private: bool = False) -> Generator[None]:
    """Gives an object's attributes back, as `Attributes` does."""
    kept = Attributes(owner, private)
    try:
        yield
    finally:
        kept.restore()


class ModuleAttributes:
    """The attributes of all modules of a model, and of their own classes, as they are now, with what is in them.

    Objects that they refer to are looked into where their classes come from the packages of the model's.

    Args:
        model: The model.

    Attributes:
        tensors: The tensors among them, with their names.
        opaque: Values of which a copy is no way back, with their names.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        kinds = {kind for module in modules.values() for kind in type(module).__mro__ if kind is not object}
        packages = frozenset(map(_package, kinds)) - FRAMEWORKS - {"builtins"}
        self.tensors: list[tuple[str, Tensor]] = []
        self.opaque: list[tuple[str, Any]] = []
        known = set(map(id, modules.values()))
        self._contents: list[Contents] = []
        for name, module in modules.items():
            contents = Contents(packages, known)
            contents.add_object(name, module)
            self._contents.append(contents)
        self._classes = [_ClassAttributes(kind, packages) for kind in kinds if _package(kind) in packages]
        for contents in (*self._contents, *(each.contents for each in self._classes)):
            self.tensors += contents.tensors
            self.opaque += contents.opaque

    def restore(self) -> set[str]:
        """Takes them back, any number of times; returns the names of those that had changed."""
        changed = set[str]().union(*(contents.restore() for contents in self._contents))
        return changed.union(*(each.restore() for each in self._classes))


class Contents:
    """What is in values now: in collections, arrays, random generators and objects, also inside of each other.

    Args:
        packages: Objects of classes from these are looked into, besides plain data.
        others: Identities of what is kept by others.

    Attributes:
        tensors: The tensors among them, with their names.
        opaque: What nothing is known of, with its names.
    """

    def __init__(self, packages: Collection[str] = (), others: Collection[int] = ()) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.opaque: list[tuple[str, Any]] = []
        self._packages, self._others = packages, others
        self._kept: dict[int, _Collection | _Numbers] = {}

    def add_object(self, name: str, owner: object) -> None:
        """Adds the attributes of an object."""
        self._keep(name, vars(owner), named=True)

    def add(self, name: str, value: Any) -> None:
        """Adds a value, and what is in it.

        Args:
            name: What it is called; what is in a collection is called as that is.
            value: The value.
        """
        if value is None or isinstance(value, _PLAIN):
            return
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        elif id(value) in self._kept or id(value) in self._others or len(self._kept) >= MOST:
            return
        elif isinstance(value, list | deque | dict | set | tuple):
            self._keep(name, value, named=False)
        elif (numbers := _numbers(value)) is not None:
            self._kept[id(value)] = _Numbers(name, value, *numbers)
        elif self._is_own(value):
            self.add_object(name, value)
        elif not callable(value) and _package(type(value)) not in FRAMEWORKS:
            self.opaque.append((name, value))

    def restore(self) -> set[str]:
        """Takes everything back, any number of times; returns the names of what had changed."""
        return set[str]().union(*(kept.restore() for kept in self._kept.values()))

    def _keep(self, name: str, collection: Any, named: bool) -> None:
        if len(collection) > LARGEST or id(collection) in self._kept:
            return
        if not isinstance(collection, tuple):
            self._kept[id(collection)] = _Collection(name, collection, named)
        if isinstance(collection, dict):
            for key, value in [*collection.items()]:
                if named and key in REGISTERED and isinstance(value, dict):
                    self._keep(name, value, named=True)
                else:
                    self.add(f"{name}.{key}".lstrip(".") if named else name, value)
        else:
            for item in collection:
                self.add(name, item)

    def _is_own(self, value: Any) -> bool:
        if not hasattr(value, "__dict__"):
            return False
        package = _package(type(value))
        if isinstance(value, nn.Module | SimpleNamespace) or is_dataclass(value):
            return bool(self._packages) and (package == "torch" or package not in FRAMEWORKS)
        return package in self._packages


class _Collection:
    """What is in a list, dictionary or set; `named` says that it is the dictionary of an object's attributes."""

    def __init__(self, name: str, collection: Any, named: bool) -> None:
        self._name, self._collection, self._named = name, collection, named
        self._content = copy(collection)

    def restore(self) -> set[str]:
        changed = self._changed()
        if changed:
            self._collection.clear()
            if isinstance(self._collection, list | deque):
                self._collection.extend(self._content)
            else:
                self._collection.update(self._content)
        return changed

    def _changed(self) -> set[str]:
        now, before = self._collection, self._content
        if isinstance(now, Mapping):
            keys = now.keys() ^ before.keys()
            keys |= {key for key in now.keys() & before.keys() if not _same(now[key], before[key])}
            return {f"{self._name}.{key}".lstrip(".") if self._named else self._name for key in keys}
        if isinstance(now, set):
            return {self._name} if now != before else set()
        same = len(now) == len(before) and all(map(_same, now, before))
        return set() if same else {self._name}


class _Numbers:
    """What is in an array or a random generator."""

    def __init__(self, name: str, owner: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._name, self._owner = name, owner
        self._read, self._write = read, write
        self._before = read()

    def restore(self) -> set[str]:
        if _equal(self._read(), self._before):
            return set()
        self._write(self._before)
        return {self._name}


class _ClassAttributes:
    """What a class of the user's counts itself, in attributes that are neither functions nor descriptors."""

    def __init__(self, kind: type, packages: Collection[str]) -> None:
        self._kind, self._before = kind, _data_of(kind)
        self.contents = Contents(packages)
        for name, value in self._before.items():
            self.contents.add(f"{kind.__qualname__}.{name}", value)

    def restore(self) -> set[str]:
        now, changed = _data_of(self._kind), self.contents.restore()
        for name in now.keys() | self._before.keys():
            if name not in self._before:
                delattr(self._kind, name)
            elif name not in now or not _same(now[name], self._before[name]):
                setattr(self._kind, name, self._before[name])
            else:
                continue
            changed.add(f"{self._kind.__qualname__}.{name}")
        return changed


def _attributes(owner: object, private: bool) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if private or not name.startswith("_")}


def _data_of(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    }


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _numbers(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Returns what reads and what writes the content of an array or a random generator; None for anything else."""
    if isinstance(value, np.ndarray):
        return (value.copy, lambda before: np.copyto(value, before)) if value.nbytes <= LARGEST_ARRAY else None
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator
        return lambda: numbers.state, lambda state: setattr(numbers, "state", state)
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    return None


def _same(one: object, other: object) -> bool:
    """Compares by identity, but for plain values: equality of others may be anything, such as a tensor."""
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _equal(one: Any, other: Any) -> bool:
    """Compares what arrays and generators hold, in which a NaN equals itself."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return one == other
