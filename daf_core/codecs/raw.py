"""Exact: the tensor itself stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, UntypedStorage
from typing_extensions import override

from daf_core.autograd.torch_private import number_of
from daf_core.codecs.base import StoredActivation
from daf_core.errors import ModifiedInPlaceError
from daf_core.memory import forks
from daf_core.memory.pager import Pager
from daf_core.memory.system.mortal import WeakValues


class KeptStorage:
    """Owns the bytes of a storage that raw activations keep alive, counted once however many of them view it.

    `pager` counts them; None where the caller has it count them.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, pager: Pager | None = None, size: int = 0) -> None:
        if pager is not None:
            pager.hold(size, self)


class KeptStorages:
    """Accounts of storages, one for each while something keeps it; of any thread."""

    def __init__(self) -> None:
        self._kept: WeakValues[int, KeptStorage] = WeakValues()
        self._lock = forks.lock(forks.Level.KEPT)

    def keep(self, storage: UntypedStorage, size: int, pager: Pager) -> KeptStorage:
        """Returns the account of a storage, of which `size` bytes count, however many of its views are kept.

        Raises:
            ActivationBudgetError: The storage does not fit in the budget.
        """
        number = number_of(storage)
        with self._lock:
            kept = self._kept.get(number)
            if kept is None:
                kept = self._kept[number] = KeptStorage(pager, size)
            return kept


class RawActivation(StoredActivation):
    """A reference to the saved tensor, with the check for changes that torch gives up when hooks are active.

    It is what autograd keeps of a tensor that stays as it is (see `Packed`), or what a `Handle` has stored.

    Args:
        tensor: The saved tensor. Only ``detach()`` is kept: the tensor itself would tie an operator's output to the
            graph that saves it, and a graph that never runs backward would leak.
        kept: Accounts for its storage; None for parameters, which are no activations.
        version: Its version when it was saved; by default the present one.
    """

    name: ClassVar[str] = "raw"
    lossy = False

    def __init__(self, tensor: Tensor, kept: KeptStorage | None, version: int | None = None) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version if version is None else version
        self.holder = kept

    def seen_as(self, view: Callable[[Tensor], Tensor]) -> RawActivation:
        """Returns a view of the tensor, of the same values: one that is given back only as long as these are."""
        return RawActivation(view(self._tensor), self.holder, self._version)

    def let_go(self) -> None:
        """Gives up the tensor: the operator that saved it gets another one in its place."""
        self._tensor, self.holder, self.values_gone = self._tensor.new_empty(0), None, True
        self._version = self._tensor._version

    @property
    def stored(self) -> RawActivation:
        """Itself."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved tensor."""
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the saved tensor."""
        return self._tensor.dtype

    @property
    def elements(self) -> int:
        """Different elements in memory of the tensor, at most; 0 of one without a single memory: sparse or nested."""
        if self._tensor.layout is not torch.strided or self._tensor.is_nested:
            return 0
        return min(self._tensor.numel(), self._tensor.untyped_storage().nbytes() // self._tensor.element_size())

    @property
    def is_unchanged(self) -> bool:
        """Whether it has the values that it was saved with."""
        return self._tensor._version == self._version

    def is_dense(self, like: Tensor, dtype: torch.dtype) -> bool:
        """Says whether it has as many elements as `like` there, in its order and without holes, and a type."""
        tensor = self._tensor
        if tensor.dtype is not dtype or tensor.numel() != like.numel() or tensor.device != like.device:
            return False
        return tensor.is_contiguous() and like.is_contiguous()

    def unpack(self) -> Tensor:
        """Returns the saved tensor.

        Raises:
            ModifiedInPlaceError: It was changed since it was saved.
        """
        if self._tensor._version != self._version:
            raise modified_in_place(tuple(self._tensor.shape), self._version, self._tensor._version)
        return self._tensor

    @override
    def sampled(self, step: int) -> Tensor | None:
        return each_nth(self._tensor, step)

    @override
    def decode_into(self, out: Tensor) -> None:
        out.copy_(self.unpack().view(out.shape))


def each_nth(tensor: Tensor, step: int) -> Tensor:
    """Returns each `step`-th element of a contiguous tensor, as a column, by one operator."""
    return tensor.as_strided((-(-tensor.numel() // step), 1), (step, 1))


def modified_in_place(shape: tuple[int, ...], saved: int, now: int) -> ModifiedInPlaceError:
    """Returns the error for a tensor that was saved at one version and is at another."""
    return ModifiedInPlaceError(
        f"a tensor of shape {shape} needed for backward was modified by an in-place operation: it was saved at "
        f"version {saved} and is at version {now}. Replace the in-place operation (for example x += y by x = x + y), "
        "as without DAF"
    )
