"""Runs a model beside its training: afterwards everything that a forward pass may change is as it was before."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from daf_core.errors import TraceError
from daf_core.snapshots.attributes import ModuleAttributes
from daf_core.snapshots.rng_and_buffers import Buffers, RandomNumbers, devices_of
from daf_core.snapshots.writes import Copy, Writes, has_storage

LARGEST_DIGEST = 1 << 20
"""Bytes of a value that are looked at to see whether it has changed."""


class Measurement:
    """Has a model run beside its training, and takes back what that changes.

    That is: random generators, buffers, attributes of all modules and of their classes with what these refer to, and
    the values of all tensors among them, parameters included. After the first run it is checked whether everything is
    as before. Gradients are left to what runs inside, and so are globals.

    Args:
        model: The model.

    Attributes:
        changed: The names of the attributes and tensors, without buffers, that a run has changed.
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

        Args:
            timed: Whether time is measured inside: operators are not looked at then, and tensors taken back that a run
                before has written to.

        Raises:
            TraceError: A run changes what cannot be taken back, or the model has parameters that its first run makes.
        """
        self._refuse()
        numbers, attributes, buffers = self._taken()
        tensors = attributes.tensors
        before = None if self._checked else _digests(tensors, attributes.opaque)
        copies = [Copy(tensor) for name, tensor in tensors if timed and name in self._written and has_storage(tensor)]
        writes = Writes(tensors)
        try:
            with nullcontext() if timed else writes:
                yield
        finally:
            self.changed |= attributes.restore() | writes.written
            self._written |= writes.written
            writes.restore()
            for copy in copies:
                copy.restore()
            buffers.restore()
            numbers.restore()
        if before is not None:
            self._checked = True
            self._compare(before, _digests(tensors, attributes.opaque))

    def _taken(self) -> tuple[RandomNumbers, ModuleAttributes, Buffers]:
        return RandomNumbers(devices_of(self._model)), ModuleAttributes(self._model), Buffers(self._model)

    def _refuse(self) -> None:
        lazy = next((name for name, parameter in self._model.named_parameters() if is_lazy(parameter)), None)
        if lazy is not None:
            raise TraceError(
                f"{lazy} has no values yet, and what runs beside training would give it some. Run one batch through "
                "the model first, without gradient"
            )
        if self._trace is not None:
            raise TraceError(self._trace)

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        found = [name for name, digest in after.items() if digest != before[name]]
        if not found:
            return
        self._trace = (
            f"a forward pass changes {', '.join(sorted(found)[:3])} in a way that cannot be taken back, so nothing is "
            "measured beside training. audit_every=None turns audits off, and with "
            'budget_covers="activations" no step is measured'
        )
        raise TraceError(self._trace)


@contextmanager
def measuring(model: nn.Module) -> Generator[None]:
    """Takes back what runs inside, as `Measurement` does."""
    with Measurement(model).running():
        yield


def _digests(tensors: Iterable[tuple[str, Tensor]], opaque: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns what tells whether values have changed, by name."""
    found: dict[str, Any] = {}
    for name, tensor in tensors:
        found[name] = (found.get(name), _sum_of_bits(tensor))
    for name, value in opaque:
        found[name] = (found.get(name), _pickled(value))
    return found


def _sum_of_bits(tensor: Tensor) -> Any:
    """Returns a number that differs where one value does; it reads as fast as memory does."""
    if not has_storage(tensor) or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return None
    values = tensor.detach()
    if not values.is_contiguous():
        values = values.contiguous()
    size = values.element_size()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    return tuple(values.shape), int(values.view(-1).view(whole).sum(dtype=torch.int64)) if values.numel() else 0


def _pickled(value: Any) -> bytes | None:
    """Returns what a value would be stored as; None where that is unknown, or large."""
    stream = _Limited()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # iterators of itertools will not be pickled one day
            pickler = _Pickler(stream)
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
    @override
    def persistent_id(self, obj: Any, /) -> int | None:
        return id(obj) if isinstance(obj, Tensor | nn.Module) else None
