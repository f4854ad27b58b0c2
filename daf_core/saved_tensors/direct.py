"""Stores tensors that are replayed: in one function each, and with one call into compiled code, or a launch.

A call of a Python function takes 1 us between the kernels of a model, whose code and data fill the caches, and a tensor
passes thirty of them on the way through `ActivationStore.store`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from daf_core.autograd.torch_private import number_of
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.planes import LossyStore, PlanesActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import RECIPES
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.devices import DevicePagers
from daf_core.memory.idle_leases import MOST_KINDS
from daf_core.memory.lease import LeaseKind
from daf_core.memory.pager import Pager
from daf_core.saved_tensors.dedup import MetStorage, StorageTable
from daf_core.saved_tensors.handle import Handle, Packed
from daf_core.telemetry import StepRecorder
from daf_kernels import Backend, DirectBackend, DirectCodec, PlaneLayout, mask_pages

if TYPE_CHECKING:
    from daf_core.saved_tensors.recording import Decision, Look


Derive = Callable[["Look", Tensor, FrameType], StoredActivation | None]
"""Returns a recipe for a tensor that follows from what is stored, as a function saves it; None where it does not."""


@dataclass(slots=True)
class Shelf:
    """Where the tensors of a forward pass are stored."""

    recorder: StepRecorder  # counts what is done
    lossy: LossyStore  # chooses the precision of what may lose precision
    sharing: StorageTable = field(default_factory=StorageTable)  # what was stored in this pass
    unsaved: StorageTable = field(default_factory=StorageTable)  # what a block has not saved that is recomputed
    # Storages of parameters and buffers, by their `storage_id`.
    parameters: Mapping[int, object] = field(default_factory=dict[int, object])
    token: object = None  # `LossyStore.token` when the pass began
    # A worker meets the input of a block while the block, which runs, says that it does not save it: it counts once.
    counting: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, number: int, storage: UntypedStorage) -> MetStorage:
        """Returns what is going to be known of a storage that is saved and was not met before, and counts it."""
        with self.counting:
            if self.unsaved.met and self.unsaved.get(number, storage) is not None:  # it was counted
                self.recorder.scope_raw_bytes += self.sharing.size_of(storage)
            else:
                self.recorder.add_raw(self.sharing.size_of(storage))
            return self.sharing.add(number, storage)

    def knows(self, storage: UntypedStorage) -> bool:
        """Says whether a storage was counted in this pass."""
        number = number_of(storage)
        return self.sharing.get(number, storage) is not None or self.unsaved.get(number, storage) is not None

    def pass_by(self, storage: UntypedStorage) -> None:
        """Counts a storage, unless it was, that plain training would save, but not a block that is recomputed."""
        with self.counting:
            if not self.knows(storage):
                self.unsaved.add(number_of(storage), storage)
                self.recorder.add_unsaved(self.sharing.size_of(storage))


@dataclass(slots=True, frozen=True)
class Direct:
    """What a tensor of a decision is stored with."""

    pager: Pager  # where its pages come from
    token: object  # that of the precisions
    codec: DirectCodec | None = None  # encodes its elements; None where nobody looks at them
    kind: LeaseKind | None = None  # its pages; None where it stays as it is
    backend: Backend | None = None  # decodes it where that takes more than the codec
    planes: int = 0  # planes that are stored of its codes; 0 for a mask
    layout: PlaneLayout | None = None  # where its codes lie; None for a mask
    groups: Grouping | None = None  # its scaling groups; None for a mask
    sizes: Sequence[int] = ()  # bytes of it at each precision, and as it is; nothing for a mask
    follows: bool = False  # whether it may follow from what is stored

    def store(
        self, shelf: Shelf, decision: Decision, look: Look, tensor: Tensor, frame: FrameType, derive: Derive
    ) -> Packed | None:
        """Stores a plain tensor of the decision that `frame` saves; None where it or its values do not allow that.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
        """
        pager, codec, kind, geometry, dtype = self.pager, self.codec, self.kind, decision.geometry, tensor.dtype
        if self.token is not shelf.token or not pager.at_ease or tensor.device != decision.device:
            return None
        if kind is not None and kind.retired:
            return None
        storage = tensor.untyped_storage()
        number, version, counts = number_of(storage), tensor._version, shelf.recorder.stored_as
        if number in shelf.parameters:
            return None
        key, origin = None, tensor.data_ptr()
        if look.form is not TensorKind.RAW:
            # Zero tensors, such as tangents of what has none, have no memory.
            if not origin or tensor.stride() != geometry.strides or tensor.is_neg():
                return None
            key = tensor.storage_offset(), dtype, geometry.compact_shape, geometry.compact_strides, False
        met = shelf.sharing.met.get(number)
        if met is None or met.storage() is not storage:
            met = shelf.meet(number, storage)
        elif key is not None and met.find(key, version) is not None:
            return None
        stored = derive(look, tensor, frame) if self.follows else None
        if stored is None and codec is not None and kind is not None:
            stored = self._encode(shelf, codec, kind, decision, tensor)
            if type(stored) is PlanesActivation:
                shelf.lossy.count(look.site, self.sizes, stored)
        elif stored is None and decision.kind is RawActivation and (codec is None or not codec.is_mask(origin)):
            stored = RawActivation(tensor, shelf.sharing.keep(met, storage, pager), version)
        if stored is None or type(stored) is not decision.kind:
            return None
        if key is not None:
            met.add(key, version, stored)
        counts[stored.name] += 1
        if type(stored) is RawActivation:
            return stored
        place, reference = look.sighting.place, weakref.ref(tensor)
        return Handle(stored, geometry, dtype, decision.device, place, look.sighting.reading, reference, version)

    def _encode(
        self, shelf: Shelf, codec: DirectCodec, kind: LeaseKind, decision: Decision, tensor: Tensor
    ) -> PlanesActivation | BitmaskActivation | None:
        """Encodes the elements of a tensor; None where they are of two values or not, or not finite."""
        pager, layout, groups, backend = self.pager, self.layout, self.groups, self.backend
        assert backend is not None
        if layout is None or groups is None:
            stored = BitmaskActivation(pager, backend, (0, 0))
        else:
            stored = PlanesActivation(pager, backend, layout, groups)
        geometry, dense = decision.geometry, tensor
        decodes: DirectCodec | None = codec
        keeps_more = groups is not None and groups.keeps_more
        if keeps_more or geometry.has_holes:
            dense = geometry.compact(tensor.detach()).contiguous()
        if keeps_more and type(stored) is PlanesActivation:
            dense = stored.set_aside(dense)
            decodes = codec if stored.is_codes_alone else None  # otherwise that is to be added
        declined, zero, one, finite = pager.take(kind, stored, codec.encode, dense.data_ptr())
        if declined:
            return None
        stored.direct, stored.two = decodes, (zero, one)
        if finite is not None and type(stored) is PlanesActivation:
            stored.check_later(shelf.lossy.checks, tensor, finite, geometry.compact)
            if stored.check is None and not finite:
                return None
        return stored


class Directs:
    """What the tensors of a store are stored with: those of equal blocks, which are stored alike, share it."""

    def __init__(self, backends: Mapping[torch.device, Backend], pagers: DevicePagers, lossy: LossyStore) -> None:
        self._backends, self._pagers, self._lossy = backends, pagers, lossy
        self._known: dict[tuple[object, ...], Direct] = {}

    def get(self, decision: Decision, look: Look, dtype: torch.dtype, planes: int, follows: bool) -> Direct | None:
        """Returns what the next tensor of a decision is stored with now; None where that takes more.

        `planes` are the planes of its codes, if it has any.
        """
        geometry, device, token = decision.geometry, decision.device, self._lossy.token
        key = (
            decision.kind, look.form, look.reads_rows, geometry.compact_shape, geometry.has_holes, decision.groups,
            dtype, device, planes, follows,
        )  # fmt: skip
        known = self._known.get(key)
        if known is not None and known.token is token and (known.kind is None or not known.kind.retired):
            return known
        made = self._make(decision, look, dtype, planes, follows)
        if made is not None:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            self._known[key] = made
        return made

    def _make(self, decision: Decision, look: Look, dtype: torch.dtype, planes: int, follows: bool) -> Direct | None:
        pager, backend = self._pagers.on(decision.device), self._backends.get(decision.device)
        geometry, kind, groups, token = decision.geometry, decision.kind, decision.groups, self._lossy.token
        if look.form is TensorKind.RAW:
            return Direct(pager, token)
        if kind in RECIPES:
            return Direct(pager, token, follows=follows)
        # Whether what stays as it is is a mask is seen at its beginning, which is not worth a copy without holes.
        if not isinstance(backend, DirectBackend) or (kind is RawActivation and geometry.has_holes):
            return None
        elements, page_bytes, device = math.prod(geometry.compact_shape), pager.pool.page_bytes, decision.device
        if kind is RawActivation or kind is BitmaskActivation:
            if (codec := backend.direct_mask(elements, dtype, page_bytes, device)) is None:
                return None
            pages = pager.kind(mask_pages(elements, page_bytes)) if kind is BitmaskActivation else None
            return Direct(pager, token, codec, pages, backend, follows=follows)
        if kind is not PlanesActivation or token is None or groups is None or groups.shape is not None:
            return None
        layout = PlaneLayout(elements, groups.group, page_bytes)
        row = groups.row if look.reads_rows and groups.shares and not elements % groups.row else 0
        codec = backend.direct_planes(layout, planes, dtype, row, device)
        if codec is None or (row and groups.beside is not None):
            return None
        beside = groups.bytes_beside(elements, page_bytes)
        pages = PlanesActivation.pages_of(elements, groups.group, dtype.itemsize, planes, pager, beside)
        if pages is None:
            return None
        sizes = PlanesActivation.sizes_of(elements, groups.group, dtype.itemsize, page_bytes, beside)
        return Direct(pager, token, codec, pages, backend, planes, layout, groups, sizes, follows)
