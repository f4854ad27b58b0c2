"""One bit an element: on which side of a bound it lies."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.readers.table import Bounds, Kind, Reading
from daf_kernels import is_capturing


class SidesActivation(StoredActivation):
    """All that the backward of a `leaky_relu` or a `clamp` reads of its input: whether it lies inside of its bounds.

    Codes lose it close to a bound, where gradients then pass, or do not, at random (MobileNetV2 at 4 bits: an error of
    1.06 of the gradient; 0.22 with ReLUs, whose signs are kept).
    """

    name: ClassVar[str] = "sides"
    readable_by_any_op = False

    def __init__(self, inside: BitmaskActivation, bounds: Bounds) -> None:
        self._inside = inside
        self._bounds = bounds

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        reading = saved.reading
        return reading is not None and reading.kind is Kind.SIDES and reading.reader != RELU

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> Self | None:
        assert saved.reading is not None
        values, bounds = ctx.values, saved.reading.bounds
        assert bounds is not None
        # In a CUDA graph nobody can look; of what is not a number it says what the operator's own comparison says.
        finite = is_capturing() or math.isfinite(values.sum(dtype=torch.float64))
        if not finite or bounds.are_rounded(values.dtype):
            return None
        inside = BitmaskActivation.pack(bounds.inside(values), ctx.pager, ctx.backend)
        return None if inside is None else cls(inside, bounds)

    @override
    def serves(self, reading: Reading) -> bool:
        return reading.kind is Kind.SHAPE or (reading.kind is Kind.SIDES and reading.bounds == self._bounds)

    @override
    def decode_into(self, out: Tensor) -> None:
        inside = torch.empty_like(out, dtype=torch.bool)
        self._inside.decode_into(inside)
        within, beyond = self._bounds.examples()
        out.fill_(beyond).masked_fill_(inside, within)
