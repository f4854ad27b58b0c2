"""One stored copy for tensors that share storage, or are made of one tensor."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from daf_core.autograd.torch_private import number_of, storage_id
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import KeptStorage, KeptStorages, RawActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.codecs.scaling_groups import normalized_groups
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.memory.lease import Outside
from daf_core.memory.pager import Pager
from daf_core.readers.sharpness import SHARP
from daf_core.readers.table import Kind, Reading
from daf_core.saved_tensors.classify import is_plain

if TYPE_CHECKING:
    from daf_core.saved_tensors.derive import Derivation

    Encode = Callable[[SavedTensor, Geometry, Derivation], StoredActivation | None]

SMALL_BYTES = 16384
"""Without pressure, storages of so many bytes or fewer are accounted for until the last one of their pass is let go.
Those of RoBERTa-base at batch 8 x 128 are of 4 kB, and to count one by itself takes longer than to keep it."""


Part = tuple[tuple[object, ...], int, weakref.ref[StoredActivation], "Part | None"]
"""What a part of a storage was stored as: where it lies and how, its version then, what it was stored as, and the part
that was stored before it. A tuple with names takes nine times as long to make, and each saved tensor needs one."""


class MetStorage:
    """A storage that was met in a pass, and what its parts were stored as, the last one first."""

    __slots__ = ("counted", "last", "storage")

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self.last: Part | None = None  # the last part; None where none was stored
        self.counted = False  # whether its bytes are among those of the pass's small ones

    def find(self, key: tuple[object, ...], version: int) -> StoredActivation | None:
        """Returns the live stored activation of the same values: same place in the storage at the same version."""
        part = self.last
        while part is not None:
            known, then, stored, part = part
            if known == key:
                return stored() if then == version else None
        return None

    def add(self, key: tuple[object, ...], version: int, stored: StoredActivation) -> None:
        """Remembers what a tensor of the storage was stored as."""
        self.last = key, version, weakref.ref(stored), self.last


class StorageTable:
    """Finds the stored activation of a tensor that was saved before, in the same forward pass.

    A storage is known by the address of its control block, which another one may have when it is freed. So the table
    keeps a weak reference to each storage it has seen.
    """

    def __init__(self) -> None:
        self.met: dict[int, MetStorage] = {}  # by the `storage_id` that each had then
        self._kept = KeptStorages()
        self._small: dict[Pager, tuple[KeptStorage, Outside]] = {}
        self._lent: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # and the bytes that were lent of it

    def get(self, number: int, storage: UntypedStorage) -> MetStorage | None:
        """Returns what is known of a storage with this `storage_id`; None where it was not met before."""
        found = self.met.get(number)
        return found if found is not None and found.storage() is storage else None

    def add(self, number: int, storage: UntypedStorage) -> MetStorage:
        """Returns what is going to be known of a storage that was not met before."""
        met = self.met[number] = MetStorage(storage)
        return met

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Has views that a pass is given count in place of larger storages that others keep, as those of a data set.

        A view that a graph leads to may be of a storage that the pass itself has made.
        """
        sizes, storages = Counter[int](), dict[int, UntypedStorage]()
        for tensor in filter(is_plain, tensors):
            number, storage = storage_id(tensor), tensor.untyped_storage()
            kept = tensor.is_leaf and _owners(tensor) > _NO_OWNER
            sizes[number] += tensor.nbytes if kept else storage.nbytes()
            storages[number] = storage
        known = {number: lent for number, lent in self._lent.items() if lent[0]() is not None and number not in sizes}
        views = {number: storage for number, storage in storages.items() if sizes[number] < storage.nbytes()}
        self._lent = known | {number: (weakref.ref(storage), sizes[number]) for number, storage in views.items()}

    def size_of(self, storage: UntypedStorage) -> int:
        """Returns the bytes of a storage that count: of one that was there before, what the pass was given of it."""
        if self._lent:
            known, size = self._lent.get(number_of(storage), (None, 0))
            if known is not None and known() is storage:
                return size
        return storage.nbytes()

    def keep(self, met: MetStorage, storage: UntypedStorage, pager: Pager) -> KeptStorage:
        """Returns the account of a storage among raw activations; the small ones of a pass have one together.

        Raises:
            ActivationBudgetError: The storage does not fit in the budget.
        """
        size = self.size_of(storage)
        if size > SMALL_BYTES or not pager.at_ease:  # under pressure, backward needs the room of what it has let go
            return self._kept.keep(storage, size, pager)
        group = self._small.get(pager)
        if group is None:
            kept = KeptStorage()
            group = self._small[pager] = kept, pager.hold(0, kept)
        if not met.counted:
            pager.hold(size, outside=group[1])
            met.counted = True
        return group[0]

    def clear(self) -> None:
        """Forgets all tensors. Storages that raw activations keep alive stay accounted for."""
        self.met.clear()
        self._small.clear()


def _owners(view: Tensor) -> int:
    """Returns how many references there are to the tensor that another one is a view of; 0 where that is unknown."""
    base = view._base
    return 0 if base is None else sys.getrefcount(base)


_NO_OWNER = _owners(torch.empty(2, device="cpu")[:1])
"""What `_owners` returns where nobody has the tensor itself: what Python itself refers to depends on its version."""


class Arguments:
    """What the inputs of linear layers are made of in a pass: adapters drop and cast one tensor, each for itself.

    Args:
        exact: Whether nothing may lose precision. An argument is then used where it is stored already, or follows: to
            keep one that nobody saves would have autograd refuse what may be done to it.
        sharing: What was stored of tensors that autograd has saved.
    """

    def __init__(self, exact: bool, sharing: StorageTable) -> None:
        self._exact, self._sharing = exact, sharing
        self._own = StorageTable()  # arguments that nobody has saved

    def clear(self) -> None:
        """Forgets all arguments."""
        self._own.clear()

    def recipe(
        self, saved: SavedTensor, derivation: Derivation, encode: Encode, pager: Pager
    ) -> StoredActivation | None:
        """Returns the recipe for a tensor from its argument, which is stored if need be; None where it has none.

        Raises:
            ActivationBudgetError: The argument does not fit in the budget.
        """
        if saved.argument is None:
            return None
        argument = saved.argument.saved
        geometry = geometry_of(tuple(argument.tensor.shape), tuple(argument.tensor.stride()))
        stored = self._stored(argument, geometry, derivation, pager)
        if stored is not None:
            return derivation.of_argument(saved, stored)
        stored = derivation.derive(argument, self._exact, False) or encode(argument, geometry, derivation)
        if type(stored) is PlanesActivation and stored.lease.size * pager.pool.page_bytes >= saved.tensor.nbytes:
            return None
        recipe = None if stored is None else derivation.of_argument(saved, stored)
        if stored is not None and recipe is not None:
            number, storage = storage_id(argument.tensor), argument.tensor.untyped_storage()
            met = self._own.get(number, storage) or self._own.add(number, storage)
            met.add(sharing_key(argument.tensor, geometry), argument.version, stored)
        return recipe

    def _stored(
        self, argument: SavedTensor, geometry: Geometry, derivation: Derivation, pager: Pager
    ) -> StoredActivation | None:
        """Returns what is stored of an argument, if that serves the reader of what is made of it.

        What is kept as it is may not be changed until its reader has run, and perhaps none of this backward reads it:
        it serves where its own operator does.
        """
        tensor = argument.tensor
        number, storage = storage_id(tensor), tensor.untyped_storage()
        key = sharing_key(tensor, geometry)
        for table in (self._sharing, self._own):
            met = table.get(number, storage)
            stored = None if met is None else met.find(key, argument.version)
            if met is None or stored is None:
                continue
            if serves(stored, geometry, argument.form, argument.reading, argument.normalizes):
                if type(stored) is not RawActivation:
                    return stored
                if derivation.is_result(argument, stored):  # of another shape, perhaps
                    return RawActivation(tensor, self._sharing.keep(met, storage, pager))
        return None


def sharing_key(tensor: Tensor, geometry: Geometry) -> tuple[object, ...]:
    """Returns what tensors of a storage have in common that are the same part of it."""
    return tensor.storage_offset(), tensor.dtype, geometry.compact_shape, geometry.compact_strides, tensor.is_neg()


def serves(
    stored: StoredActivation, geometry: Geometry, form: TensorKind, reading: Reading | None, normalized: bool
) -> bool:
    """Says whether what was stored of the same values for another reader serves a tensor's, a normalization or not."""
    # A statistic is exact, whoever reads it: it has no place at which another reader could be learned.
    if form is TensorKind.RAW or (form is not TensorKind.LOSSY and stored.lossy):
        return False
    if normalized and (not stored.suits_rows or groups_otherwise(stored, geometry, reading)):
        return False
    if reading is None:
        return stored.readable_by_any_op
    if stored.lossy and reading.deviation >= SHARP:  # in the bits that others take
        return False
    return reading.kind is not Kind.SHAPE and stored.serves(reading)


def serves_reader(stored: StoredActivation, saved: SavedTensor) -> bool:
    """Says whether what follows from other values is as near to a tensor's as its reader needs them."""
    geometry = geometry_of(tuple(saved.tensor.shape), tuple(saved.tensor.stride()))
    return serves(stored, geometry, saved.form, saved.reading, saved.normalizes)


def groups_otherwise(stored: StoredActivation, geometry: Geometry, reading: Reading | None) -> bool:
    """Says whether scaling groups are others than a normalization needs, as where it reads columns."""
    if reading is None or reading.kind is not Kind.NORMALIZED or not isinstance(stored, PlanesActivation):
        return False
    wanted = normalized_groups(geometry, reading.reader, reading.dim, reading.pieces)
    found = stored.groups
    return wanted is not None and (wanted.row, wanted.shape, wanted.strides) != (found.row, found.shape, found.strides)
