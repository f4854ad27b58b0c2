"""Which values of an activation share a scaling group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from daf_core.codecs.common_row import RowBlocks
from daf_core.codecs.tensor_layout import Geometry, Rows
from daf_core.readers.sharpness import EXPONENTIALS
from daf_core.readers.table import LOGSUMEXP, SOFTMAXES, Bounds, Kind, Reading
from daf_kernels import mask_pages
from daf_kernels.layout import SHARED_ROW, group_size, shares_groups

LEAST_MAP = 128
"""Positions of a channel in one image from which they are scaling groups of their own: 0.4 header bits an element."""

OWN_ROW = 32
"""Rows from this length on do not share scaling groups where a normalization reads them, which enlarges the error of a
row that spreads less than others, or where a softmax has made them, whose probabilities sum to 1. With shared groups
the gradients of a ViT of hidden size 64, whose class token spreads a sixth of its patches, had a cosine of .52 at 4
bits, with groups of their own .98, in 1.5 header bits an element or less."""

_NORMALIZATIONS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_ON_MAPS = ("Convolution", *_NORMALIZATIONS, "MaxPool", "AvgPool", "AdaptiveAvgPool")
"""What begins the names of autograd nodes whose results are maps of channels, in any number of dimensions."""

_ON_ANYTHING = ("Relu", "Add", "Mul", "Silu", "Gelu", "Hardtanh", "Hardswish", "LeakyRelu", "Elu", "Cat")
"""The same for operators that are used on other things too; a tensor of 4 or 5 dimensions is taken for maps then."""


class Totals(NamedTuple):
    """What probabilities sum to: 1, or 0 where everything is masked."""

    totals: Tensor  # bool, of shape (outer, 1, inner)
    seen: Tensor | None  # bool, of shape (blocks, 1, length): keys that some query of a block sees; None for all

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.totals.nbytes + (0 if self.seen is None else self.seen.nbytes)

    def restore(self, rest: Tensor) -> None:
        """Adds what decoded values lack, which have no holes, in equal parts, in place; keys that none sees get 0."""
        outer, _, inner = self.totals.shape
        rows = rest.view(outer, -1, inner)
        if self.seen is None:
            rows += (self._missing(rows) / rows.shape[1]).to(rows.dtype)
            return
        seen = self.seen.to(rest)
        maps = rest.view(len(seen), -1, seen.shape[2]).mul_(seen)
        parts = self._missing(rows).view(len(seen), -1, 1) / self.seen.sum(2, keepdim=True).clamp_min(1).to(rest.device)
        maps += parts.to(rest.dtype) * seen

    def _missing(self, rows: Tensor) -> Tensor:
        return self.totals.to(rows.device, torch.float32) - rows.sum(1, keepdim=True, dtype=torch.float32)


@dataclass(frozen=True)
class ProbabilityRows:
    """Values that sum to 1 along a dimension, and do so once more when they are decoded.

    A softmax's gradient is p (g - sum(p g)). What the gradients g of a row have in common cancels where the
    probabilities p sum to 1, and is multiplied by what they lack elsewhere. With keys and values that share a vector of
    5 deviations, the gradient of the query's weight had an error of 4.8 at 4 bits and 257 keys, as many as an image of
    224 by 224 pixels has tokens.

    Keys that are masked for all queries, as padding, are to get no gradient at all: a LayerNorm of empty tokens
    multiplies it by 316, and five of them, as in Data2VecAudio, one of 1e-4 by 1e12.
    """

    rows: Rows
    queries: int  # rows that may all have the same keys masked; 0 where that is not known
    sums: bool  # whether groups do not keep the sums

    @property
    def nbytes(self) -> int:
        """Bytes that are kept where all keys are seen."""
        return self.rows.outer * self.rows.inner if self.sums else 0

    def split(self, values: Tensor) -> tuple[Totals | None, Tensor]:
        """Returns what flat values sum to, None where codes keep that, and the values."""
        seen = self._seen(values) if self.queries else None
        if seen is None and not self.sums:
            return None, values
        return Totals(values.view(self.rows.shape).amax(1, keepdim=True) > 0, seen), values

    def _seen(self, values: Tensor) -> Tensor | None:
        """Returns the keys that queries see, None for all; a device, which would have the host wait, always does."""
        maps = values.view(-1, self.queries, self.rows.length)
        if values.device.type == "cpu" and bool((maps[:, -1] > 0).all()):  # a last query sees all that others do
            return None
        seen = maps.amax(1, keepdim=True) > 0
        return None if values.device.type == "cpu" and bool(seen.all()) else seen


@dataclass(frozen=True)
class Roots:
    """Codes are of the square roots of values, which are not negative: the results of an exponential that decays.

    Its gradient is multiplied by the result, and mostly by how far the argument is from where the result is largest.
    Codes of the results themselves decode a 0 to some 3% of a step, as a group keeps its mean and its deviation: of a
    Parzen window of 23 bins, 78% of whose results are below 1e-6, the gradient had an error of 1.4 at 8 bits.
    """

    nbytes: ClassVar[int] = 0

    def split(self, values: Tensor) -> tuple[Roots, Tensor]:
        """Returns itself, and the roots of flat values."""
        return self, values.sqrt()

    def restore(self, rest: Tensor) -> None:
        """Squares decoded roots in place."""
        rest.square_()


@dataclass(frozen=True)
class Grouping:
    """The order in which flat values are taken for scaling groups."""

    row: int  # elements in a row; scaling groups are rows, or equal pieces of rows, or several rows; 0 for none
    shape: tuple[int, ...] | None = None  # shape of the values in that order; None where it is theirs
    strides: tuple[int, ...] = ()
    logarithms: Rows | None = None  # rows of logarithms of probabilities; None where they are anything else
    normalized: bool = True  # whether those probabilities sum to 1
    own: bool = False  # whether each row has a group of its own, where it would share one
    # What is kept beside codes: of rows what they share, which the codes are without, or the sums of probabilities; or
    # what else they are codes of.
    beside: RowBlocks | ProbabilityRows | Roots | None = None
    bounds: Bounds | None = None  # decoded values stay on their side of these

    @property
    def group(self) -> int:
        """Elements in a scaling group; 0 for none."""
        return self.row if self.own or not self.row else group_size(self.row)

    def bytes_beside(self, elements: int, page_bytes: int) -> int:
        """Returns the bytes that are held beside the codes of so many elements, on pages of so many bytes or not."""
        sides = 0 if self.bounds is None else mask_pages(elements, page_bytes) * page_bytes
        return sides if self.beside is None else sides + self.beside.nbytes

    @property
    def keeps_more(self) -> bool:
        """Whether anything may be kept beside codes."""
        return self.beside is not None or self.bounds is not None

    @property
    def shares(self) -> bool:
        """Whether rows share groups."""
        return not self.own and shares_groups(self.row)

    @property
    def suits_rows(self) -> bool:
        """Whether `for_rows` has nothing to change: rows share no groups, or are too short, or there are channels."""
        return self.own or self.shape is not None or not OWN_ROW <= self.row <= SHARED_ROW

    def for_rows(self) -> Grouping:
        """Returns the grouping of what is read row by row."""
        return self if self.suits_rows else replace(self, own=True)

    def arrange(self, values: Tensor) -> Tensor:
        """Returns flat values in that order, a view."""
        return values if self.shape is None else values.as_strided(self.shape, self.strides)


def groups_for(reading: Reading | None, geometry: Geometry, op: str, normalized: bool) -> Grouping | None:
    """Returns the scaling groups of what an operator has made, for its reader if that is known; None where it has none.

    `normalized` says whether a normalization reads it.
    """
    if reading is not None and reading.kind is Kind.LOGARITHMS:
        rows = geometry.rows_along(reading.dim)
        return rows and Grouping(geometry.row, logarithms=rows, normalized=reading.reader != LOGSUMEXP)
    if reading is not None and reading.kind is Kind.PROBABILITIES:
        rows = geometry.rows_along(reading.dim, in_any_order=True)
        if rows is not None:
            return Grouping(geometry.row, logarithms=rows, normalized=False)
    if reading is not None and reading.reader in SOFTMAXES:
        return probabilities_of(geometry, reading.dim)
    groups = None
    if reading is not None and reading.kind is Kind.NORMALIZED:
        groups = normalized_groups(geometry, reading.reader, reading.dim, reading.pieces)
    if groups is None:
        groups = grouping_of(geometry, op)
        groups = groups.for_rows() if normalized else groups
    if reading is not None and reading.reader in EXPONENTIALS and reading.deviation:
        return replace(groups, beside=Roots())
    return groups if reading is None or reading.bounds is None else replace(groups, bounds=reading.bounds)


def may_share(groups: Grouping, reading: Reading | None) -> bool:
    """Says whether what rows have in common may be kept beside codes with groups of `groups_for`: not of channels."""
    probabilities = groups.logarithms is not None or (reading is not None and reading.reader in SOFTMAXES)
    return groups.shape is None and groups.beside is None and not probabilities


def probabilities_of(geometry: Geometry, dim: int) -> Grouping:
    """Returns the grouping of probabilities along a dimension, counted from the end, whose sums are kept.

    Where a group is a row or a piece of one, its mean keeps them.
    """
    groups, rows = Grouping(geometry.row).for_rows(), geometry.rows_along(dim)
    if rows is None:
        return groups
    queries = geometry.shape[-2] if rows.inner == 1 and len(geometry.shape) > 2 else 0
    sums = rows.inner > 1 or rows.length % groups.group > 0
    return replace(groups, beside=ProbabilityRows(rows, queries, sums)) if queries or sums else groups


@lru_cache(maxsize=4096)
def grouping_of(geometry: Geometry, op: str) -> Grouping:
    """Returns the grouping of a tensor; `op` is the name of the autograd node that made it.

    The channels of a convolution differ in mean and deviation, and a normalization of the batch undoes that: a group
    of several channels has the error of the widest of them, a group of a channel's own restores its moments. Small maps
    fill a group with the same channel of several images. Where all images have less than `OWN_ROW` of it, channels
    share groups.
    """
    shape = geometry.shape
    maps = len(shape) > 2 if op.startswith(_ON_MAPS) else op.startswith(_ON_ANYTHING) and len(shape) in (4, 5)
    if not maps or geometry.compact_shape != (math.prod(shape),):
        return Grouping(geometry.row)
    return _of_channels(geometry)


@lru_cache(maxsize=4096)
def normalized_groups(geometry: Geometry, reader: str, dim: int, pieces: int = 1) -> Grouping | None:
    """Returns the grouping of what a normalization reads; None where it is that of `grouping_of`.

    Args:
        geometry: How the tensor lies in memory.
        reader: The name of the autograd node that reads it. One that normalizes the batch sees channels in the second
            dimension, whatever has made them: where groups ran across channels that deviate from .1 to 10, as in the
            result of a linear layer that is seen with channels first, the error at 4 bits was 1.5 instead of .16. Nor
            do channels of few values share groups, in 1.5 to 24 header bits an element: the range of a group is that of
            their means, and where these differ ten times more than the values of a channel, the error of 12 rows was
            .8 at 4 bits, and of 7 rows 8, instead of .004.
        dim: The dimension that is normalized, counted from the end; 0 where that is not known. The result of a
            convolution, seen as tokens, has the tokens of a channel side by side in memory: with groups along these, a
            LayerNorm of padded tokens, which spread little, had a gradient of five times its size in errors.
        pieces: Equal parts of the dimension that are normalized each for itself, as the heads of a RetNet. Where a
            group ran across heads that deviate from .1 to 10, the error at 4 bits was 20 instead of .17. Tokens of
            short heads differ in size, too: with groups of 32 heads of 8 channels across them it was .34, now .02.
    """
    shape = geometry.shape
    flat = geometry.compact_shape == (math.prod(shape),)
    if len(shape) > 1 and flat and reader.startswith(_NORMALIZATIONS):
        return _of_channels(geometry, least=1)
    if not dim:
        return None
    if pieces > 1 and flat and geometry.strides[dim] == 1 and shape[dim] % pieces == 0:
        piece = shape[dim] // pieces
        return Grouping(piece, own=piece <= SHARED_ROW)
    if not flat or geometry.strides[dim] == 1 or shape[dim] == 1:
        return Grouping(geometry.row).for_rows()
    others = sorted(
        (stride, size)
        for place, (size, stride) in enumerate(zip(shape, geometry.strides, strict=True))
        if place != dim % len(shape)
    )
    ordered = [*reversed(others), (geometry.strides[dim], shape[dim])]
    strides, sizes = zip(*ordered, strict=True)
    return Grouping(shape[dim], sizes, strides, own=OWN_ROW <= shape[dim] <= SHARED_ROW)


def _of_channels(geometry: Geometry, least: int = OWN_ROW) -> Grouping:
    """Returns the grouping of what has channels in its second dimension, and no holes, in whatever order of memory.

    Channels of `least` values do not share groups.
    """
    shape, strides = geometry.shape, geometry.strides
    if geometry.row_major and (positions := math.prod(shape[2:])) >= LEAST_MAP:
        return Grouping(positions)
    others = [(strides[place], size) for place, size in enumerate(shape) if place != 1 and size > 1]
    merged = list[tuple[int, int]]()
    for stride, size in sorted(others, reverse=True):
        if merged and merged[-1][0] == stride * size:
            merged[-1] = stride, merged[-1][1] * size
        else:
            merged.append((stride, size))
    sizes, steps = (shape[1], *(size for _, size in merged)), (strides[1], *(stride for stride, _ in merged))
    each = math.prod(sizes[1:])
    return Grouping(each, sizes, steps, own=least <= each <= SHARED_ROW)
