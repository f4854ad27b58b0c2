"""Exact: a tensor of two values, one bit an element."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext, PagedActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_kernels import Backend, TwoValues, mask_pages


class BitmaskActivation(PagedActivation):
    """A boolean, a dropout mask (float32 of two values on CPUs), or any tensor of at most two bit patterns."""

    name: ClassVar[str] = "bitmask"
    lossy = False

    def __init__(self, pager: Pager, backend: Backend, two: TwoValues) -> None:
        super().__init__(pager)
        self._backend = backend
        self.two = two

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.form is not TensorKind.INTEGER

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> Self | None:
        return cls.pack(ctx.values, ctx.pager, ctx.backend)

    @classmethod
    def pack(cls, values: Tensor, pager: Pager, backend: Backend) -> Self | None:
        """Packs `values`; None where they have more than two values.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        two = backend.two_values(values)
        if two is None:
            return None
        stored = cls(pager, backend, two)
        with stored._new_pages(mask_pages(values.numel(), pager.pool.page_bytes)) as lease:
            exact = backend.encode_mask(values, two, pager.pool, lease.pages)
        return stored if exact else None

    @classmethod
    def of_nonzero(cls, values: Tensor, pager: Pager, backend: Backend) -> Self:
        """Packs a mask of bools: where values of 16 or 32 bits are neither 0.0 nor -0.0.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        stored = cls(pager, backend, (0, 1))
        with stored._new_pages(mask_pages(values.numel(), pager.pool.page_bytes)) as lease:
            backend.encode_nonzero(values, pager.pool, lease.pages)
        return stored

    def values(self, dtype: torch.dtype) -> Tensor:
        """Returns the two values as a tensor of shape (2,); `dtype` is that of the mask."""
        return _as_tensor(self.two, dtype)

    def choose_into(self, out: Tensor, false: int, true: int) -> None:
        """Writes the bits of one of two elements for each value, as a mask of bools says."""
        size = 8 * out.element_size()
        of = [bits % (1 << size) for bits in (false, true)]
        with self.pager.reading(self.lease) as lease:
            self._backend.decode_mask(out, (of[self.two[0]], of[self.two[1]]), self.pager.pool, lease.pages)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode_mask(out, self.two, self.pager.pool, lease.pages)


@lru_cache(maxsize=256)
def _as_tensor(two: TwoValues, dtype: torch.dtype) -> Tensor:
    """Returns two values as a tensor that nobody writes; those of dropout masks are the same in every step."""
    signed = np.array(two, f"u{dtype.itemsize}").view(f"i{dtype.itemsize}")
    return torch.from_numpy(signed).view(dtype)
