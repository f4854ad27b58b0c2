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
from daf_kernels import Backend, is_capturing


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
        inside = BitmaskActivation.pack(bounds.inside(values), pager, backend)
        assert inside is not None  # what is true or false has two values
        return cls(inside, bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return self._inside.lease.size * self._inside.pager.pool.page_bytes

    def keep(self, decoded: Tensor) -> None:
        """Moves decoded values, which have no holes, to their sides in place."""
        inside = torch.empty_like(decoded, dtype=torch.bool)
        self._inside.decode_into(inside)
        low, high = self.bounds.low, self.bounds.high
        if not math.isfinite(low):
            beyond = decoded.clamp_min(high)
        elif not math.isfinite(high):
            beyond = decoded.clamp_max(low)
        else:
            assert low == -high  # as those of all functions whose slope jumps twice
            beyond = decoded.abs().clamp_min_(high).copysign_(decoded)
        decoded.clamp_(*_edges(self.bounds, decoded.dtype))
        torch.where(inside, decoded, beyond, out=decoded)


@lru_cache(maxsize=64)
def _edges(bounds: Bounds, dtype: torch.dtype) -> tuple[float, float]:
    """Returns the least and the largest value of a type inside of bounds, but for denormal ones, which may be 0."""
    low, high = (torch.tensor(bound, dtype=dtype, device="cpu") for bound in (bounds.low, bounds.high))
    tiny = torch.finfo(dtype).tiny
    least, most = (float(torch.nextafter(bound, other)) for bound, other in ((low, high), (high, low)))
    return tiny if 0 < least < tiny else least, -tiny if -tiny < most < 0 else most
