"""The result of a ReLU, with exact zeros."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.readers.table import Reading


class ReluOutputActivation(StoredActivation):
    """Values at any precision, and the signs that they shall have.

    Args:
        signs: Which of them are positive.
        values: Codes of them, or of what the ReLU was taken of.

    Attributes:
        values: The same.
    """

    codec: ClassVar[str] = "rectified"

    def __init__(self, signs: ReluSignsActivation, values: StoredActivation) -> None:
        self._signs = signs
        self.values = values
        self.whole = values.whole

    @override
    def serves(self, reading: Reading) -> bool:
        return self.values.serves(reading)

    @override
    def decode_into(self, out: Tensor) -> None:
        self.values.decode_into(out)  # before the bits are brought back: a budget may have no room for both at once
        self._signs.rectify(out)
