"""Not stored at all: what a fused attention computes again from its query, key and value."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation


class AttendedActivation(StoredActivation):
    """The result of an attention, for its own backward, which gets it and the logsumexp from `AttentionAgain`.

    Others that save the result store it on their own: backward needs it to belong to what query, key and value decode
    to, while its own codes are closer to what it was.
    """

    codec: ClassVar[str] = "attended"
    whole = False

    @override
    def decode_into(self, out: Tensor) -> None:
        # Never reached through autograd: unpacking gives what runs again, and refuses all other readers.
        raise NotImplementedError("it has no values without the attention that made it")
