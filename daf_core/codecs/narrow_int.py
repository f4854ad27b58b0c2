"""Exact: integers in the smallest type that holds them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.memory.pager import Pager

_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)


class NarrowIntActivation(ByteCopyActivation):
    """Indices, such as those of max-pooling, saved as 64-bit integers."""

    codec: ClassVar[str] = "narrow_int"

    @classmethod
    def encode(cls, values: Tensor, pager: Pager) -> Self | None:
        """Narrows `values`; None where no smaller integer type holds them all.

        Raises:
            ActivationBudgetError: The narrow copy does not fit in the budget.
        """
        low, high = (int(bound) for bound in values.aminmax())
        for dtype in _TYPES:
            limits = torch.iinfo(dtype)
            if dtype.itemsize < values.element_size() and limits.min <= low and high <= limits.max:
                return cls.copy(values.to(dtype), pager)
        return None
