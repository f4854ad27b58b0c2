"""Stores activations one after the other, each in the first form that can hold it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import TypeGuard

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_private import storage_id
from daf_core.codecs import registry
from daf_core.codecs.base import EncodeContext, StoredActivation, encode_first
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.common_row import CommonRows
from daf_core.codecs.logarithms import LogarithmsActivation, ProbabilitiesActivation
from daf_core.codecs.planes import LossyStore, PlanesActivation, spreads_differ
from daf_core.codecs.raw import KeptStorage, RawActivation
from daf_core.codecs.recomputed import BoundedActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.codecs.scaling_groups import Grouping, groups_for, may_share, normalized_groups
from daf_core.codecs.sides import KeptSides, SidesActivation
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.codecs.without_values import ShapeActivation
from daf_core.config import DAFConfig
from daf_core.errors import ActivationBudgetError
from daf_core.memory.devices import DevicePagers
from daf_core.readers.table import Kind, Reading
from daf_core.saved_tensors.dedup import Arguments, MetStorage, groups_otherwise, serves, sharing_key
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.direct import Derive, Direct, Directs, Shelf
from daf_core.saved_tensors.handle import Handle, Packed
from daf_core.saved_tensors.recording import Decision, Look
from daf_core.telemetry import StepRecorder
from daf_kernels import Backend

_OWN_FORMS = (Kind.SHAPE, Kind.SIDES, Kind.LOGARITHMS, Kind.PROBABILITIES)
"""What readers take in a form of their own, which also holds values that are not finite."""


class ActivationStore:
    """Knows what was stored in a forward pass, and stores what comes next.

    The form of a tensor depends on those before it. So the tensors of a pass must come in the order in which autograd
    saves them, one at a time, on whatever thread.
    """

    def __init__(
        self,
        config: DAFConfig,
        backends: Mapping[torch.device, Backend],
        pagers: DevicePagers,
        lossy: LossyStore,
        recorder: StepRecorder,
    ) -> None:
        self._config, self.is_exact = config, config.precision == "exact"
        self._backends = backends
        self._pagers = pagers
        self._lossy = lossy
        self._recorder = recorder
        self.shelf = Shelf(recorder, lossy)  # where the tensors of a pass are stored
        self._sharing = self.shelf.sharing
        self._directs, self.common_rows = Directs(backends, pagers, lossy), CommonRows()
        self._arguments = Arguments(self.is_exact, self._sharing)

    def beside(self, pagers: DevicePagers, lossy: LossyStore) -> ActivationStore:
        """Returns a store of other memory that knows what this one has measured."""
        store = ActivationStore(self._config, self._backends, pagers, lossy, self._recorder)
        store.common_rows = self.common_rows
        return store

    def begin_replay(self, parameters: Mapping[int, object]) -> None:
        """Begins a forward pass that may be replayed, given storages of parameters and buffers by `storage_id`."""
        self.shelf.parameters, self.shelf.token = parameters, self._lossy.token

    def finish_pass(self) -> None:
        """Ends a forward pass; may be called again."""
        self.common_rows.passes += bool(self._sharing.met)
        self._sharing.clear()
        self._arguments.clear()
        self.shelf.unsaved.clear()

    @property
    def epoch(self) -> int:
        """Changes where what rows share is to be measured anew."""
        return 0 if self.is_exact else self.common_rows.epoch

    def shares_rows(self, groups: Grouping, look: Look, tensor: Tensor) -> bool:
        """Says whether rows of some length may share enough to keep that beside codes; see `CommonRows.may_pay`.

        `groups` are the scaling groups of a tensor that was saved at the same place.
        """
        if not may_share(groups, look.reading):
            return False
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        return self.common_rows.may_pay(look.site, geometry, groups.group, geometry.compact(tensor.detach()))

    def store(self, saved: SavedTensor, derivation: Derivation) -> Packed:
        """Stores an activation in the first form that can hold it: shared, derived, a codec's, or raw.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        tensor = saved.tensor
        if self._spares_bits(saved.reading, tensor.device):
            saved.reading = replace(saved.reading, deviation=0.0, bounds=None)
        met = self._meet(tensor)
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        key = sharing_key(tensor, geometry)
        shared = met.find(key, saved.version)
        # Another block's lossy copy may not.
        if shared is not None and not serves(shared, geometry, saved.form, saved.reading, saved.normalizes):
            shared = None
        stored = kept = None
        try:
            if not isinstance(shared, RawActivation):  # codes beside it would take more bytes
                stored = shared or self.derive(saved, derivation) or self._encode(saved, geometry, derivation)
            if stored is None:
                kept = self._sharing.keep(met, tensor.untyped_storage(), self._pagers.on(tensor.device))
        except ActivationBudgetError:
            # Perhaps not finite, and too large to stay as it is: gradient scalers need to see that, not where.
            stored = self._encode(saved, geometry, derivation, require_finite=False)
            if stored is None:
                raise
        if stored is None:
            self._recorder.stored_as[RawActivation.name] += 1
            if saved.place is None or saved.reading is not None:
                raw = RawActivation(tensor, kept, saved.version)
                met.add(key, saved.version, raw)
                return raw
            return Handle.of(_compact(saved, geometry, kept), geometry, saved)  # its reader may need less
        if stored.readable_by_any_op:  # otherwise other operators ask for more
            met.add(key, saved.version, stored)
        self._recorder.stored_as["shared" if shared else stored.name] += 1
        return Handle.of(stored, geometry, saved)

    def keep(self, tensor: Tensor, site: Site) -> RawActivation:
        """Keeps an activation as it is.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        kept = self._keep(tensor, self._meet(tensor))
        self._recorder.stored_as[RawActivation.name] += 1
        return kept

    def store_as(
        self, decision: Decision, look: Look, tensor: Tensor, frame: FrameType, derive: Derive
    ) -> Packed | None:
        """Stores an activation as another one was stored, where `frame` is running; None where `store` is to decide.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        reading = look.reading
        if look.form is TensorKind.RAW:
            decision.direct = self._direct(decision, look, tensor.dtype, 0, False)
            return self.keep(tensor, look.site)
        if decision.device not in self._backends or self._spares_bits(reading, decision.device):
            return None
        met = self._meet(tensor)
        stored = None if met.last is None else met.find(sharing_key(tensor, decision.geometry), tensor._version)
        if stored is not None and not serves(stored, decision.geometry, look.takes, reading, look.reads_rows):
            stored = None
        raw = type(stored) is RawActivation
        if decision.shared is not (stored is not None and not raw):
            return None
        if raw:
            stored = self._keep(tensor, met)
        elif stored is None:
            if decision.kind is RawActivation and look.takes is TensorKind.LOSSY and not self.is_exact:
                return None  # codes may pay now
            # Whether anything is stored that it follows from is the same in each pass of exact mode: 1.1 of 38 ms.
            follows = decision.follows and not (self.is_exact and decision.kind is RawActivation)
            stored = derive(look, tensor, frame) if follows else None
            stored = stored or self._encode_as(decision, look, tensor, met)
            if stored is not None and self._pagers.on(decision.device).at_ease:  # elsewhere planes may be gone already
                planes = stored.lease.planes if type(stored) is PlanesActivation else 0
                decision.direct = self._direct(decision, look, tensor.dtype, planes, follows)
        if stored is None or (type(stored) is not decision.kind and not decision.shared):
            return None
        return self._packed_as(decision, look, tensor, met, stored)

    def decide_alike(self, latest: Decision, look: Look, tensor: Tensor) -> Decision | None:
        """Returns for a new shape, of the same form, what was decided for another one; None where that says nothing."""
        if latest.kind is RawActivation and look.form is TensorKind.LOSSY and not self.is_exact:  # codes may pay here
            return None
        decision = Decision.of(tensor, look, latest.kind, latest.shared)
        if latest.kind is PlanesActivation and not latest.shared:
            values = decision.geometry.compact(tensor.detach())
            decision.groups = self._grouping(look.takes, look, decision.geometry, look.reads_rows, values)
        known = latest.direct
        if known is not None and known.token is self.shelf.token and decision.follows is latest.follows:
            decision.direct = self._direct(decision, look, tensor.dtype, known.planes, known.follows)
        return decision

    def derive(self, saved: SavedTensor, derivation: Derivation) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored; None otherwise."""
        if saved.reading is not None and saved.reading.deviation == math.inf:  # a recipe has the error of its source
            return None
        if saved.attends and not self.is_exact:
            return derivation.attended(saved) or derivation.derive(saved, self.is_exact)
        if not saved.takes_approximations:
            return None
        tensor, pager = saved.tensor, self._pagers.on(saved.tensor.device)
        recipe = derivation.derive(saved, self.is_exact)
        recipe = recipe or self._arguments.recipe(saved, derivation, self._encode, pager)
        bounds, backend = saved.reading and saved.reading.bounds, self._backends.get(tensor.device)
        if recipe is None or bounds is None or not recipe.lossy:
            return recipe
        values = geometry_of(tuple(tensor.shape), tuple(tensor.stride())).compact(tensor.detach())
        return None if backend is None else BoundedActivation(recipe, KeptSides.of(values, bounds, pager, backend))

    def _direct(self, decision: Decision, look: Look, dtype: torch.dtype, planes: int, follows: bool) -> Direct | None:
        """Returns what the next tensor of a decision is stored with, in the fewest calls; None where it takes more."""
        if decision.kind is RawActivation and look.form is TensorKind.LOSSY and not self.is_exact:
            return None
        return self._directs.get(decision, look, dtype, planes, follows)

    def _packed_as(
        self, decision: Decision, look: Look, tensor: Tensor, met: MetStorage, stored: StoredActivation
    ) -> Packed:
        """Counts what a tensor was stored as, and returns what autograd keeps of it."""
        geometry, version = decision.geometry, tensor._version
        if stored.readable_by_any_op:
            met.add(sharing_key(tensor, geometry), version, stored)
        self._recorder.stored_as["shared" if decision.shared else stored.name] += 1
        if type(stored) is RawActivation:
            return stored
        place, reference = look.sighting.place, weakref.ref(tensor)
        return Handle(stored, geometry, tensor.dtype, decision.device, place, look.reading, reference, version)

    def _encode_as(self, decision: Decision, look: Look, tensor: Tensor, met: MetStorage) -> StoredActivation | None:
        """Returns what `decision` says of the values of a tensor; None where that does not hold."""
        kind, geometry, form = decision.kind, decision.geometry, look.takes
        pager, backend = self._pagers.on(decision.device), self._backends[decision.device]
        values = geometry.compact(tensor.detach())
        if kind is BitmaskActivation:
            return BitmaskActivation.pack(values, pager, backend)
        if backend.two_values(values) is not None:
            return None
        if kind is RawActivation:
            # What may lose precision was not finite, and may be so now; what stays as it is may have to move.
            may_change = (form is TensorKind.LOSSY and not self.is_exact) or (pager.spills and pager.budget is not None)
            return None if may_change else self._keep(tensor, met)
        if kind is not PlanesActivation or self._lossy.codec(look.site) is not None:
            return None
        groups = decision.groups
        if groups is None:
            groups = decision.groups = self._grouping(form, look, geometry, look.reads_rows, values)
            assert groups is not None
        if look.reads_rows and groups.shares and spreads_differ(values, groups):
            return None
        ctx = EncodeContext(values, pager, backend, groups, lossy=self._lossy)
        stored = self._lossy.store(PlanesActivation, look.site, look.reading, ctx)
        if stored is None:
            self._lossy.withdraw(look.site, None)  # the full way counts it once more
        return stored

    def _meet(self, tensor: Tensor) -> MetStorage:
        """Returns what is known of the storage of a tensor; one that is new in this pass is counted."""
        number, storage = storage_id(tensor), tensor.untyped_storage()
        met = self._sharing.get(number, storage)
        return self.shelf.meet(number, storage) if met is None else met

    def _keep(self, tensor: Tensor, met: MetStorage) -> RawActivation:
        """Keeps a tensor as it is; the errors are those of `keep`."""
        pager = self._pagers.on(tensor.device)
        return RawActivation(tensor, self._sharing.keep(met, tensor.untyped_storage(), pager))

    def room(self, device: torch.device) -> int:
        """Returns the bytes of a device that the budget leaves now."""
        pager = self._pagers.on(device)
        return sys.maxsize if pager.budget is None else max(pager.budget - pager.settle(), 0)

    def store_again(self, saved: SavedTensor, handle: Handle, reading: Reading | None) -> None:
        """Stores a tensor otherwise, now that it is known who reads it; None keeps the tensor as it is.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
        """
        if not (handle.stored.lossy or (reading is not None and reading.kind in _OWN_FORMS)):
            return
        if reading is not None and reading.deviation and not self._lossy.sharpens(saved.site, reading.deviation):
            return
        if self._spares_bits(reading, saved.tensor.device):
            handle.reading = replace(reading, deviation=0.0, bounds=None)
            return
        tensor, stored = saved.tensor, None
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        if reading is not None and reading.kind is Kind.NORMALIZED:
            if not reading.deviation and _suits_normalization(handle.stored, saved, reading, geometry):
                return
            saved.normalizes = True
        if reading is not None and (reading.kind is Kind.SHAPE or tensor._version == saved.version):
            saved.reading = reading
            stored = self._encode_for(reading, saved, geometry)
        before, name, met = weakref.ref(handle.stored), handle.stored.name, self._meet(tensor)
        if stored is None:
            if reading is not None:  # its codes are of no use, also where there is no room for it
                handle.stored = ShapeActivation()
            kept = self._sharing.keep(met, tensor.untyped_storage(), self._pagers.on(tensor.device))
            stored = _compact(saved, geometry, kept)
        if stored.readable_by_any_op:  # what is saved of it after this has the same error
            met.add(sharing_key(tensor, geometry), saved.version, stored)
        handle.stored = stored
        self._lossy.withdraw(saved.site, before())
        counts = self._recorder.stored_as
        counts.subtract(["shared" if before() is not None and counts["shared"] else name])
        counts[stored.name] += 1
        self._recorder.stored_as = +counts

    def _spares_bits(self, reading: Reading | None, device: torch.device) -> TypeGuard[Reading]:
        """Says whether a budget has no bits to give to what takes more of them without one, or stays exact.

        Its error is larger by that, and not without limit as that of sharp scores.
        """
        more = reading is not None and (reading.deviation == math.inf or reading.jumps)
        return more and self._pagers.on(device).budget is not None

    def _encode_for(self, reading: Reading, saved: SavedTensor, geometry: Geometry) -> StoredActivation | None:
        """Stores a tensor that waited for its reader; None keeps it as it is."""
        if reading.kind is Kind.SHAPE:
            return ShapeActivation()
        backend = self._backends.get(saved.tensor.device)
        if backend is None:
            return None
        ctx = self._context(saved, geometry, backend, geometry.compact(saved.tensor))
        if reading.kind is Kind.SIDES:
            return SidesActivation.encode(saved, ctx)
        if reading.kind is Kind.LOGARITHMS:
            return LogarithmsActivation.encode(saved, ctx)
        if reading.kind is Kind.PROBABILITIES:
            return ProbabilitiesActivation.encode(saved, ctx)
        return PlanesActivation.encode(saved, ctx) if reading.takes_approximations else None

    def _encode(
        self, saved: SavedTensor, geometry: Geometry, derivation: Derivation, require_finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(saved.tensor.device)
        if saved.form is TensorKind.RAW or backend is None:
            return None
        values = geometry.compact(saved.tensor)
        ctx = self._context(saved, geometry, backend, values if saved.fetch is None else saved.fetch(values))
        ctx.require_finite, ctx.sources = require_finite, derivation
        # Codes for one reader alone would hide what is not finite.
        saved.codec = self._lossy.codec(saved.site) if require_finite else None
        return encode_first(ctx.codecs, saved, ctx, lossy=not self.is_exact)

    def _context(self, saved: SavedTensor, geometry: Geometry, backend: Backend, values: Tensor) -> EncodeContext:
        pager = self._pagers.on(saved.tensor.device)
        groups = self._grouping(saved.form, saved, geometry, saved.normalizes, values.detach())
        return EncodeContext(values, pager, backend, groups, lossy=self._lossy, codecs=registry.CODECS)

    def _grouping(
        self, form: TensorKind, saved: SavedTensor | Look, geometry: Geometry, normalized: bool, values: Tensor
    ) -> Grouping | None:
        """Returns the scaling groups of a tensor, which a normalization reads or not; None where it has none.

        `values` are its compact form.
        """
        if form is not TensorKind.LOSSY or self.is_exact:
            return None
        groups = groups_for(saved.reading, geometry, saved.site.op, normalized)
        if groups is None or not may_share(groups, saved.reading):
            return groups
        common = self.common_rows.blocks(saved.site, geometry, groups.group, values)
        return groups if common is None else replace(groups, beside=common)


def _compact(saved: SavedTensor, geometry: Geometry, kept: KeptStorage | None) -> RawActivation:
    return RawActivation(geometry.compact(saved.tensor), kept, saved.version)


def _suits_normalization(stored: StoredActivation, saved: SavedTensor, reading: Reading, geometry: Geometry) -> bool:
    """Says whether what was stored of a tensor keeps the error of each row small beside the row."""
    if not stored.suits_rows or groups_otherwise(stored, geometry, reading):
        return False
    own = normalized_groups(geometry, reading.reader, reading.dim, reading.pieces)
    return own is None or not (own.shares and spreads_differ(geometry.compact(saved.tensor), own))
