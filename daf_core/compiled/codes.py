"""Codes in torch's own operators, which a compiler fuses with what makes a tensor and with what reads it.

The numerics are those of docs/concepts/numerics.md: scaling groups are rows or pieces of rows, codes lie between the
extremes of their group, and the group keeps its mean and its deviation. What differs from the engine's pages is where
bytes lie: a group's codes are `8 / bits` equal parts side by side in the same bytes, so that a loop over a group
reads and writes vectors, and the line that decodes a group is worked out while it is encoded, so that decoding is one
operation an element. All functions are traced: they contain no decision that depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from daf_core.compiled.common_row import common_row, rounded
from daf_core.compiled.groups import PARTS, Shape
from daf_core.compiled.sizes import hint
from daf_kernels.layout import (
    CLIP,
    CLIPPED_PRECISION,
    LARGEST_CLIPPED,
    LARGEST_SPREAD,
    LEAST_TAIL,
)
from daf_kernels.reference.gelu_derivative import LEAST, STEPS

INVISIBLE = 1.2e-35
"""Groups whose spread is smaller are stored as their minimum."""

DEEPEST = 20.0
"""Logarithms further below the largest of their group are stored as this far below: their exponential is 2e-9 of it."""

WORTHWHILE = 0.7
"""A group is stored without what rows have in common where its range is this part of what it was, at most."""

SLOPE_LEAST, SLOPE_RANGE = LEAST, 256 / STEPS
"""The least derivative of a GELU that has a code, and the distance to the largest."""

_TINY = {torch.float32: 1e-38, torch.bfloat16: 1e-38, torch.float16: 6e-8}
"""What a positive value of a type decodes to at least where its sign matters."""


@dataclass(frozen=True)
class Planes:
    """Codes between the extremes of a group, which keeps its mean and its deviation."""

    bits: int  # of a code: 8, 4, 2 or 1
    # Whether values above 0 stay above 0 and others do not come above it, for one bit an element more.
    signs: bool = False
    common: bool = False  # whether codes are of what is left without that which rows have in common
    # The dimension along which values are probabilities, whose sums of 1 are kept; None where groups keep theirs.
    probabilities: int | None = None
    roots: bool = False  # whether they are of the square roots of values, of which what is almost 0 is to stay so
    name: ClassVar[str] = "planes"
    header_bits: ClassVar[int] = 48

    def encode(self, values: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        """Returns codes, and for each group the line that decodes them: its offset (float32) and slope (bfloat16).

        Then follow the bits of signs, or what rows have in common: codes are without it in groups whose slope has the
        sign of minus. Or whether probabilities sum to 1: where everything is masked, they may be 0.
        """
        parts, steps = 8 // self.bits, float(2**self.bits - 1)
        if self.roots:
            values = values.sqrt()
        beside = Bits().encode(values > 0, shape) if self.signs else ()
        if self.probabilities is not None:
            beside = (*beside, values.amax(self.probabilities, keepdim=True) > 0)
        group = shape.rows(values, parts).float()
        least, spread = _range_of(group)
        without = None
        if self._takes_common(shape):
            row = common_row(values, shape.across)
            rest, beside = shape.rows(values.float() - row.float(), parts), (*beside, row)
            least_left, spread_left = _range_of(rest)
            without = spread_left < WORTHWHILE * spread
            group, least = torch.where(without, rest, group), torch.where(without, least_left, least)
            spread = torch.where(without, spread_left, spread)
        offsets = group - least
        mean = offsets.mean(-1, keepdim=True)
        deviation = _deviation(offsets, mean)
        inside, width = offsets, spread
        if self.bits <= CLIPPED_PRECISION:
            tail = LEAST_TAIL * deviation
            narrow = (spread < LARGEST_CLIPPED * deviation) & (mean > tail) & (spread - mean > tail)
            inside = offsets - torch.where(narrow, mean - CLIP * deviation, 0.0)
            width = torch.where(narrow, 2 * CLIP * deviation, spread)
        factor = torch.where(width > INVISIBLE, steps / width, 0.0)
        # Codes that are no numbers would spoil those of other groups, which lie in the same bytes.
        codes = torch.where(spread < LARGEST_SPREAD, (inside * factor).round().clamp(0.0, steps), 0.0)
        middle = codes.mean(-1, keepdim=True)
        distance = _deviation(codes, middle)
        slope = rounded(torch.where(distance > 0, deviation / distance, 0.0))
        offset = least + mean - slope.float() * middle
        offset = torch.where(spread < LARGEST_SPREAD, offset, torch.nan)
        if without is not None:
            slope = torch.where(without, -slope, slope)
        return shape.pack(codes, self.bits), offset, slope, *beside

    def decode(self, stored: Sequence[Tensor], like: Like) -> Tensor:
        """Returns values of the shape and type that were encoded."""
        packed, offset, slope, *beside = stored
        codes, slope = like.shape.unpack(packed, self.bits), slope.float()
        values = like.shape.back(codes * slope.abs() + offset, like.sizes)
        if self._takes_common(like.shape):
            without = torch.where(torch.signbit(slope) & (codes >= 0), 1.0, 0.0)  # for each element
            values = values + like.shape.back(without, like.sizes) * beside.pop().float()
        if self.probabilities is not None:
            missing = beside.pop().float() - values.sum(self.probabilities, keepdim=True)
            values = values + missing / like.sizes[self.probabilities]
        if self.roots:
            values = values * values
        if like.dtype is torch.float16 or like.dtype is torch.bfloat16:
            most = torch.finfo(like.dtype).max
            values = values.clamp(-most, most)
        values = values.to(like.dtype)
        if not self.signs:
            return values
        positive = Bits().decode(beside, like)
        return torch.where(positive, values.clamp_min(_TINY[like.dtype]), values.clamp_max(0.0))

    def _takes_common(self, shape: Shape) -> bool:
        return self.common and bool(shape.across)


@dataclass(frozen=True)
class Bits:
    """True and False at one bit each."""

    name: ClassVar[str] = "bitmask"
    header_bits: ClassVar[int] = 0

    def encode(self, values: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        """Returns the bits of a bool tensor."""
        return (shape.pack(shape.rows(values, PARTS).float(), 1),)

    def decode(self, stored: Sequence[Tensor], like: Like) -> Tensor:
        """Returns the bool tensor."""
        return like.shape.back(like.shape.unpack(stored[0], 1) > 0.5, like.sizes)


@dataclass(frozen=True)
class Logarithms:
    """Codes of what is read by an exponential: the largest of a group is exact, and the sum of exponentials is kept.

    Steps grow with the distance from the largest value: what is far below it adds little. Minus infinity comes back as
    `DEEPEST` below the largest, or as itself where a group has nothing else.
    """

    bits: int  # of a code: 8, 4, 2 or 1
    name: ClassVar[str] = "logarithms"
    header_bits: ClassVar[int] = 64

    def encode(self, values: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        """Returns codes, and for each group its largest value (float32), its depth and what is added to the others."""
        parts, steps = 8 // self.bits, float(2**self.bits - 1)
        group = shape.rows(values, parts).float()
        largest = group.amax(-1, keepdim=True)
        below = torch.where(largest > -torch.inf, (largest - group).clamp(0.0, DEEPEST), 0.0)
        depth = rounded(below.amax(-1, keepdim=True))
        scale = torch.where(depth > 0, 1 / depth.float(), 0.0)
        codes = steps - (steps * (below * scale).sqrt()).round().clamp(0.0, steps)
        first = (codes == steps).float()
        found = (first * -1 + (below * -1).exp()).sum(-1, keepdim=True)
        made = ((1 - first) * (self._below(codes, depth) * -1).exp()).sum(-1, keepdim=True)
        added = torch.where((found > 0) & (made > 0), (found / made).log().clamp(-1.0, 1.0), 0.0).bfloat16()
        return shape.pack(codes, self.bits), largest, depth, added

    def decode(self, stored: Sequence[Tensor], like: Like) -> Tensor:
        """Returns values of the shape and type that were encoded."""
        packed, largest, depth, added = stored
        codes = like.shape.unpack(packed, self.bits)
        others = added.float() - self._below(codes, depth)
        values = largest + torch.where(codes == float(2**self.bits - 1), 0.0, others)
        return like.shape.back(values.to(like.dtype), like.sizes)

    def _below(self, codes: Tensor, depth: Tensor) -> Tensor:
        left = 1 - codes * (1 / (2**self.bits - 1))
        return left * left * depth.float()


@dataclass(frozen=True)
class Slopes:
    """Codes of GELU's derivative, equal steps of the range that it has: no header."""

    bits: int  # of a code: 8, 4, 2 or 1
    name: ClassVar[str] = "slopes"
    header_bits: ClassVar[int] = 0

    def encode(self, values: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        """Returns the codes of derivatives; one that is not a number has the code of 0."""
        steps = float(1 << self.bits)
        places = ((values - SLOPE_LEAST) * (steps / SLOPE_RANGE)).nan_to_num(0.0).floor().clamp(0.0, steps - 1)
        return (shape.pack(shape.rows(places.float(), 8 // self.bits), self.bits),)

    def decode(self, stored: Sequence[Tensor], like: Like) -> Tensor:
        """Returns derivatives, in the middle of their steps."""
        step = SLOPE_RANGE / (1 << self.bits)
        values = like.shape.unpack(stored[0], self.bits) * step + (SLOPE_LEAST + step / 2)
        return like.shape.back(values.to(like.dtype), like.sizes)


@dataclass(frozen=True)
class Sides:
    """On which side of a bound each value lies."""

    bound: float
    closed: bool  # whether the bound itself counts as above
    name: ClassVar[str] = "sides"
    header_bits: ClassVar[int] = 0

    def encode(self, values: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        """Returns one bit an element."""
        return Bits().encode(values >= self.bound if self.closed else values > self.bound, shape)

    def decode(self, stored: Sequence[Tensor], like: Like) -> Tensor:
        """Returns values on the same sides."""
        above = Bits().decode(stored, like)
        beyond = self.bound + max(1.0, abs(self.bound))
        short = self.bound - max(1.0, abs(self.bound)) if self.closed else self.bound
        return torch.where(above, beyond, short).to(like.dtype)


@dataclass(frozen=True)
class Like:
    """What a tensor was before it was encoded."""

    sizes: Sequence[Any]  # its sizes; some may be symbols
    dtype: torch.dtype
    shape: Shape  # how it is cut into groups


Code = Planes | Bits | Logarithms | Slopes | Sides


def is_dense(values: Tensor) -> bool:
    """Says whether a tensor has no holes in memory, and no element twice."""
    expected: Any = 1
    for stride, size in sorted((hint(values.stride(dim)), hint(values.shape[dim])) for dim in range(values.dim())):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _range_of(group: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least of each row of numbers, and how far it is to the largest."""
    least = group.amin(-1, keepdim=True)
    return least, group.amax(-1, keepdim=True) - least


def _deviation(values: Tensor, mean: Tensor) -> Tensor:
    """Returns the standard deviation of each row of numbers that begin at 0, from the sum of their squares."""
    return ((values * values).mean(-1, keepdim=True) - mean * mean).clamp_min(0.0).sqrt()
