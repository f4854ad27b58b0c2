"""One bit an element: on which side of a bound it lies, in place of its value or beside the code of it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.pager import Pager
from daf_core.readers.table import Bounds, Kind, Reading
from daf_kernels import Backend, bits_of_number, is_capturing

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a floating-point number."""


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
        finite = is_capturing() or _are_finite(values)
        if not finite or bounds.are_rounded(values.dtype):
            return None
        return cls(_pack_inside(values, bounds, ctx.pager, ctx.backend), bounds)

    @override
    def serves(self, reading: Reading) -> bool:
        return reading.kind is Kind.SHAPE or (reading.kind is Kind.SIDES and reading.bounds == self._bounds)

    @override
    def decode_into(self, out: Tensor) -> None:
        within, beyond = _examples(self._bounds, out.dtype)
        self._inside.choose_into(out, beyond, within)


class KeptSides:
    """Says which values lie inside of bounds where a derivative jumps, and moves what codes give for them there.

    A value on a bound is outside. Values are flat and have no holes, or lie as they did when they were stored.
    """

    def __init__(self, inside: BitmaskActivation, bounds: Bounds) -> None:
        self._inside = inside
        self.bounds = bounds

    @classmethod
    def of(cls, values: Tensor, bounds: Bounds, pager: Pager, backend: Backend) -> Self:
        """Keeps the sides of values.

        Raises:
            ActivationBudgetError: They do not fit in the budget.
        """
        return cls(_pack_inside(values, bounds, pager, backend), bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return self._inside.lease.size * self._inside.pager.pool.page_bytes

    def keep(self, decoded: Tensor) -> None:
        """Moves decoded values, which have no holes, to their sides in place."""
        low, high = self.bounds.low, self.bounds.high
        if not math.isfinite(low):
            beyond = decoded.clamp_min(high)
        elif not math.isfinite(high):
            beyond = decoded.clamp_max(low)
        else:
            assert low == -high  # as those of all functions whose slope jumps twice
            beyond = decoded.abs().clamp_min_(high).copysign_(decoded)
        decoded.clamp_(*_edges(self.bounds, decoded.dtype))
        # As `torch.where`, which branches for each element on a CPU: with sides at random it takes 20 times as long.
        words, others = (each.view(_WORDS[each.element_size()]) for each in (decoded, beyond))
        inside = torch.empty_like(words)
        self._inside.choose_into(inside, 0, -1)
        words.bitwise_xor_(others).bitwise_and_(inside).bitwise_xor_(others)


def _pack_inside(values: Tensor, bounds: Bounds, pager: Pager, backend: Backend) -> BitmaskActivation:
    """Packs which values lie inside of bounds.

    A CPU compares a number at a time where results are bools: for 2 MB that takes .9 ms, and .2 ms where they are
    numbers, as those of an operator's own backward.
    """
    words = _WORDS[values.element_size()]
    if values.device.type != "cpu" or bounds.closed or words is torch.int64:
        inside = BitmaskActivation.pack(bounds.inside(values), pager, backend)
        assert inside is not None  # what is true or false has two values
        return inside
    gradients = values  # none of which is 0 inside of bounds that are not negative
    if bounds.low < 0:
        gradients = values.view(words).bitwise_or(1).view(values.dtype)
    passed = torch.ops.aten.hardtanh_backward(gradients, values, bounds.low, bounds.high)
    return BitmaskActivation.of_nonzero(passed, pager, backend)


def _are_finite(values: Tensor) -> bool:
    """Says whether all values are: a sum of float64, which takes ten times as long, is that of numbers too large."""
    return math.isfinite(values.sum()) or math.isfinite(values.sum(dtype=torch.float64))


@lru_cache(maxsize=64)
def _examples(bounds: Bounds, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bits of a value inside of bounds and of one outside."""
    within, beyond = (bits_of_number(example, dtype) for example in bounds.examples())
    return within, beyond


@lru_cache(maxsize=64)
def _edges(bounds: Bounds, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the least and the largest value of a type inside of bounds, but for denormal ones, which may be 0."""
    low, high = (torch.tensor(bound, dtype=dtype, device="cpu") for bound in (bounds.low, bounds.high))
    tiny = torch.finfo(dtype).tiny
    least, most = (float(torch.nextafter(bound, other)) for bound, other in ((low, high), (high, low)))
    return tiny if 0 < least < tiny else least, -tiny if -tiny < most < 0 else most
