"""Exact: integers in the smallest type that holds them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import StoredActivation
from daf_core.memory.pool import PagePool

_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)


class NarrowIntActivation(StoredActivation):
    """Indices, such as those of max-pooling, saved as 64-bit integers."""

    codec: ClassVar[str] = "narrow_int"

    def __init__(self, pool: PagePool, narrow: Tensor) -> None:
        pool.hold(narrow.nbytes)
        self._pool, self._narrow = pool, narrow

    def __del__(self) -> None:
        if hasattr(self, "_narrow"):
            self._pool.let_go(self._narrow.nbytes)

    @classmethod
    def encode(cls, values: Tensor, pool: PagePool) -> Self | None:
        """Narrows `values`; None where no smaller integer type holds them all.

        Raises:
            ActivationBudgetError: The narrow copy does not fit in the budget.
        """
        low, high = (int(bound) for bound in values.aminmax())
        for dtype in _TYPES:
            limits = torch.iinfo(dtype)
            if dtype.itemsize < values.element_size() and limits.min <= low and high <= limits.max:
                return cls(pool, values.to(dtype))
        return None

    @override
    def decode_into(self, out: Tensor) -> None:
        out.copy_(self._narrow)
