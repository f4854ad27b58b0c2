"""Stores activations one after the other, each in the first form that can hold it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_private import is_being_saved
from daf_core.codecs import (
    BitmaskActivation,
    ByteCopyActivation,
    KeptActivation,
    NarrowIntActivation,
    RawActivation,
    ReluOutputActivation,
    ReluSignsActivation,
    ShapeActivation,
    SidesActivation,
    StoredActivation,
)
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.scaling_groups import Grouping, grouping_of, logarithms_of
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.config import DAFConfig
from daf_core.errors import ActivationBudgetError
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.readers.sharpness import SHARP
from daf_core.readers.table import Kind, Reading
from daf_core.saved_tensors.classify import TensorKind
from daf_core.saved_tensors.dedup import StorageTable, sharing_key
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.saved_tensor import SavedTensor
from daf_core.telemetry import StepRecorder
from daf_kernels import Backend
from daf_kernels.layout import shares_groups

LARGEST_SPREAD_RATIO = 16
"""Between rows that share a scaling group and are normalized: at 4 bits an error is 1/30 of the group's spread, and
where a row spreads 1/16 of that, half of what its normalization returns. A token of zeros, such as a new class token,
returns noise alone."""


class LossyStore(Protocol):
    """Stores activations that may lose precision."""

    def __call__(
        self,
        values: Tensor,
        grouping: Grouping,
        site: Site,
        pager: Pager,
        backend: Backend,
        finite: bool,
        deviation: float = 0.0,
    ) -> StoredActivation | None:
        """Stores flat `values`; None where they are to stay as they are.

        Without `finite`, values that are not finite may decode to NaN together with their neighbours. Of a query or a
        key, `deviation` is that of the scores.
        """
        ...

    def sharpens(self, site: Site, deviation: float) -> bool:
        """Says whether a query or key takes more bits where the scores have a deviation."""
        ...

    def withdraw(self, site: Site) -> None:
        """Takes back what was stored last of a site: it is stored otherwise now."""
        ...


class ActivationStore:
    """Knows what was stored in a forward pass, and stores what comes next.

    What a tensor is stored as depends on those before it. So of one pass they must come in the order in which autograd
    saves them, one at a time, on whatever thread.

    Args:
        config: The options; `precision` matters only in being "exact" or not.
        backends: Kernels of the devices that activations are compressed on.
        pagers: Where they are stored.
        lossy: How those are stored that may lose precision.
        recorder: Counts what is done.
    """

    def __init__(
        self,
        config: DAFConfig,
        backends: Mapping[torch.device, Backend],
        pagers: DevicePagers,
        lossy: LossyStore,
        recorder: StepRecorder,
    ) -> None:
        self._exact = config.precision == "exact"
        self._backends = backends
        self._pagers = pagers
        self._lossy = lossy
        self._recorder = recorder
        self._sharing = StorageTable()

    def finish_pass(self) -> None:
        """Ends a forward pass."""
        self._sharing.clear()

    def store(self, saved: SavedTensor, derivation: Derivation) -> Handle | RawActivation:
        """Stores an activation in the first form that can hold it: shared, derived, a codec's, or raw.

        Args:
            saved: The activation.
            derivation: Recognizes what follows from what is stored.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        tensor = saved.tensor
        if self._sharing.is_new_storage(tensor):
            self._recorder.add_raw(tensor.untyped_storage().nbytes())
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        key = sharing_key(tensor, geometry)
        shared = self._sharing.find(key, saved.version)
        if shared is not None and not _serves(shared, saved):  # another block's lossy copy
            shared = None
        kept = None
        try:
            stored = shared or self._derive(saved, derivation) or self._encode(saved, geometry, derivation)
            if stored is None:
                kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
        except ActivationBudgetError:
            # Perhaps not finite, and too large to stay as it is: gradient scalers need to see that, not where.
            stored = self._encode(saved, geometry, derivation, finite=False)
            if stored is None:
                raise
        if stored is None:
            self._recorder.stored_as[RawActivation.codec] += 1
            if saved.place is None or saved.reading is not None:
                return RawActivation(tensor, kept, saved.version)
            return Handle(_kept(saved, geometry, kept), geometry, saved)  # its reader may need less
        if stored.whole:  # otherwise other operators ask for more
            self._sharing.add(key, tensor, saved.version, stored)
        self._recorder.stored_as["shared" if shared else stored.codec] += 1
        return Handle(stored, geometry, saved)

    def room(self, device: torch.device) -> int:
        """Returns the bytes of a device that the budget leaves now."""
        pager = self._pagers.on(device)
        return sys.maxsize if pager.budget is None else max(pager.budget - pager.settle(), 0)

    def store_again(self, saved: SavedTensor, handle: Handle, reading: Reading | None) -> None:
        """Stores a tensor otherwise, now that it is known who reads it.

        Args:
            saved: The tensor.
            handle: What autograd has got.
            reading: What the reader reads; None keeps the tensor as it is.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
        """
        if not (handle.stored.lossy or (reading is not None and reading.kind in (Kind.SHAPE, Kind.SIDES))):
            return
        if reading is not None and reading.deviation and not self._lossy.sharpens(saved.site, reading.deviation):
            return
        tensor, stored = saved.tensor, None
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        if reading is not None and (reading.kind is Kind.SHAPE or tensor._version == saved.version):
            stored = self._encode_for(reading, saved, geometry)
        before, codec = weakref.ref(handle.stored), handle.stored.codec
        if stored is None:
            if reading is not None:  # its codes are of no use, also where there is no room for it
                handle.stored = ShapeActivation()
            kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
            stored = _kept(saved, geometry, kept)
        handle.stored = stored
        self._lossy.withdraw(saved.site)
        counts = self._recorder.stored_as
        counts.subtract(["shared" if before() is not None and counts["shared"] else codec])
        counts[stored.codec] += 1
        self._recorder.stored_as = +counts

    def _encode_for(self, reading: Reading, saved: SavedTensor, geometry: Geometry) -> StoredActivation | None:
        """Stores a tensor that waited for its reader; None keeps it as it is."""
        values, device = geometry.compact(saved.tensor), saved.tensor.device
        backend = self._backends.get(device)
        if not reading.takes_approximations or backend is None:
            return self._encode_less(reading, values, device)
        grouping, pager = grouping_of(geometry, saved.site.op), self._pagers.on(device)
        return self._lossy(values, grouping, saved.site, pager, backend, True, reading.deviation)

    def _encode_less(self, reading: Reading, values: Tensor, device: torch.device) -> StoredActivation | None:
        """Stores what is left of values for a reader that does not need them; None where it does."""
        if reading.kind is Kind.SHAPE:
            return ShapeActivation()
        if reading.bounds is None or (backend := self._backends.get(device)) is None:
            return None
        return SidesActivation.encode(values, reading.bounds, self._pagers.on(device), backend)

    def _derive(self, saved: SavedTensor, derivation: Derivation) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored."""
        if saved.attends and not self._exact:
            return derivation.attended(saved) or derivation.derive(saved, self._exact)
        if saved.form is not TensorKind.LOSSY or (saved.reading is not None and not saved.reading.takes_approximations):
            return None
        return derivation.derive(saved, self._exact)

    def _encode(
        self, saved: SavedTensor, geometry: Geometry, derivation: Derivation, finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(saved.tensor.device)
        if saved.form is TensorKind.RAW or backend is None:
            return None
        if saved.reading is not None and saved.reading.kind is Kind.SHAPE:
            return ShapeActivation()
        values, pager = geometry.compact(saved.tensor), self._pagers.on(saved.tensor.device)
        if saved.fetch is not None:
            values = saved.fetch(values)
        stored: StoredActivation | None
        if saved.form is TensorKind.INTEGER:
            stored = NarrowIntActivation.encode(values, pager)
        else:
            stored = BitmaskActivation.encode(values, pager, backend)
        if stored is None and saved.form is TensorKind.LOSSY and not self._exact:
            grouping = _grouping(geometry, saved)
            stored = (
                None
                if grouping is None
                else self._encode_lossy(saved, values, grouping, pager, backend, derivation, finite)
            )
        if stored is None and pager.spills and pager.budget is not None:
            return ByteCopyActivation.copy(values, pager)
        return stored

    def _encode_lossy(
        self,
        saved: SavedTensor,
        values: Tensor,
        grouping: Grouping,
        pager: Pager,
        backend: Backend,
        derivation: Derivation,
        finite: bool,
    ) -> StoredActivation | None:
        """Encodes what may lose precision; of what is a ReLU's result, or may be one, the signs are kept.

        None keeps what a normalization would enlarge: a row beside others that spread far more.
        """
        if saved.reading is not None and saved.reading.reader != RELU:
            stored = self._encode_less(saved.reading, values, saved.tensor.device)
            if stored is not None or saved.reading.bounds is not None:
                return stored
        if saved.normalizes and shares_groups(grouping.row) and _spreads_differ(values, grouping.row):
            return None
        signs = derivation.signs_of(saved)
        if signs is None and saved.site.op == RELU and is_being_saved(saved.node, "result"):
            signs = ReluSignsActivation.encode(values, pager, backend, saved.version)
            signs.argument = derivation.argument_of(saved)
            return signs
        if signs is None and saved.site.op == RELU and values.min() >= 0:  # less where it was changed since
            signs = ReluSignsActivation.encode(values, pager, backend, saved.version)
        deviation = 0.0 if saved.reading is None else saved.reading.deviation
        planes = self._lossy(values, grouping, saved.site, pager, backend, finite, deviation)
        return planes if planes is None or signs is None else ReluOutputActivation(signs, planes)


def _spreads_differ(values: Tensor, row: int) -> bool:
    """Says whether some rows of flat values spread so little beside others that a code shared with them hides them."""
    if values.numel() % row:
        return False
    rows = values.reshape(-1, row)
    spreads = rows.amax(1) - rows.amin(1)
    return bool(spreads.min() * LARGEST_SPREAD_RATIO < spreads.max())


def _kept(saved: SavedTensor, geometry: Geometry, kept: KeptStorage | None) -> KeptActivation:
    return KeptActivation(RawActivation(geometry.compact(saved.tensor), kept, saved.version))


def _grouping(geometry: Geometry, saved: SavedTensor) -> Grouping | None:
    if saved.reading is not None and saved.reading.kind is Kind.LOGARITHMS:
        return logarithms_of(geometry, saved.reading.dim)
    return grouping_of(geometry, saved.site.op)


def _serves(stored: StoredActivation, saved: SavedTensor) -> bool:
    """Says whether what was stored of the same values for another reader serves a tensor's."""
    if saved.form is TensorKind.RAW:
        return False
    if saved.reading is None:
        return stored.whole
    if stored.lossy and saved.reading.deviation >= SHARP:  # in the bits that others take
        return False
    return saved.reading.kind is not Kind.SHAPE and stored.serves(saved.reading)
