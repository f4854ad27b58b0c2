"""Packs what autograd saves, and unpacks it again: which form an activation takes, one after the other."""

from __future__ import annotations

import time
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
from daf_core.codecs.slopes import GELU
from daf_core.config import DAFConfig
from daf_core.derivation import Derivation
from daf_core.eligibility import Eligibility, Form
from daf_core.errors import ActivationBudgetError, ReaderError
from daf_core.geometry import Geometry, geometry_of
from daf_core.grouping import Grouping, grouping_of
from daf_core.handle import Handle
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.sharing import SharingTable
from daf_core.sites import ModuleScopes, Site
from daf_core.telemetry import StepRecorder
from daf_core.torch_internals import in_backward, is_being_saved, is_changed_view, packed_for, running_node
from daf_kernels import Backend

Packed = Handle | RawActivation


class LossyStore(Protocol):
    """Stores activations that may lose precision."""

    def __call__(
        self, values: Tensor, grouping: Grouping, site: Site, pager: Pager, backend: Backend, finite: bool
    ) -> StoredActivation | None:
        """Stores flat `values`; None where they are to stay as they are.

        Without `finite`, values that are not finite may decode to NaN together with their neighbours.
        """
        ...


class Packer:
    """A pair of saved-tensor hooks.

    Args:
        config: The options; `precision` matters only in being "exact" or not.
        eligibility: Tells activations from parameters.
        scopes: Knows which module is running.
        backends: Kernels of the devices that activations are compressed on.
        pagers: Where they are stored.
        lossy: How those are stored that may lose precision.
        recorder: Counts what is done.
    """

    def __init__(
        self,
        config: DAFConfig,
        eligibility: Eligibility,
        scopes: ModuleScopes,
        backends: Mapping[torch.device, Backend],
        pagers: DevicePagers,
        lossy: LossyStore,
        recorder: StepRecorder,
    ) -> None:
        self._exact = config.precision == "exact"
        self._spills = config.spill_dir is not None
        self._eligibility = eligibility
        self._scopes = scopes
        self._backends = backends
        self._pagers = pagers
        self._lossy = lossy
        self._recorder = recorder
        self._sharing = SharingTable()

    def finish_pass(self) -> None:
        """Ends a forward pass."""
        self._sharing.clear()

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
            SpillError: The spill file cannot be written.
        """
        started = time.perf_counter()
        call = self._scopes.current
        form = self._eligibility.form(tensor, call.largest)
        # A backward inside the scope recomputes checkpointed blocks, whose activations are used at once.
        if form is Form.PARAMETER or in_backward():
            return RawActivation(tensor, None)
        site = call.next_site(tensor)
        if self._sharing.is_new_storage(tensor):
            self._recorder.add_raw(tensor.untyped_storage().nbytes())
        packed = self._pack_activation(tensor, form, site)
        self._recorder.pack_seconds += time.perf_counter() - started
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Returns the tensor.

        Raises:
            ModifiedInPlaceError: It was kept as it was, and changed since.
            SpillError: The spill file cannot be read.
            ReaderError: The derivative of GELU was kept of it, and something else asks for it.
        """
        if isinstance(packed, RawActivation):
            return packed.unpack()
        if not (packed.stored.whole or isinstance(packed.stored, SignsActivation)):  # slopes, rectified or not
            self._check_reader(packed)
        started = time.perf_counter()
        tensor = packed.unpack()
        self._recorder.unpack_seconds += time.perf_counter() - started
        return tensor

    def _check_reader(self, packed: Handle) -> None:
        """Lets only the backward of a GELU read codes of the derivative at its own input.

        Raises:
            ReaderError: It is something else, or the backward is to be differentiated in turn.
        """
        node = running_node()
        name = None if node is None else node.name()
        # Where a GELU is the first to ask for what a checkpoint recomputes, the checkpoint's input is read meanwhile.
        own = name == GELU and packed_for(node, "self", self.unpack) is packed
        if own and not torch.is_grad_enabled():
            return
        if own:
            reader = "a gradient of the gradient (create_graph=True)"
        elif name == GELU:
            reader = "what is recomputed for another GELU"
        else:
            reader = name or "something outside of backward"
        raise ReaderError(
            f"{reader} asks for the input of a GELU, of which only the derivative was kept: at the last calibration "
            "nothing but the GELU's own backward used it. Set precision to a number of bits (8, 4, 2 or 1), which "
            "keeps values"
        )

    def _pack_activation(self, tensor: Tensor, form: Form, site: Site) -> Packed:
        """Packs an activation in the first form that can hold it: shared, a codec's, or raw."""
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        shared = self._sharing.find(tensor, geometry)
        kept = None
        try:
            stored = shared or self._derive(tensor, form) or self._store(tensor, geometry, form, site)
            if stored is None:
                kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
        except ActivationBudgetError:
            # Perhaps not finite, and too large to stay as it is: gradient scalers need to see that, not where.
            stored = self._store(tensor, geometry, form, site, finite=False)
            if stored is None:
                raise
        if stored is None:
            self._recorder.stored_as[RawActivation.codec] += 1
            return RawActivation(tensor, kept)
        if stored.whole:  # otherwise other operators ask for more
            self._sharing.add(tensor, geometry, stored)
        self._recorder.stored_as["shared" if shared else stored.codec] += 1
        return Handle(stored, geometry, tensor)

    @property
    def _derivation(self) -> Derivation:
        return Derivation(self._scopes, self.unpack)  # keeping it would tie a knot of references

    def _derive(self, tensor: Tensor, form: Form) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored."""
        return self._derivation.derive(tensor, self._exact) if form is Form.LOSSY else None

    def _store(
        self, tensor: Tensor, geometry: Geometry, form: Form, site: Site, finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(tensor.device)
        if form is Form.RAW or backend is None:
            return None
        values, pager = geometry.compact(tensor), self._pagers.on(tensor.device)
        stored: StoredActivation | None
        if form is Form.INTEGER:
            stored = NarrowIntActivation.encode(values, pager)
        else:
            stored = BitmaskActivation.encode(values, pager, backend)
        if stored is None and form is Form.LOSSY and not self._exact:
            stored = self._store_lossy(tensor, values, grouping_of(geometry, site.op), site, pager, backend, finite)
        if stored is None and self._spills and pager.budget is not None:
            return VerbatimActivation.copy(values, pager)
        return stored

    def _store_lossy(
        self,
        tensor: Tensor,
        values: Tensor,
        grouping: Grouping,
        site: Site,
        pager: Pager,
        backend: Backend,
        finite: bool,
    ) -> StoredActivation | None:
        """Encodes what may lose precision; of what is a ReLU's result, or may be one, the signs are kept."""
        signs = self._derivation.signs_of(tensor)
        if signs is None and site.op == RELU and is_being_saved(tensor.grad_fn, "result"):
            signs = SignsActivation.encode(values, pager, backend, tensor._version)
            signs.argument = self._derivation.argument_of(tensor)
            return signs
        if signs is None and _may_be_rectified(tensor, site) and values.min() >= 0:  # less where it was changed since
            signs = SignsActivation.encode(values, pager, backend, tensor._version)
        planes = self._lossy(values, grouping, site, pager, backend, finite)
        return planes if planes is None or signs is None else RectifiedActivation(signs, planes)


def _may_be_rectified(tensor: Tensor, site: Site) -> bool:
    return site.op == RELU or is_changed_view(tensor)
