"""Runs a model beside its training: afterwards everything that a forward pass may change is as it was before."""

from __future__ import annotations

import io
import pickle
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from types import GeneratorType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from daf_core.autograd.torch_compile import has_compiled_anything, is_compiled
from daf_core.autograd.torch_private import storage_id
from daf_core.errors import TraceError
from daf_core.snapshots.attributes import REGISTERED, Contents, contents_of, is_plain
from daf_core.snapshots.random_numbers import RandomNumbers
from daf_core.snapshots.step import NORMALIZATION, Buffers, devices_of
from daf_core.snapshots.writes import PLAIN, Copy, Writes, WritesBesideGraphs, has_storage

HOOKS = "_hooks"  # what the names of a module's collections of hooks contain
PART = 1 << 22  # elements of a tensor that are added up at once

LARGEST_COPY = 1 << 20
"""Bytes of a buffer up to which it is copied in any case: kernels may write to it without saying so. Graphs of
torch.compile may write to weights, too: bytes of the storage of one up to which it is copied beside them."""

LARGEST_DIGEST = 1 << 20  # bytes of a value that are looked at to see whether it has changed


class Measurement:
    """Has a model run beside its training, and takes back what that changes.

    That is: random generators, buffers, attributes of all modules and of their classes with what these refer to, and
    the values of all tensors among them, parameters included, but large ones that a graph of torch.compile writes to.
    After the first run it is checked whether everything is as before. Gradients are left to what runs inside, and so
    are globals.

    `changed` are the names of the attributes and tensors that a run has changed, but for statistics of normalizations:
    no pass of training reads these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.changed: set[str] = set()
        self._written: set[str] = set()
        self._trace: str | None = None
        self._checked = False

    @contextmanager
    def running(self, timed: bool = False) -> Generator[None]:
        """Takes back what runs inside, also where it fails.

        Where time is measured inside, operators are not looked at, and of the tensors those are taken back that a run
        before has written to. Where anything is compiled, buffers, other tensors and small weights are in any case.

        Raises:
            TraceError: A run changes what cannot be taken back, or the model has parameters that its first run makes.
        """
        lazy = missing_values(self._model)
        if lazy is not None:
            raise TraceError(f"{lazy}, and what runs beside training would make them")
        if self._trace is not None:
            raise TraceError(self._trace)
        numbers, contents = RandomNumbers(devices_of(self._model)), contents_of(self._model)
        buffers = Buffers(self._model, LARGEST_COPY)
        before = None if self._checked else _digests(contents)
        compiled = has_compiled_anything() or any(map(is_compiled, self._model.modules()))
        watched = not timed
        copies, others = self._copies(contents.tensors, watched, compiled)
        writes = WritesBesideGraphs(others) if compiled else Writes(others)
        written, replaced = set[str](), set[str]()
        try:
            with writes if watched else nullcontext():
                yield
        finally:
            with ExitStack() as stack:  # the last comes first, and each whatever another raises
                stack.callback(numbers.restore)
                stack.callback(buffers.restore)
                for name, copy in copies:
                    stack.callback(_put_back, name, copy, written)
                stack.callback(writes.restore)
                replaced |= contents.take_back()
            written |= writes.written
            self.changed |= (replaced | written) - _statistics(self._model)
            self._written |= written
        if before is not None:
            self._checked = True
            found = sorted(name for name, digest in _digests(contents).items() if digest != before[name])
            if found:
                self._trace = (
                    f"a forward pass changes {', '.join(found[:3])} in a way that cannot be taken back, so nothing is "
                    "measured beside training. audit_every=None turns audits off, and with "
                    'budget_covers="activations" no step is measured'
                )
                raise TraceError(self._trace)

    def _copies(
        self, tensors: Iterable[tuple[str, Tensor]], watched: bool, compiled: bool
    ) -> tuple[list[tuple[str, Copy]], list[tuple[str, Tensor]]]:
        """Returns copies of the tensors that may be written to without being watched, and the other tensors."""
        copies, others, copied = list[tuple[str, Copy]](), list[tuple[str, Tensor]](), set[int]()
        for name, tensor in tensors:
            if not has_storage(tensor):
                continue
            if not (compiled and _is_copied(tensor)) and (watched or name not in self._written):
                others.append((name, tensor))
            elif storage_id(tensor) not in copied:  # a thousand weights may be parts of one storage
                copy = Copy(tensor)
                copies.append((name, copy))
                copied |= {storage_id(tensor)} if copy.is_whole else set()
        return copies, others

    def repeated_changes(self, run: Callable[[], object]) -> set[str]:
        """Returns the names of what a pass changes once more that a pass before it has changed.

        Counts and moving averages are such, and what is set up once, or noted in each pass, is not: a pass that is run
        again, or in parts, finds these as a whole one does. What hooks count is left out: they watch a model.

        Raises:
            TraceError: See `running`.
        """
        if not self.changed:
            return set()
        with self.running():
            numbers = RandomNumbers(devices_of(self._model))
            run()
            first = _values(self._model)
            numbers.restore()
            run()
            second = _values(self._model)
        unknown = {name for name in self.changed if HOOKS not in name and _of_attribute(name, second) is None}
        return unknown | {name for name, value in second.items() if value != first.get(name)}


def missing_values(model: nn.Module) -> str | None:
    """Names the parameter or buffer of a model that has no values before a first pass; None where all have."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is None:
        return None
    return f"{lazy} has no values before a first batch has run through the model; run one through it, without gradient"


def _put_back(name: str, copy: Copy, changed: set[str]) -> None:
    if copy.restore():
        changed.add(name)


def _is_copied(tensor: Tensor) -> bool:
    """Whether a tensor is copied where graphs may write to it: all but weights that are large, or of another class."""
    is_small = type(tensor) is nn.Parameter and tensor.untyped_storage().nbytes() <= LARGEST_COPY
    return is_small or not isinstance(tensor, nn.Parameter)


def measuring(model: nn.Module) -> AbstractContextManager[None]:
    """Takes back what runs inside, as `Measurement` does."""
    return Measurement(model).running()


def _statistics(model: nn.Module) -> set[str]:
    """Returns the names of the running statistics of batch normalization and its like."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, NORMALIZATION)]
    return {f"{name}.{buffer}".lstrip(".") for name, module in norms for buffer, _ in module.named_buffers()}


def _values(model: nn.Module) -> dict[str, bytes | None]:
    """Returns what tells whether attributes of modules, and what is in them, have other values."""
    kept, left_out = dict[str, bytes | None](), _statistics(model)
    known = frozenset(map(id, model.modules()))
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if HOOKS in attribute:
                continue
            parts = value.items() if attribute in REGISTERED else [(attribute, value)]
            kept |= {f"{name}.{part}".lstrip("."): _pickled(each, known) for part, each in parts}
    return {name: value for name, value in kept.items() if name not in left_out}


def _digests(contents: Contents) -> dict[str, Any]:
    found: dict[str, list[Any]] = defaultdict(list)
    for name, tensor in contents.tensors:
        found[name].append(_sum_of_bits(tensor))
    for name, value in contents.opaque:
        found[name].append(_digest(value))
    return found


def _sum_of_bits(tensor: Tensor) -> Any:
    """Returns a number that differs where one value does; it reads as fast as memory does."""
    if not has_storage(tensor) or type(tensor) not in PLAIN:
        return None
    values = tensor.detach().resolve_conj().resolve_neg()
    if not values.is_contiguous():
        values = values.contiguous()
    size = values.element_size()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    parts = values.view(-1).view(whole).split(PART)  # a sum makes numbers of 64 bits of all that it is given
    return tuple(values.shape), sum(int(part.sum(dtype=torch.int64)) for part in parts)


def _digest(value: Any) -> Any:
    """Returns what differs where a value does; None where that is unknown."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, [each for each in frame.f_locals.values() if is_plain(each)])
    if isinstance(value, np.ndarray):
        is_read = value.flags.c_contiguous and not isinstance(value, np.memmap) and not value.dtype.hasobject
        return zlib.crc32(memoryview(cast("Any", value)).cast("B")) if is_read and value.size else None
    if isinstance(value, list | deque | dict | set | tuple):
        return len(value)  # one that is too large to be looked into
    return _pickled(value)


def _of_attribute(name: str, values: dict[str, bytes | None]) -> bytes | None:
    while name and name not in values:
        name = name.rpartition(".")[0]
    return values.get(name)


def _pickled(value: Any, modules: Collection[int] | None = None) -> bytes | None:
    """Returns what a value would be stored as; None where that is unknown, or large.

    With the identities of modules, tensors and other modules are told apart by their values.
    """
    stream = _Limited()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # iterators of itertools will not be pickled one day
            pickler = _Pickler(stream)
            pickler.modules = modules
            pickler.fast = True  # equal values are stored alike, whether they are one object or two
            pickler.dump(value)
    except Exception:  # whatever objects do that are not made to be pickled
        return None
    return stream.getvalue()


class _Limited(io.BytesIO):
    @override
    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > LARGEST_DIGEST:
            raise OverflowError
        return super().write(data)


class _Pickler(pickle.Pickler):
    modules: Collection[int] | None = None

    @override
    def persistent_id(self, obj: Any, /) -> Any:
        if self.modules is not None and isinstance(obj, Tensor):
            return _sum_of_bits(obj)
        if isinstance(obj, nn.Module) and self.modules is not None and id(obj) not in self.modules:
            return None
        return id(obj) if isinstance(obj, Tensor | nn.Module) else None
