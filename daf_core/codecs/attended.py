"""The result of a fused attention, which backward computes again from query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation

if TYPE_CHECKING:
    from daf_core.readers.attention import Draws


class AttendedActivation(StoredActivation):
    """The result of an attention, for its own backward, which gets it and the logsumexp from `AttentionAgain`.

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
