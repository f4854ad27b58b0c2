"""The attributes of objects as they are now, with what is in them, and their way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from daf_core.snapshots.random_numbers import state_of
from daf_core.snapshots.writes import Copy, has_storage

LARGEST = 10_000  # items of a collection up to which these are looked into: what is larger is data
LONGEST = 10_000_000  # items of a collection of a model's up to which it is kept: 80 MB
MOST = 1000  # collections and objects of one owner that are looked into: where there are more, they are data, too
LARGEST_ARRAY = 64 << 20  # bytes of a numpy array up to which it is copied
LARGEST_TENSOR = 1 << 20  # bytes of a tensor outside of the model up to which it is copied

FRAMEWORKS = {"torch", "transformers", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
"""Packages whose objects are not looked into: of what they count themselves their integrations know."""

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose contents are called as if they were its own."""

_FOREIGN = {*FRAMEWORKS, "daf_core", "daf_integrations", "daf_kernels", "builtins"}
"""Packages of which nothing is the user's own."""

_PLAIN = (bool, int, float, complex, str, bytes, type)

_COLLECTIONS = (list, deque, dict, set, bytearray)


class Contents:
    """What is in values now: in collections, arrays, random generators and objects, also inside of each other.

    Args:
        packages: Objects of classes from these are looked into, and of those that modules and functions come from which
            are, besides plain data; no objects at all, if it is an empty tuple.
        others: Identities of what is kept by others.
        longest: Items of a collection up to which it is kept.
    """

    def __init__(self, packages: Collection[str] = (), others: Collection[int] = (), longest: int = LARGEST) -> None:
        self.tensors: list[tuple[str, Tensor]] = []  # with their names
        self.opaque: list[tuple[str, Any]] = []  # what nothing is known of, with its names
        self._packages, self._others = set(packages), others
        self._looks, self._longest = packages != (), longest
        self._kept: dict[int, _Collection | _Numbers | _Attributes] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._known: set[int] = set()
        self._copies: list[Copy] = []

    def add_object(self, name: str, owner: object) -> None:
        """Adds the attributes of an object."""
        self._keep(name, vars(owner), named=True)
        self._finish()

    def add_attributes(self, owner: Any, prefix: str, read: Callable[[Any], dict[str, Any]]) -> None:
        """Adds those attributes of an object or a class that a function returns."""
        kept = self._kept[id(owner)] = _Attributes(owner, prefix, read)
        for name, value in kept.before.items():
            self.add(prefix + name, value)

    def add(self, name: str, value: Any) -> None:
        """Adds a value, and what is in it; what is in a collection is called as that is."""
        self._waiting.append((name, value))
        self._finish()

    def copy_small_tensors(self) -> None:
        """Includes the values of small tensors that are no parameters."""
        found = [each for _, each in self.tensors if has_storage(each) and not isinstance(each, nn.Parameter)]
        self._copies = [Copy(tensor) for tensor in found if tensor.untyped_storage().nbytes() <= LARGEST_TENSOR]

    def take_back(self) -> set[str]:
        """Takes everything back, any number of times; returns the names of what had changed, but for tensors."""
        for tensor in self._copies:
            tensor.restore()
        return set[str]().union(*(kept.restore() for kept in self._kept.values()))

    def _finish(self) -> None:
        """Looks into what waits, and into what is found there."""
        most = len(self._known) + MOST
        while self._waiting:
            name, value = self._waiting.pop()
            if not is_plain(value) and id(value) not in self._known and id(value) not in self._others:
                self._look_into(name, value, len(self._known) < most)

    def _look_into(self, name: str, value: Any, room: bool) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        elif isinstance(value, (*_COLLECTIONS, tuple)):
            if len(value) > self._longest or not room:
                self.opaque.append((name, value))
                return
            self._keep(name, value, named=False)
            if self._looks and _vars_of(value):
                self._keep(name, vars(value), named=True)
        elif (numbers := _numbers(value)) is not None:
            self._kept[id(value)] = _Numbers(name, value, *numbers)
        elif not room or not self._looks or isinstance(value, Dataset | DataLoader):
            return
        elif isinstance(value, FunctionType | MethodType | partial):
            self._known.add(id(value))
            self._packages |= {(getattr(value, "__module__", None) or "").partition(".")[0]} - _FOREIGN
            self._waiting += [(name, each) for each in _referred(value)]
            owner = getattr(value, "__self__", None)
            known = id(_vars_of(owner)) in self._known or id(owner) in self._others
            if _vars_of(owner) and not known and _package(type(owner)) not in _FOREIGN:
                self._keep(name, vars(owner), named=True)
        elif self._is_own(value):
            self._known.add(id(value))  # two objects may refer to each other
            if id(vars(value)) not in self._known:
                self._keep(name, vars(value), named=True)
        elif not callable(value) and _package(type(value)) not in FRAMEWORKS:
            self.opaque.append((name, value))

    def _keep(self, name: str, collection: Any, named: bool) -> None:
        self._known.add(id(collection))
        if not isinstance(collection, tuple):
            self._kept[id(collection)] = _Collection(name, collection, named)
        if len(collection) > LARGEST:
            return
        if isinstance(collection, dict):
            for key, value in collection.items():
                if named and key in REGISTERED and isinstance(value, dict):
                    self._keep(name, value, named=True)
                elif not is_plain(value):
                    self._waiting.append((f"{name}.{key}".lstrip(".") if named else name, value))
        elif not isinstance(collection, bytearray):
            self._waiting += [(name, item) for item in collection if not is_plain(item)]

    def _is_own(self, value: Any) -> bool:
        package = _package(type(value))
        if isinstance(value, nn.Module):
            self._packages |= {package} - _FOREIGN
            return True
        if isinstance(value, SimpleNamespace) or is_dataclass(value):
            return package not in FRAMEWORKS and hasattr(value, "__dict__")
        return package in self._packages and hasattr(value, "__dict__")


class Attributes(Contents):
    """The attributes of objects as they are now, with all nested lists, dictionaries and sets in them.

    With `private`, those with a leading underscore are included. `others` is a model that others restore; without it no
    object that an attribute refers to is looked into. Collections are kept up to `longest` items.
    """

    def __init__(
        self, *owners: object, private: bool = False, others: nn.Module | None = None, longest: int = LARGEST
    ) -> None:
        packages = {_package(kind) for owner in owners for kind in type(owner).__mro__} - _FOREIGN
        known = set() if others is None else set(map(id, others.modules()))
        super().__init__(packages if others is not None else (), known, longest)
        for owner in owners:
            self.add_attributes(owner, "", lambda each: _attributes(each, private))
        if others is not None:
            self.copy_small_tensors()

    def restore(self) -> None:
        """Restores the attributes, any number of times."""
        self.take_back()


def attributes_kept(owner: object, others: nn.Module) -> ExitStack:
    """Returns a context that restores an object's attributes afterwards, as `Attributes` does, private ones too."""
    stack = ExitStack()
    stack.callback(Attributes(owner, private=True, others=others).restore)
    return stack


def referred_kept(function: Callable[..., Any], model: nn.Module) -> ExitStack:
    """Returns a context that restores what a function refers to, such as a moving average, except the model."""
    contents, stack = Contents(set(), set(map(id, model.modules()))), ExitStack()
    contents.add("", function)
    contents.copy_small_tensors()
    stack.callback(contents.take_back)
    return stack


def contents_of(model: nn.Module) -> Contents:
    """Returns what is in the attributes of all modules and parameters of a model now, and of the modules' own classes.

    Objects that they refer to are looked into where their classes come from the packages of the model's, and so is what
    functions that are hooks refer to.
    """
    modules = dict(model.named_modules())
    kinds = {kind for module in modules.values() for kind in type(module).__mro__}
    contents = Contents(set(map(_package, kinds)) - _FOREIGN, set(map(id, modules.values())), LONGEST)
    for name, module in modules.items():
        contents.add_object(name, module)
    for name, parameter in model.named_parameters():
        contents.add(name, getattr(parameter, "_backward_hooks", None))
        if vars(parameter):  # a quantized weight has its scales there, and the first pass of bitsandbytes' moves them
            contents.add_object(name, parameter)
    for kind in kinds:
        if _package(kind) not in _FOREIGN:
            contents.add_attributes(kind, f"{kind.__qualname__}.", _data_of)
    return contents


class _Collection:
    """What is in a list, dictionary or set; `named` says that it is the dictionary of an object's attributes."""

    __slots__ = ("_collection", "_content", "_name", "_named")

    def __init__(self, name: str, collection: Any, named: bool) -> None:
        self._name, self._collection, self._named = name, collection, named
        self._content = copy(collection) if collection else None

    def restore(self) -> set[str]:
        now, before = self._collection, self._content
        if before is None and not now:
            return set()
        changed = self._changed(now, type(now)() if before is None else before)
        if changed:
            now.clear()
            if before is not None:
                (now.extend if isinstance(now, list | deque | bytearray) else now.update)(before)
        return changed

    def _changed(self, now: Any, before: Any) -> set[str]:
        if isinstance(now, Mapping):
            keys = {key for key in now.keys() & before.keys() if not _same(now[key], before[key])}
            keys |= now.keys() ^ before.keys()
            if not keys and [*now] != [*before]:
                return {self._name}
            return {f"{self._name}.{key}".lstrip(".") if self._named else self._name for key in keys}
        if isinstance(now, set):
            return {self._name} if now != before else set()
        same = len(now) == len(before) and all(map(_same, now, before))
        return set() if same else {self._name}


class _Numbers:
    """What is in an array or a random generator; `_owner` keeps it alive."""

    def __init__(self, name: str, owner: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._name, self._owner, self._read, self._write = name, owner, read, write
        self._before = read()

    def restore(self) -> set[str]:
        changed = not _equal(self._read(), self._before)
        if changed:
            self._write(self._before)
        return {self._name} if changed else set()


class _Attributes:
    """The attributes of an object, or what a class of the user's counts itself, of those that `read` returns."""

    def __init__(self, owner: Any, prefix: str, read: Callable[[Any], dict[str, Any]]) -> None:
        self._owner, self._prefix, self._read, self.before = owner, prefix, read, read(owner)

    def restore(self) -> set[str]:
        now, before, owner = self._read(self._owner), self.before, self._owner
        changed = now.keys() ^ before.keys()
        changed |= {name for name in now.keys() & before.keys() if not _same(now[name], before[name])}
        if isinstance(owner, type):
            write, drop = partial(setattr, owner), partial(delattr, owner)
        else:  # past its own `__setattr__`, which may register what it is given
            write, drop = vars(owner).__setitem__, vars(owner).__delitem__
        for name in changed - before.keys():
            drop(name)
        for name in before:
            if name in changed:
                write(name, before[name])
        return {self._prefix + name for name in changed}


def is_plain(value: object) -> bool:
    """Whether a value cannot change."""
    return value is None or isinstance(value, _PLAIN)


def _vars_of(value: object) -> dict[str, Any]:
    """Returns an object's attributes; {} where it has none of its own."""
    return getattr(value, "__dict__", {})


def _referred(function: Any) -> Iterator[Any]:
    """Yields what a function of the user's refers to that it may change: what it encloses, is bound to, and globals."""
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
        return
    if isinstance(function, MethodType):
        yield from (function.__func__, function.__self__)
        return
    if (function.__module__ or "").partition(".")[0] in _FOREIGN:
        return
    yield from (function.__defaults__, function.__kwdefaults__)
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    yield from (value for value in found if isinstance(value, _COLLECTIONS))


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
    return state_of(value)


def _same(one: object, other: object) -> bool:
    """Compares by identity, but for plain values: equality of others may be anything, such as a tensor."""
    return one is other or (type(one) is type(other) and is_plain(one) and one == other)


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
