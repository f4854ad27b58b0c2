"""One stored copy for tensors that share storage."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from daf_core.codecs import StoredActivation
from daf_core.codecs.raw import KeptStorage, KeptStorages
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.codecs.tensor_layout import Geometry
from daf_core.memory.pager import Pager
from daf_core.readers.sharpness import SHARP
from daf_core.readers.table import Kind, Reading


class Part(NamedTuple):
    """What a part of a storage was stored as.

    Attributes:
        key: Where it lies, and how.
        version: Its version then.
        stored: What it was stored as.
    """

    key: tuple[object, ...]
    version: int
    stored: weakref.ref[StoredActivation]


class MetStorage:
    """A storage that was met in a pass, and what its parts were stored as."""

    __slots__ = ("parts", "storage")

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self.parts: list[Part] = []

    def find(self, key: tuple[object, ...], version: int) -> StoredActivation | None:
        """Returns the live stored activation of the same values: same place in the storage at the same version."""
        for part in reversed(self.parts):
            if part.key == key:
                return part.stored() if part.version == version else None
        return None

    def add(self, key: tuple[object, ...], version: int, stored: StoredActivation) -> None:
        """Remembers what a tensor of the storage was stored as."""
        self.parts.append(Part(key, version, weakref.ref(stored)))


class Meeting(NamedTuple):
    """A storage that a tensor was met in.

    Attributes:
        known: What its parts were stored as.
        new: Whether no tensor of it was met before in this pass.
    """

    known: MetStorage
    new: bool


class StorageTable:
    """Finds the stored activation of a tensor that was saved before, in the same forward pass.

    A storage is known by the address of its control block, which another one may have when it is freed. So the table
    keeps a weak reference to each storage it has seen.
    """

    def __init__(self) -> None:
        self._met: dict[int, MetStorage] = {}
        self._kept = KeptStorages()

    def get(self, number: int, storage: UntypedStorage) -> MetStorage | None:
        """Returns what is known of a storage with this `storage_id`; None where it was not met before."""
        found = self._met.get(number)
        return found if found is not None and found.storage() is storage else None

    def add(self, number: int, storage: UntypedStorage) -> MetStorage:
        """Returns what is going to be known of a storage that was not met before."""
        met = self._met[number] = MetStorage(storage)
        return met

    def keep(self, tensor: Tensor, pager: Pager) -> KeptStorage:
        """Returns the account of a tensor's storage among raw activations.

        Raises:
            ActivationBudgetError: The storage does not fit in the budget.
        """
        return self._kept.keep(tensor, pager)

    def clear(self) -> None:
        """Forgets all tensors. Storages that raw activations keep alive stay accounted for."""
        self._met.clear()


def sharing_key(tensor: Tensor, geometry: Geometry) -> tuple[object, ...]:
    """Returns what tensors of a storage have in common that are the same part of it."""
    return tensor.storage_offset(), tensor.dtype, geometry.compact_shape, geometry.compact_strides, tensor.is_neg()


def serves(stored: StoredActivation, form: TensorKind, reading: Reading | None) -> bool:
    """Says whether what was stored of the same values for another reader serves a tensor's."""
    if form is TensorKind.RAW:
        return False
    if reading is None:
        return stored.readable_by_any_op
    if stored.lossy and reading.deviation >= SHARP:  # in the bits that others take
        return False
    return reading.kind is not Kind.SHAPE and stored.serves(reading)
