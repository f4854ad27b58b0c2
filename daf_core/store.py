"""Stores activations one after the other, each in the first form that can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from daf_core.codecs import (
    BitmaskActivation,
    NarrowIntActivation,
    RawActivation,
    RectifiedActivation,
    SignsActivation,
    StoredActivation,
    VerbatimActivation,
)
from daf_core.codecs.signs import RELU
from daf_core.config import DAFConfig
from daf_core.derivation import Derivation
from daf_core.eligibility import Form
from daf_core.errors import ActivationBudgetError
from daf_core.geometry import Geometry, geometry_of
from daf_core.grouping import Grouping, grouping_of
from daf_core.handle import Handle
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.saved import SavedTensor
from daf_core.sharing import SharingTable, sharing_key
from daf_core.sites import Site
from daf_core.telemetry import StepRecorder
from daf_core.torch_internals import is_being_saved, is_changed_view
from daf_kernels import Backend
from daf_kernels.layout import shares_groups

LARGEST_SPREAD_RATIO = 16
"""Between rows that share a scaling group and are normalized: at 4 bits an error is 1/30 of the group's spread, and
where a row spreads 1/16 of that, half of what its normalization returns. A token of zeros, such as a new class token,
returns noise alone."""


class LossyStore(Protocol):
    """Stores activations that may lose precision."""

    def __call__(
        self, values: Tensor, grouping: Grouping, site: Site, pager: Pager, backend: Backend, finite: bool
    ) -> StoredActivation | None:
        """Stores flat `values`; None where they are to stay as they are.

        Without `finite`, values that are not finite may decode to NaN together with their neighbours.
        """
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
        self._sharing = SharingTable()

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
        # What is to stay as it is must not be another block's lossy copy.
        shared = None if saved.form is Form.RAW else self._sharing.find(key, saved.version)
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
            return RawActivation(tensor, kept, saved.version)
        if stored.whole:  # otherwise other operators ask for more
            self._sharing.add(key, tensor, saved.version, stored)
        self._recorder.stored_as["shared" if shared else stored.codec] += 1
        return Handle(stored, geometry, saved)

    def _derive(self, saved: SavedTensor, derivation: Derivation) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored."""
        if saved.attends and not self._exact:
            return derivation.attended(saved) or derivation.derive(saved, self._exact)
        return derivation.derive(saved, self._exact) if saved.form is Form.LOSSY else None

    def _encode(
        self, saved: SavedTensor, geometry: Geometry, derivation: Derivation, finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(saved.tensor.device)
        if saved.form is Form.RAW or backend is None:
            return None
        values, pager = geometry.compact(saved.tensor), self._pagers.on(saved.tensor.device)
        if saved.fetch is not None:
            values = saved.fetch(values)
        stored: StoredActivation | None
        if saved.form is Form.INTEGER:
            stored = NarrowIntActivation.encode(values, pager)
        else:
            stored = BitmaskActivation.encode(values, pager, backend)
        if stored is None and saved.form is Form.LOSSY and not self._exact:
            grouping = grouping_of(geometry, saved.site.op)
            stored = self._encode_lossy(saved, values, grouping, pager, backend, derivation, finite)
        if stored is None and pager.spills and pager.budget is not None:
            return VerbatimActivation.copy(values, pager)
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
        if saved.normalizes and shares_groups(grouping.row) and _spreads_differ(values, grouping.row):
            return None
        signs = derivation.signs_of(saved)
        if signs is None and saved.site.op == RELU and is_being_saved(saved.node, "result"):
            signs = SignsActivation.encode(values, pager, backend, saved.version)
            signs.argument = derivation.argument_of(saved)
            return signs
        if signs is None and _may_be_rectified(saved) and values.min() >= 0:  # less where it was changed since
            signs = SignsActivation.encode(values, pager, backend, saved.version)
        planes = self._lossy(values, grouping, saved.site, pager, backend, finite)
        return planes if planes is None or signs is None else RectifiedActivation(signs, planes)


def _spreads_differ(values: Tensor, row: int) -> bool:
    """Says whether some rows of flat values spread so little beside others that a code shared with them hides them."""
    if values.numel() % row:
        return False
    rows = values.reshape(-1, row)
    spreads = rows.amax(1) - rows.amin(1)
    return bool(spreads.min() * LARGEST_SPREAD_RATIO < spreads.max())


def _may_be_rectified(saved: SavedTensor) -> bool:
    return saved.site.op == RELU or is_changed_view(saved.node)
