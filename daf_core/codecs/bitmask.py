"""Exact: a tensor of two values, one bit an element."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import PagedActivation
from daf_core.memory.pool import PagePool
from daf_kernels import Backend, Pages, TwoValues, mask_pages


class BitmaskActivation(PagedActivation):
    """A boolean, a dropout mask (float32 of two values on CPUs), or any tensor of at most two bit patterns."""

    codec: ClassVar[str] = "bitmask"

    def __init__(self, pool: PagePool, pages: Pages, backend: Backend, two: TwoValues) -> None:
        super().__init__(pool, pages)
        self._backend = backend
        self._two = two

    @classmethod
    def encode(cls, values: Tensor, pool: PagePool, backend: Backend) -> Self | None:
        """Packs `values`; None where they are not two-valued.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        two = backend.two_values(values)
        if two is None:
            return None
        stored = cls(pool, pool.lease(mask_pages(values.numel(), pool.page_bytes)), backend, two)
        return stored if backend.encode_mask(values, two, pool, stored.pages) else None

    @override
    def decode_into(self, out: Tensor) -> None:
        self._backend.decode_mask(out, self._two, self.pool, self.pages)
