"""What is stored of tensors whose values backward does not need: they hold nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.readers.table import Kind

if TYPE_CHECKING:
    from daf_core.readers.attention import Draws


class ShapeActivation(StoredActivation):
    """A tensor of which backward reads the shape alone; it decodes to zeros, without memory where it was contiguous."""

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


class AttendedActivation(StoredActivation):
    """The result of a fused attention, which its backward gets computed again, with the logsumexp (`AttentionAgain`).

    Other operators that save the result store it by themselves: backward needs a result that belongs to the decoded
    query, key and value, while codes of the result are closer to the original.
    """

    name: ClassVar[str] = "attended"
    readable_by_any_op = False
    values_gone = True
    draws: Draws | None = None  # where the random numbers of its dropout begin, once they are on their way

    @override
    def decode_into(self, out: Tensor) -> None:
        raise NotImplementedError("it has no values without the attention that made it")
