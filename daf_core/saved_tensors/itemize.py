"""What forward passes save, tensor by tensor: where, for which operator, and what is held of each at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_private import all_nodes, all_packed
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.readers.table import Reading
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.handle import Handle, Packed
from daf_core.saved_tensors.pending import packed_now
from daf_core.saved_tensors.store import ActivationStore
from daf_core.telemetry import StepRecorder

PackedTensor = TypeVar("PackedTensor", bound=Packed)

NO_OPERATOR = "(not reached from the loss)"

PACKING = Site("", "(while packing)", 0)
"""Where that is counted which was held at the peak only until a tensor was packed."""


@dataclass(frozen=True)
class SavedItem:
    """A tensor that autograd has saved."""

    site: Site
    operator: str  # name of the autograd node that keeps it for its backward; see `Items.name_operators`
    codec: str  # how it is stored; "shared" where it was stored already
    # Bytes of its storage, as `StepStatistics.raw_bytes` counts them: 0 where the storage was saved before, for another
    # tensor.
    raw_bytes: int
    # What storing it has added to the bytes that are held: its pages, or its storage where that is kept.
    held_bytes: int


@dataclass
class _Entry:
    """An item, and how long it lives."""

    item: SavedItem
    packed: weakref.ref[Packed]  # what autograd keeps
    device: torch.device  # where they are counted
    holder: weakref.ref[Any] | None = None  # what holds the item's bytes as long as it exists, also for other items
    end: int | None = None  # how many items had been stored when the bytes were given back; None where they were not


@dataclass
class _Peak:
    """When a device held the most."""

    size: int = 0  # bytes
    place: int = 0  # number of the item that was being stored then


class Items:
    """The tensors that are saved, in the order of saving."""

    def __init__(self, unpack: Callable[[Any], Tensor]) -> None:
        self._unpack = unpack
        self._entries: list[_Entry] = []
        self._peaks: dict[torch.device, _Peak] = {}

    def add(self, item: SavedItem, packed: Packed, device: torch.device, peak: int) -> None:
        """Takes the next item, after whose saving `peak` bytes were the most that were held at once so far."""
        entry, place = _Entry(item, weakref.ref(packed), device), len(self._entries)
        holder = packed.holder
        if item.held_bytes and holder is not None:
            entry.holder = weakref.ref(holder, lambda _: self._end(entry))
        self._entries.append(entry)
        known = self._peaks.setdefault(device, _Peak())
        if peak > known.size:
            known.size, known.place = peak, place

    def change(self, handle: Handle, grown: int) -> None:
        """Takes that an item is stored otherwise now, which has added so many bytes to those that are held."""
        entry = next(entry for entry in self._entries if entry.packed() is handle)
        held = entry.item.held_bytes + grown
        entry.item = replace(entry.item, codec=handle.stored.name, held_bytes=held)
        entry.end, entry.holder = None, weakref.ref(handle.stored, lambda _: self._end(entry)) if held else None

    def name_operators(self, loss: Tensor) -> None:
        """Finds out which autograd nodes have saved what; to be called while the graph of the loss is whole."""
        names: dict[int, str] = {}
        for node in all_nodes(loss.grad_fn):
            for packed in all_packed(node, self._unpack):
                found = packed_now(packed)
                names.setdefault(id(found), node.name())
        for entry in self._entries:
            if (name := names.get(id(entry.packed()))) is not None:
                entry.item = replace(entry.item, operator=name)

    def at_peak(self) -> list[SavedItem]:
        """Returns the items with what was held of each when the most was held.

        The sums of bytes are `StepStatistics.raw_bytes` of a step with one forward pass, and its `held_bytes`, where no
        budget takes anything away. What was held only while a tensor was packed is an item of its own, at `PACKING`.
        """
        held = [self._held_at_peak(place, entry) for place, entry in enumerate(self._entries)]
        found = [replace(entry.item, held_bytes=size) for entry, size in zip(self._entries, held, strict=True)]
        beside = sum(peak.size for peak in self._peaks.values()) - sum(held)
        return [*found, SavedItem(PACKING, PACKING.op, PACKING.op, 0, beside)] if beside else found

    def _end(self, entry: _Entry) -> None:
        entry.end = len(self._entries)

    def _held_at_peak(self, place: int, entry: _Entry) -> int:
        peak = self._peaks[entry.device].place
        return entry.item.held_bytes if place <= peak and (entry.end is None or entry.end > peak) else 0


class ItemizingStore:
    """Stores activations as another store does, and lists them."""

    def __init__(self, store: ActivationStore, pagers: DevicePagers, recorder: StepRecorder, items: Items) -> None:
        self._store = store
        self._pagers = pagers
        self._recorder = recorder
        self._items = items

    def store(self, saved: SavedTensor, derivation: Derivation) -> Packed:
        """See `ActivationStore.store`."""
        return self._listed(saved.site, saved.tensor.device, lambda: self._store.store(saved, derivation))

    def keep(self, tensor: Tensor, site: Site) -> RawActivation:
        """See `ActivationStore.keep`."""
        return self._listed(site, tensor.device, lambda: self._store.keep(tensor, site))

    def room(self, device: torch.device) -> int:
        """See `ActivationStore.room`."""
        return self._store.room(device)

    def store_again(self, saved: SavedTensor, handle: Handle, reading: Reading | None) -> None:
        """See `ActivationStore.store_again`."""
        pager: Pager = self._pagers.on(saved.tensor.device)
        held = pager.settle()
        self._store.store_again(saved, handle, reading)
        self._items.change(handle, pager.settle() - held)

    def finish_pass(self) -> None:
        """See `ActivationStore.finish_pass`."""
        self._store.finish_pass()

    def _listed(self, site: Site, device: torch.device, store: Callable[[], PackedTensor]) -> PackedTensor:
        recorder = self._recorder
        pager: Pager = self._pagers.on(device)
        raw, held, counts = recorder.scope_raw_bytes, pager.settle(), recorder.stored_as.copy()
        packed = store()
        (codec,) = recorder.stored_as - counts
        item = SavedItem(site, NO_OPERATOR, codec, recorder.scope_raw_bytes - raw, pager.settle() - held)
        self._items.add(item, packed, device, pager.account.peak_bytes)
        return packed
