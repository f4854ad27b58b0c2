"""An activation in a probe: exact, or as a codec would give it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import RawActivation
from daf_core.readers.table import Kind, Reading

Variant = type[PlanesActivation] | None
"""A codec that a calibration may choose; None for the one that is taken without a calibration."""

Encode = Callable[[Tensor, int, Variant], StoredActivation | None]
"""Encodes values at a precision; None where they would stay as they are."""


class ProbedActivation(StoredActivation):
    """Keeps the values, and encodes them each time they are asked for.

    `reads` gets the activation each time an operator reads it, directly or through what is derived from it.
    """

    name: ClassVar[str] = "rehearsed"

    def __init__(self, values: RawActivation, encode: Encode, reads: list[ProbedActivation]) -> None:
        self._values = values
        self._reads = reads
        self._encode = encode
        self.precision: int | None = None  # code bits to encode them with; None gives them exactly
        self.variant: Variant = None  # the codec that encodes them

    @override
    def serves(self, reading: Reading) -> bool:
        return reading.kind is Kind.LOGARITHMS or super().serves(reading)

    @override
    def decode_into(self, out: Tensor) -> None:
        self._reads.append(self)
        values = self._values.unpack()
        stored = None if self.precision is None else self._encode(values, self.precision, self.variant)
        (self._values if stored is None else stored).decode_into(out)
