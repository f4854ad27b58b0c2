"""A tensor of which backward reads the shape alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.readers.table import Kind


class ShapeActivation(StoredActivation):
    """Has no values; it decodes to zeros."""

    name: ClassVar[str] = "shape"
    readable_by_any_op = False

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.reading is not None and saved.reading.kind is Kind.SHAPE

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> ShapeActivation:
        return cls()

    @override
    def decode_into(self, out: Tensor) -> None:
        out.zero_()
