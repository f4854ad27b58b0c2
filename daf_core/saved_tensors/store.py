"""Stores activations one after the other, each in the first form that can hold it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor, UntypedStorage

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_private import storage_id
from daf_core.codecs import (
    EncodeContext,
    LossyStore,
    PlanesActivation,
    RawActivation,
    ShapeActivation,
    SidesActivation,
    StoredActivation,
    encode_first,
    registry,
)
from daf_core.codecs.planes import spreads_differ
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.codecs.scaling_groups import Grouping, grouping_of, logarithms_of
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.config import DAFConfig
from daf_core.errors import ActivationBudgetError
from daf_core.memory.devices import DevicePagers
from daf_core.readers.sharpness import SHARP
from daf_core.readers.table import Kind, Reading
from daf_core.saved_tensors.dedup import StorageTable, sharing_key
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.handle import Handle, Packed
from daf_core.telemetry import StepRecorder
from daf_kernels import Backend
from daf_kernels.layout import shares_groups


class ActivationStore:
    """Knows what was stored in a forward pass, and stores what comes next.

    The form of a tensor depends on those before it. So the tensors of a pass must come in the order in which autograd
    saves them, one at a time, on whatever thread.

    Args:
        config: The options; `precision` matters only in being "exact" or not.
        backends: Kernels of the devices that activations are compressed on.
        pagers: Where they are stored.
        lossy: Chooses the precision of what may lose precision.
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

    def store(self, saved: SavedTensor, derivation: Derivation) -> Packed:
        """Stores an activation in the first form that can hold it: shared, derived, a codec's, or raw.

        Args:
            saved: The activation.
            derivation: Recognizes what follows from what is stored.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        tensor = saved.tensor
        if self._spares_bits(saved.reading, tensor.device):
            saved.reading = replace(saved.reading, deviation=0.0)
        number, storage = self._meet(tensor)
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        key = sharing_key(number, tensor, geometry)
        shared = self._sharing.find(key, saved.version)
        if shared is not None and not _serves(shared, saved):  # another block's lossy copy
            shared = None
        stored = kept = None
        try:
            if not isinstance(shared, RawActivation):  # codes beside it would take more bytes
                stored = shared or self._derive(saved, derivation) or self._encode(saved, geometry, derivation)
            if stored is None:
                kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
        except ActivationBudgetError:
            # Perhaps not finite, and too large to stay as it is: gradient scalers need to see that, not where.
            stored = self._encode(saved, geometry, derivation, require_finite=False)
            if stored is None:
                raise
        if stored is None:
            self._recorder.stored_as[RawActivation.name] += 1
            if saved.place is None or saved.reading is not None:
                raw = RawActivation(tensor, kept, saved.version)
                self._sharing.add(key, storage, saved.version, raw)
                return raw
            return Handle(_compact(saved, geometry, kept), geometry, saved)  # its reader may need less
        if stored.readable_by_any_op:  # otherwise other operators ask for more
            self._sharing.add(key, storage, saved.version, stored)
        self._recorder.stored_as["shared" if shared else stored.name] += 1
        return Handle(stored, geometry, saved)

    def keep(self, tensor: Tensor, site: Site) -> RawActivation:
        """Keeps an activation as it is.

        Args:
            tensor: The activation.
            site: Where it is saved.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        self._meet(tensor)
        kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
        self._recorder.stored_as[RawActivation.name] += 1
        return RawActivation(tensor, kept)

    def _meet(self, tensor: Tensor) -> tuple[int, UntypedStorage]:
        """Counts the storage of a tensor, and returns its `storage_id` and itself."""
        number, storage = storage_id(tensor), tensor.untyped_storage()
        if self._sharing.is_new_storage(number, storage):
            self._recorder.add_raw(storage.nbytes())
        return number, storage

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
        if self._spares_bits(reading, saved.tensor.device):
            return
        tensor, stored = saved.tensor, None
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        if reading is not None and reading.kind is Kind.NORMALIZED:
            if _suits_normalization(tensor, geometry, saved.site.op):
                return
            saved.normalizes = True
        if reading is not None and (reading.kind is Kind.SHAPE or tensor._version == saved.version):
            saved.reading = reading
            stored = self._encode_for(reading, saved, geometry)
        before, name = weakref.ref(handle.stored), handle.stored.name
        if stored is None:
            if reading is not None:  # its codes are of no use, also where there is no room for it
                handle.stored = ShapeActivation()
            stored = _compact(saved, geometry, self._sharing.keep(tensor, self._pagers.on(tensor.device)))
            key = sharing_key(storage_id(tensor), tensor, geometry)
            self._sharing.add(key, tensor.untyped_storage(), saved.version, stored)
        handle.stored = stored
        self._lossy.withdraw(saved.site, before())
        counts = self._recorder.stored_as
        counts.subtract(["shared" if before() is not None and counts["shared"] else name])
        counts[stored.name] += 1
        self._recorder.stored_as = +counts

    def _spares_bits(self, reading: Reading | None, device: torch.device) -> TypeGuard[Reading]:
        """Says whether a budget has no bits to give to what takes twice as many without one, or stays exact.

        That is the input of a last layer, whose error is larger by it, and not without bounds as that of sharp scores.
        """
        return reading is not None and reading.deviation == math.inf and self._pagers.on(device).budget is not None

    def _encode_for(self, reading: Reading, saved: SavedTensor, geometry: Geometry) -> StoredActivation | None:
        """Stores a tensor that waited for its reader; None keeps it as it is."""
        if reading.kind is Kind.SHAPE:
            return ShapeActivation()
        backend = self._backends.get(saved.tensor.device)
        if backend is None:
            return None
        ctx = self._context(saved, geometry, backend)
        if reading.kind is Kind.SIDES:
            return SidesActivation.encode(saved, ctx)
        return PlanesActivation.encode(saved, ctx) if reading.takes_approximations else None

    def _derive(self, saved: SavedTensor, derivation: Derivation) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored."""
        if saved.reading is not None and saved.reading.deviation == math.inf:  # a recipe has the error of its source
            return None
        if saved.attends and not self._exact:
            return derivation.attended(saved) or derivation.derive(saved, self._exact)
        return derivation.derive(saved, self._exact) if saved.takes_approximations else None

    def _encode(
        self, saved: SavedTensor, geometry: Geometry, derivation: Derivation, require_finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(saved.tensor.device)
        if saved.form is TensorKind.RAW or backend is None:
            return None
        ctx = self._context(saved, geometry, backend)
        if saved.fetch is not None:
            ctx.values = saved.fetch(ctx.values)
        ctx.require_finite, ctx.sources = require_finite, derivation
        # Codes for one reader alone would hide what is not finite.
        saved.codec = self._lossy.codec(saved.site) if require_finite else None
        return encode_first(ctx.codecs, saved, ctx, lossy=not self._exact)

    def _context(self, saved: SavedTensor, geometry: Geometry, backend: Backend) -> EncodeContext:
        values, pager, groups = geometry.compact(saved.tensor), self._pagers.on(saved.tensor.device), None
        if saved.form is TensorKind.LOSSY and not self._exact:
            if saved.reading is not None and saved.reading.kind is Kind.LOGARITHMS:
                groups = logarithms_of(geometry, saved.reading.dim)
            elif saved.reading is not None and saved.reading.kind is Kind.NORMALIZED and saved.reading.dim:
                groups = Grouping(geometry.row)
            else:
                groups = grouping_of(geometry, saved.site.op)
        return EncodeContext(values, pager, backend, groups, lossy=self._lossy, codecs=registry.CODECS)


def _compact(saved: SavedTensor, geometry: Geometry, kept: KeptStorage | None) -> RawActivation:
    return RawActivation(geometry.compact(saved.tensor), kept, saved.version)


def _suits_normalization(tensor: Tensor, geometry: Geometry, op: str) -> bool:
    """Says whether the usual scaling groups keep the error of each row small beside the row."""
    if grouping_of(geometry, op).shape is not None or grouping_of(geometry, op).row != geometry.row:
        return False
    return not (shares_groups(geometry.row) and spreads_differ(geometry.compact(tensor), geometry.row))


def _serves(stored: StoredActivation, saved: SavedTensor) -> bool:
    """Says whether what was stored of the same values for another reader serves a tensor's."""
    if saved.form is TensorKind.RAW:
        return False
    if saved.reading is None:
        return stored.readable_by_any_op
    if stored.lossy and saved.reading.deviation >= SHARP:  # in the bits that others take
        return False
    return saved.reading.kind is not Kind.SHAPE and stored.serves(saved.reading)
