"""An activation in a rehearsal: exact, or as a codec would give it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.raw import RawActivation
from daf_core.readers.table import Kind, Reading

Encode = Callable[[Tensor, int, bool], StoredActivation | None]
"""Stores values at a precision, or GELU's derivative at them; None where they would stay as they are."""


class ProbedActivation(StoredActivation):
    """Keeps the values, and encodes them each time they are asked for.

    Args:
        values: The values, flat or with holes, as a codec gets them.
        encode: Stores them.
        reads: Gets the activation each time its values are asked for, itself or through what is derived from it.

    Attributes:
        precision: Code bits to encode them with; None gives them exactly.
        slopes: Whether GELU's derivative is encoded.
    """

    codec: ClassVar[str] = "rehearsed"

    def __init__(self, values: RawActivation, encode: Encode, reads: list[ProbedActivation]) -> None:
        self._values = values
        self._reads = reads
        self._encode = encode
        self.precision: int | None = None
        self.slopes = False

    @override
    def serves(self, reading: Reading) -> bool:
        return reading.kind is Kind.LOGARITHMS or super().serves(reading)

    @override
    def decode_into(self, out: Tensor) -> None:
        self._reads.append(self)
        values = self._values.unpack()
        stored = None if self.precision is None else self._encode(values, self.precision, self.slopes)
        if stored is None:
            out.copy_(values)
        else:
            stored.decode_into(out)
