"""Exact: integers in the smallest type that holds them."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind

_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)


class NarrowIntActivation(ByteCopyActivation):
    """Indices, such as those of max-pooling, saved as 64-bit integers."""

    name: ClassVar[str] = "narrow_int"

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.form is TensorKind.INTEGER

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> Self | None:
        low, high = (int(bound) for bound in ctx.values.aminmax())
        for dtype in _TYPES:
            limits = torch.iinfo(dtype)
            if dtype.itemsize < ctx.values.element_size() and limits.min <= low and high <= limits.max:
                return cls.copy(ctx.values.to(dtype), ctx.pager)
        return None
