"""Minimum and maximum of groups of any size, by three strategies.

- ``fused``: whole groups inside one program.
- ``parallel``: a program finds the range of a chunk; a second kernel finds those of groups from those of their chunks.
- ``atomic``: a program finds the range of a chunk and offers it to its group, as integers of the same order, with
  atomic maxima. Their result does not depend on the order in which they come.

All give what ``torch.amin`` and ``torch.amax`` give; where an element is NaN, both are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daf_kernels.triton.launch import kernel, launch
from daf_kernels.triton.numerics import INFINITY, NAN_BITS, largest, least, row_largest, row_least, widen

LARGEST_FUSED = 8192
"""Elements of the largest group of one program, 64 a thread."""

CHUNK = 8192
"""Elements of a chunk, loaded `WIDTH` at a time."""

WIDTH = 1024


@kernel
def range_fused(values, minimum, maximum, groups: tl.int64, group: tl.int64, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the ranges of ``ROWS`` groups, of at most ``COLUMNS`` elements."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    size, number = group.to(tl.int32), first + row
    exists = number < groups
    there = exists[:, None] & (column < size)
    value = widen(tl.load(values + first * group + ((row * size)[:, None] + column), mask=there, other=0.0))
    tl.store(minimum + number, row_least(tl.where(there, value, INFINITY)), mask=exists)
    tl.store(maximum + number, row_largest(tl.where(there, value, -INFINITY)), mask=exists)


@triton.jit
def _range_of_chunk(values, program, group, chunks, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Minimum and maximum of the chunk of a program, of shape (1,)."""
    start = (program % chunks) * CHUNK
    elements = values + (program // chunks) * group + start
    column = tl.arange(0, WIDTH)[None, :]
    low, high = tl.full((1, WIDTH), INFINITY, tl.float32), tl.full((1, WIDTH), -INFINITY, tl.float32)
    for step in tl.static_range(CHUNK // WIDTH):
        there = column < group - start - step * WIDTH
        value = widen(tl.load(elements + step * WIDTH + column, mask=there, other=0.0))
        low, high = least(low, tl.where(there, value, INFINITY)), largest(high, tl.where(there, value, -INFINITY))
    return row_least(low), row_largest(high)


@kernel
def range_of_chunks(values, lows, highs, group: tl.int64, chunks: tl.int64, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the range of each chunk."""
    program = tl.program_id(0).to(tl.int64)
    low, high = _range_of_chunk(values, program, group, chunks, CHUNK, WIDTH)
    tl.store(lows + program + tl.arange(0, 1), low)
    tl.store(highs + program + tl.arange(0, 1), high)


@kernel
def range_from_chunks(lows, highs, minimum, maximum, chunks: tl.int64, WIDTH: tl.constexpr):
    """Writes the range of a group, from those of its chunks."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    low, high = tl.full((1, WIDTH), INFINITY, tl.float32), tl.full((1, WIDTH), -INFINITY, tl.float32)
    for start in range(0, chunks, WIDTH):
        there = start + column < chunks
        low = least(low, tl.load(lows + group * chunks + start + column, mask=there, other=INFINITY))
        high = largest(high, tl.load(highs + group * chunks + start + column, mask=there, other=-INFINITY))
    tl.store(minimum + group + tl.arange(0, 1), row_least(low))
    tl.store(maximum + group + tl.arange(0, 1), row_largest(high))


@triton.jit
def _key(values):
    """float32 as integers without a sign, in the same order; 0 is below all of them."""
    bits = values.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _value(keys):
    """The opposite of `_key`."""
    bits = keys ^ tl.where(keys >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@kernel
def range_atomic(values, keys, group: tl.int64, chunks: tl.int64, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Offers the range of each chunk to its group: two keys each, zero at first, of the minimum the complement."""
    program = tl.program_id(0).to(tl.int64)
    low, high = _range_of_chunk(values, program, group, chunks, CHUNK, WIDTH)
    own = keys.to(tl.pointer_type(tl.uint32), bitcast=True) + 2 * (program // chunks) + tl.arange(0, 1)
    tl.atomic_max(own, _key(low) ^ 0xFFFFFFFF, sem="relaxed")
    tl.atomic_max(own + 1, _key(high), sem="relaxed")


@kernel
def range_of_keys(keys, minimum, maximum, groups: tl.int64, WIDTH: tl.constexpr):
    """Writes the ranges that `range_atomic` found."""
    group = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    exists = group < groups
    own = keys.to(tl.pointer_type(tl.uint32), bitcast=True) + 2 * group
    low = _value(tl.load(own, mask=exists, other=0) ^ 0xFFFFFFFF)
    high = _value(tl.load(own + 1, mask=exists, other=0))
    # A NaN with a sign comes below all numbers: then only the minimum shows it.
    lost = (low != low) | (high != high)
    nan = tl.full((WIDTH,), NAN_BITS, tl.uint32).to(tl.float32, bitcast=True)
    tl.store(minimum + group, tl.where(lost, nan, low), mask=exists)
    tl.store(maximum + group, tl.where(lost, nan, high), mask=exists)


def strategies(group: int) -> tuple[str, ...]:
    """Returns the strategies for groups of `group` elements, first the one to take where none is measured.

    Below a few chunks, their second kernel costs more than the atomic operations; with many, those wait for each other.
    """
    if group <= LARGEST_FUSED:
        return ("fused",) if group <= WIDTH else ("fused", "parallel", "atomic")
    return ("parallel", "atomic")


def group_ranges(values: Tensor, group: int, strategy: str) -> tuple[Tensor, Tensor]:
    """Returns the minimum and the maximum of each group.

    Args:
        values: Dense floats of shape (groups * group,).
        group: Elements of a group.
        strategy: One of `strategies`.

    Returns:
        Two float32 tensors of shape (groups,).

    Raises:
        ValueError: There are elements beyond whole groups, or the strategy is none for such groups.
    """
    if values.numel() % group:
        raise ValueError(f"{values.numel()} elements are no whole groups of {group}")
    if strategy not in strategies(group):
        allowed = ", ".join(strategies(group))
        raise ValueError(f"{strategy!r} is no strategy for groups of {group} elements; allowed: {allowed}")
    groups = values.numel() // group
    minimum, maximum = torch.empty(2, groups, dtype=torch.float32, device=values.device)
    if strategy == "fused":
        columns = triton.next_power_of_2(group)
        rows = max(LARGEST_FUSED // 2 // columns, 1)
        pointers = (values, minimum, maximum)
        launch(range_fused, -(-groups // rows), pointers, (groups, group), ROWS=rows, COLUMNS=columns)
        return minimum, maximum
    chunks = -(-group // CHUNK)
    if strategy == "parallel":
        lows, highs = torch.empty(2, groups * chunks, dtype=torch.float32, device=values.device)
        pointers = (values, lows, highs)
        launch(range_of_chunks, groups * chunks, pointers, (group, chunks), CHUNK=CHUNK, WIDTH=WIDTH)
        launch(range_from_chunks, groups, (lows, highs, minimum, maximum), (chunks,), WIDTH=64)
        return minimum, maximum
    keys = torch.zeros(2 * groups, dtype=torch.int32, device=values.device)
    launch(range_atomic, groups * chunks, (values, keys), (group, chunks), CHUNK=CHUNK, WIDTH=WIDTH)
    launch(range_of_keys, -(-groups // WIDTH), (keys, minimum, maximum), (groups,), WIDTH=WIDTH)
    return minimum, maximum
