"""What the inputs of linear layers are made of by dropouts and casts: stored once for all that are made of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from daf_core.autograd.torch_private import storage_id
from daf_core.codecs import RawActivation, StoredActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.saved_tensors.dedup import MetStorage, StorageTable, serves, sharing_key
from daf_core.saved_tensors.derive import Derivation


class Arguments:
    """The arguments of a pass: adapters on several layers drop and cast one input, each for itself.

    Args:
        exact: Whether nothing may lose precision. An argument is then used where it is stored already, or follows: to
            keep one that nobody saves would have autograd refuse what may be done to it.
        sharing: What was stored of tensors that autograd has saved.
        encode: Stores the values of an argument that nobody saves; None where it has to stay as it is.
        keep: Keeps a tensor as it is whose storage was kept before.
    """

    def __init__(
        self,
        exact: bool,
        sharing: StorageTable,
        encode: Callable[[SavedTensor, Geometry, Derivation], StoredActivation | None],
        keep: Callable[[Tensor, MetStorage], RawActivation],
    ) -> None:
        self._exact, self._sharing, self._encode, self._keep = exact, sharing, encode, keep
        self._own = StorageTable()  # arguments that nobody has saved

    def clear(self) -> None:
        """Forgets all arguments."""
        self._own.clear()

    def recipe(self, saved: SavedTensor, derivation: Derivation) -> StoredActivation | None:
        """Returns the recipe for a tensor from its argument, which is stored if need be; None where it has none.

        Raises:
            ActivationBudgetError: The argument does not fit in the budget.
        """
        if saved.argument is None:
            return None
        argument = saved.argument.saved
        geometry = geometry_of(tuple(argument.tensor.shape), tuple(argument.tensor.stride()))
        stored = self._stored(argument, geometry)
        if stored is not None:
            return derivation.of_argument(saved, stored)
        stored = derivation.derive(argument, self._exact) or self._encode(argument, geometry, derivation)
        recipe = None if stored is None else derivation.of_argument(saved, stored)
        if stored is not None and recipe is not None:
            number, storage = storage_id(argument.tensor), argument.tensor.untyped_storage()
            met = self._own.get(number, storage) or self._own.add(number, storage)
            met.add(sharing_key(argument.tensor, geometry), argument.version, stored)
        return recipe

    def _stored(self, argument: SavedTensor, geometry: Geometry) -> StoredActivation | None:
        """Returns what is stored of an argument, if that serves the reader of what is made of it."""
        tensor = argument.tensor
        number, storage = storage_id(tensor), tensor.untyped_storage()
        key = sharing_key(tensor, geometry)
        for table in (self._sharing, self._own):
            met = table.get(number, storage)
            stored = None if met is None else met.find(key, argument.version)
            if met is None or stored is None:
                continue
            if serves(stored, geometry, argument.form, argument.reading, argument.normalizes):
                # What was kept may be another shape of it.
                return self._keep(tensor, met) if type(stored) is RawActivation else stored
        return None
