"""Not stored at all: what is read for its shape alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation


class ShapeActivation(StoredActivation):
    """Has no values; it decodes to zeros."""

    codec: ClassVar[str] = "shape"
    whole = False

    @override
    def decode_into(self, out: Tensor) -> None:
        out.zero_()
