"""Lossy: logarithms of probabilities, or probabilities by theirs, such that gradients keep their relative error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.tensor_layout import Rows
from daf_core.memory.lease import Lease
from daf_core.readers.table import Kind, Reading
from daf_kernels import is_capturing

LARGEST = 8
"""Logarithms of a row that stay exact: the target is among them wherever its probability matters."""

DEPTH = 20.0
"""How far below the largest of its row a logarithm is told from smaller ones: such probabilities are 2e-9 of the
largest. The range of a group would otherwise be that of a mask (-1e9)."""

DEPTH_OF_OTHERS = 10.0
"""The same below the largest logarithm that is not exact: where a row is sure, that is far below the largest of all."""

MASKED = 64
"""Length of rows from which their smallest logarithm stays exact, too, up to `BLOCKED`: where one class of each row is
masked, as the target in decoupled distillation, it is in most groups, and takes their range from 3 to 10 or more."""

LEAST_DIFFERENCE = 0.1
"""Probability of all but the largest logarithms of a row from which 1 minus that of the largest is as good as a sum."""

LEAST = torch.finfo(torch.float32).tiny
"""Sum of probabilities whose logarithm is taken at least: that of 0 is -inf."""

LEAST_LOGARITHM = -104.0
"""Logarithm that stands for that of 0: its exponential is half of the smallest float32, and is rounded to 0."""

LONG = 1 << 14
"""Length of rows from which the largest logarithms stay among the codes: they widen the range of few groups, and a copy
of the rows without them takes longer than the codes."""

BLOCKED = 1 << 12
BLOCK = 64
"""Length of rows from which the largest of blocks are looked for first, and the logarithms of a block."""

CHUNK_BYTES = 1 << 20
LARGE_CHUNK_BYTES = 64 << 20
"""Bytes of rows that are decoded at a time, by each thread of a CPU and elsewhere: what is computed of them is as
large. With 1 MB both stay in the second-level cache: 512 rows of 32,000 take 46 ms, and 57 with 16 MB. A GPU works on
16 MB for some 20 us, in which a host does not launch the next operation."""


class LogarithmsActivation(PlanesActivation):
    """Planes of all but a few logarithms of each row, which are exact, and the sum of the other probabilities.

    The largest are exact, and where one may be masked the smallest.

    The gradient of the cross entropy is p - 1 at the target and p elsewhere. Where a model is sure it is small beside
    p, and codes of the logarithms alone are wrong by a factor (at p = .998: 2 times the gradient at 8 bits, 56 at 4).
    Decoded, the others are scaled to their sum, so that all probabilities of a row sum to 1. Those of logits, which
    `logsumexp` reads, do not: codes are of the differences to the largest of the row, and sums are multiples of its
    probability. Rows of one group may be at levels that are far apart.
    """

    name: ClassVar[str] = "logarithms"

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.reading is not None and saved.reading.kind is Kind.LOGARITHMS

    @override
    @classmethod
    def sizes(cls, ctx: EncodeContext) -> list[int]:
        *sizes, raw = super().sizes(ctx)
        beside = _bytes_beside(_rows_of(ctx)[0], ctx.values.element_size())
        return [*(min(size + beside, raw) for size in sizes), raw]

    @override
    @classmethod
    def write(cls, ctx: EncodeContext) -> Self | None:
        (rows, normalized), values = _rows_of(ctx), ctx.values
        beside = _bytes_beside(rows, values.element_size())
        if rows.length < 2 or super().sizes(ctx)[0] + beside >= values.nbytes:
            return None
        shaped = values.view(rows.shape)
        best, places = _largest(shaped, min(LARGEST, rows.length - 1) + 1)
        level = None if normalized else _level(best)
        logs, largest = (shaped, best) if level is None else (shaped - level, best - level)
        others = _bounded(logs, largest)
        limit, best, places = largest[:, -1:], best[:, :-1], places[:, :-1]
        if rows.length < LONG:
            others = others.clone() if others is shaped else others
            if _has_masked(rows):
                place = others.scatter_(1, places, torch.inf).argmin(1, keepdim=True)
                best = torch.cat([best, others.gather(1, place) + (0 if level is None else level)], dim=1)
                places = torch.cat([places, place], dim=1)
            others.scatter_(1, places, limit.expand(places.shape))
        # A pending check would keep only the values of the planes, and not the exact logarithms.
        stored = super().write(replace(ctx, values=others.view(-1), checks=None))
        if stored is None:
            return None
        stored._rows = rows
        stored._best = best.clone()
        stored._places = places.int()
        stored._normalized = normalized
        total = _total(logs, best if level is None else best - level, places, normalized)
        stored._log_sum = total.clamp_min_(LEAST).log_()
        stored._kept = KeptStorage(ctx.pager, beside)
        return stored

    _rows: Rows
    _best: Tensor
    _places: Tensor
    _log_sum: Tensor
    _normalized: bool

    @property
    @override
    def held_bytes(self) -> int:
        return super().held_bytes + _bytes_beside(self._rows, self._best.element_size())

    @override
    def serves(self, reading: Reading) -> bool:
        if reading.kind is Kind.LOGARITHMS:
            return reading.dim == self._rows.dim
        return super().serves(reading)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        super()._decode(out, lease)
        buffer = torch.empty(0, device=out.device)
        for rows, best, places, log_sum in self._chunks(out.view(self._rows.shape)):
            rows.scatter_(1, places, -torch.inf)
            buffer.resize_(rows.shape)
            total = torch.exp(rows.float(), out=buffer).sum(1, keepdim=True)  # the largest of a row is at most 1
            rows += (log_sum - total.clamp_min_(LEAST).log_()).to(rows.dtype)
            if not self._normalized:
                rows += _level(best)
            rows.scatter_(1, places, best)

    def _chunks(self, out: Tensor) -> Iterator[tuple[Any, ...]]:
        parts = (out, self._best, self._places.long(), self._log_sum)
        return zip(*(part.split(_chunk_rows(out)) for part in parts), strict=True)


class ProbabilitiesActivation(LogarithmsActivation):
    """Planes of the logarithms of probabilities, but for the largest of each row, which are exact.

    A teacher's are a constant factor of the gradient, which is the difference of a student's probabilities and them. An
    error that is relative to the largest of a row, as that of codes of them, is large beside this difference: with 8
    bits for both it was .7 of the gradient where a teacher is sure by .97, and 5 times it by .999. Here it is relative
    to each of them.
    """

    name: ClassVar[str] = "probabilities"

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.reading is not None and saved.reading.kind is Kind.PROBABILITIES

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation | None:
        """Takes codes of the values where rows do not lie in order or are short, or values are negative or of 16 bits.

        Logarithms of 16 bits have an error of their own.
        """
        in_rows = ctx.groups is not None and ctx.groups.logarithms is not None
        if not in_rows or ctx.values.dtype is not torch.float32 or is_capturing() or not ctx.values.amin() >= 0:
            return PlanesActivation.encode(saved, ctx)
        stored = super().encode(saved, ctx)
        return PlanesActivation.encode(saved, ctx) if stored is None else stored

    @override
    @classmethod
    def write(cls, ctx: EncodeContext) -> Self | None:
        return super().write(replace(ctx, values=ctx.values.log().clamp_min_(LEAST_LOGARITHM).contiguous()))

    @override
    def serves(self, reading: Reading) -> bool:
        return reading.kind is Kind.PROBABILITIES or super().serves(reading)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        dense = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        super()._decode(dense, lease)
        if dense.exp_() is not out:
            out.copy_(dense)


def _has_masked(rows: Rows) -> bool:
    return MASKED <= rows.length < BLOCKED


def _largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the largest values of each row and their places, both of shape (outer, count, inner), the largest first.

    In a long row they are in the blocks that have the largest maxima: `topk` of all of it takes 2.5 times as long for
    rows of 8,000, and 4 times for 50,000.
    """
    outer, length, inner = rows.shape
    if length < BLOCKED or inner > 1:
        best = rows.topk(count, dim=1)
        return best.values, best.indices
    flat = rows.view(outer, length)
    whole = length // BLOCK * BLOCK
    blocks = flat[:, :whole].unflatten(1, (-1, BLOCK)).amax(2).topk(count, dim=1).indices
    inside = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    candidates = torch.cat([inside, torch.arange(whole, length, device=rows.device).expand(outer, -1)], dim=1)
    best = flat.gather(1, candidates).topk(count, dim=1)
    return best.values[:, :, None], candidates.gather(1, best.indices)[:, :, None]


def _level(best: Tensor) -> Tensor:
    """Returns the largest value of each row, or 0 where that is no number: differences to it would be none."""
    return torch.where(best[:, :1].isfinite(), best[:, :1], 0)


def _bounded(rows: Tensor, best: Tensor) -> Tensor:
    """Returns rows of which no value is below the least that is told; the same tensor if that was so before.

    Only a host asks for that: a device would have it wait, and writes a copy sooner.
    """
    least = torch.minimum(best[:, :1] - DEPTH, best[:, -1:] - DEPTH_OF_OTHERS)
    if rows.device.type == "cpu" and bool((rows.amin(1, keepdim=True) >= least).all()):
        return rows
    return torch.maximum(rows, least)


def _total(others: Tensor, best: Tensor, places: Tensor, normalized: bool) -> Tensor:
    """Returns the sum of the probabilities of all but the exact logarithms of each row.

    Args:
        others: The logarithms, of shape (outer, length, inner).
        best: The exact ones of them.
        places: Where these are.
        normalized: Whether the probabilities of a row sum to 1.
    """
    total = 1 - best.float().exp().sum(1, keepdim=True)
    if normalized and others.dtype is torch.float32 and others.device.type == "cpu":
        unknown = (~(total >= LEAST_DIFFERENCE)).flatten(1).any(1).nonzero()[:, 0]  # NaN among them
    else:  # a device would have the host wait for which they are
        unknown = torch.arange(len(total), device=total.device)
    for some in unknown.split(_chunk_rows(others)):
        part = others[some].scatter_(1, places[some], -torch.inf)
        total[some] = part.exp_().sum(1, keepdim=True, dtype=torch.float32)
    return total.clamp_min_(0)


def _chunk_rows(rows: Tensor) -> int:
    together = CHUNK_BYTES * torch.get_num_threads() if rows.device.type == "cpu" else LARGE_CHUNK_BYTES
    return max(1, together // max(1, rows[0].nbytes))


def _rows_of(ctx: EncodeContext) -> tuple[Rows, bool]:
    """Returns how the rows lie, and whether the probabilities of each sum to 1."""
    assert ctx.groups is not None
    assert ctx.groups.logarithms is not None
    return ctx.groups.logarithms, ctx.groups.normalized


def _bytes_beside(rows: Rows, element_size: int) -> int:
    """Returns the bytes that are held beside the planes: the exact logarithms, their places, and a sum a row."""
    exact = min(LARGEST, rows.length - 1) + _has_masked(rows)
    return rows.outer * rows.inner * (exact * (element_size + 4) + 4)
