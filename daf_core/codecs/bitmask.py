"""Exact: a tensor of two values, one bit an element."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import PagedActivation
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_kernels import Backend, TwoValues, mask_pages


class BitmaskActivation(PagedActivation):
    """A boolean, a dropout mask (float32 of two values on CPUs), or any tensor of at most two bit patterns."""

    codec: ClassVar[str] = "bitmask"
    lossy = False

    def __init__(self, pager: Pager, lease: Lease, backend: Backend, two: TwoValues) -> None:
        super().__init__(pager, lease)
        self._backend = backend
        self._two = two

    @classmethod
    def encode(cls, values: Tensor, pager: Pager, backend: Backend) -> Self | None:
        """Packs `values`; None where they are not two-valued.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        two = backend.two_values(values)
        if two is None:
            return None
        with pager.writing(mask_pages(values.numel(), pager.pool.page_bytes)) as lease:
            exact = backend.encode_mask(values, two, pager.pool, lease.pages)
        stored = cls(pager, lease, backend, two)
        return stored if exact else None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Returns the two values, as `dtype`, which is that of the mask, of shape (2,)."""
        signed = np.array(self._two, f"u{dtype.itemsize}").view(f"i{dtype.itemsize}")
        return torch.from_numpy(signed).view(dtype)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode_mask(out, self._two, self.pager.pool, lease.pages)
