"""Exact: the values themselves, in place of what they were stored as at first."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.raw import RawActivation


class KeptActivation(StoredActivation):
    """A tensor whose reader turned out to need it as it is, after autograd had got something else in its place.

    Args:
        values: The values, flat or with holes, as a codec gets them.
    """

    codec: ClassVar[str] = RawActivation.codec
    lossy = False

    def __init__(self, values: RawActivation) -> None:
        self._values = values

    @override
    def decode_into(self, out: Tensor) -> None:
        out.copy_(self._values.unpack())
