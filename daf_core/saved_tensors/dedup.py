"""One stored copy for tensors that share storage."""

from __future__ import annotations

import weakref

from torch import Tensor, UntypedStorage

from daf_core.codecs import StoredActivation
from daf_core.codecs.raw import KeptStorage, KeptStorages
from daf_core.codecs.tensor_layout import Geometry
from daf_core.memory.pager import Pager

Key = tuple[object, ...]


class StorageTable:
    """Finds the stored activation of a tensor that was saved before, in the same forward pass.

    A storage is known by the address of its control block, which another one may have when it is freed. So the table
    keeps a weak reference to each storage it has seen.
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._stored: dict[Key, tuple[int, weakref.ref[StoredActivation], weakref.ref[UntypedStorage]]] = {}
        self._kept = KeptStorages()

    def is_new_storage(self, number: int, storage: UntypedStorage) -> bool:
        """Says whether no tensor of this storage, with this `storage_id`, was met before."""
        found = self._storages.get(number)
        if found is not None and found() is storage:
            return False
        self._storages[number] = weakref.ref(storage)
        return True

    def find(self, key: Key, version: int) -> StoredActivation | None:
        """Returns the live stored activation of the same values: same place in the same storage at the same version."""
        found = self._stored.get(key)
        if found is None or found[0] != version or found[2]() is None:
            return None
        return found[1]()

    def add(self, key: Key, storage: UntypedStorage, version: int, stored: StoredActivation) -> None:
        """Remembers what a tensor of a storage was stored as."""
        # Of its own: another thread's pass may have ended, and cleared the table, since the storage was met.
        self._stored[key] = (version, weakref.ref(stored), weakref.ref(storage))

    def keep(self, tensor: Tensor, pager: Pager) -> KeptStorage:
        """Returns the account of the tensor's storage among raw activations.

        Raises:
            ActivationBudgetError: The storage does not fit in the budget.
        """
        return self._kept.keep(tensor, pager)

    def clear(self) -> None:
        """Forgets all tensors. Storages that raw activations keep alive stay accounted for."""
        self._storages.clear()
        self._stored.clear()


def sharing_key(number: int, tensor: Tensor, geometry: Geometry) -> Key:
    """Returns what tensors have in common that are the same place in the same storage, with this `storage_id`."""
    return (
        number,
        tensor.storage_offset(),
        tensor.dtype,
        geometry.compact_shape,
        geometry.compact_strides,
        tensor.is_neg(),
    )
