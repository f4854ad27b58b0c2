"""Triton kernels that pack two-valued tensors to one bit an element, and unpack them.

A mask is a plane of width 1 and no header; arguments are those of `daf_kernels.triton.planes`.
"""

import triton
import triton.language as tl

from daf_kernels.triton.launch import kernel
from daf_kernels.triton.numerics import largest, narrow, widen
from daf_kernels.triton.pages import lane_pointer, load_rows, tile


@triton.jit
def _store_bits(bits, table, before, lanes, left, SHIFT: tl.constexpr, MASKED: tl.constexpr):
    pointer = lane_pointer(table, 0, before, lanes, 1, SHIFT)
    if MASKED:
        tl.store(pointer, bits.to(tl.uint8), mask=lanes // 32 * 256 < left)
    else:
        tl.store(pointer, bits.to(tl.uint8))


@triton.jit
def _load_bits(table, before, lanes, left, SHIFT: tl.constexpr, MASKED: tl.constexpr):
    pointer = lane_pointer(table, 0, before, lanes, 1, SHIFT)
    if MASKED:
        return tl.load(pointer, mask=lanes // 32 * 256 < left, other=0).to(tl.uint32)
    return tl.load(pointer).to(tl.uint32)


@kernel
def encode_mask(
    values,
    table,
    flag,
    elements: tl.int64,
    first_program: tl.int64,
    zero: tl.int64,
    one: tl.int64,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Packs where integers are `one`; sets the flag where one is neither that nor `zero`."""
    before = (tl.program_id(0).to(tl.int64) + first_program) * BLOCKS
    left = tl.minimum(elements - before * 256, BLOCKS * 256).to(tl.int32)
    lanes, first = tile(BLOCKS)
    rows = load_rows(values + before * 256, first, left, MASKED)
    low, high = zero.to(values.dtype.element_ty), one.to(values.dtype.element_ty)
    bits, others = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.int32)
    for row in tl.static_range(8):
        is_one = rows[row] == high
        other = (is_one == 0) & (rows[row] != low)
        if MASKED:
            there = first + row * 32 < left
            is_one, other = is_one & there, other & there
        bits |= is_one.to(tl.uint32) << row
        others |= other.to(tl.int32)
    _store_bits(bits, table, before, lanes, left, SHIFT, MASKED)
    if tl.max(tl.max(others, axis=1), axis=0) > 0:
        tl.store(flag, 1)


@kernel
def decode_mask(
    out,
    table,
    elements: tl.int64,
    first_program: tl.int64,
    zero: tl.int64,
    one: tl.int64,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes `one` where a bit is set, and `zero` elsewhere."""
    before = (tl.program_id(0).to(tl.int64) + first_program) * BLOCKS
    left = tl.minimum(elements - before * 256, BLOCKS * 256).to(tl.int32)
    lanes, first = tile(BLOCKS)
    bits = _load_bits(table, before, lanes, left, SHIFT, MASKED)
    low, high = zero.to(out.dtype.element_ty), one.to(out.dtype.element_ty)
    for row in tl.static_range(8):
        value = tl.where((bits >> row) & 1 != 0, high, low)
        if MASKED:
            tl.store(out + before * 256 + first + row * 32, value, mask=first + row * 32 < left)
        else:
            tl.store(out + before * 256 + first + row * 32, value)


@kernel
def encode_nonzero(
    values,
    table,
    elements: tl.int64,
    first_program: tl.int64,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Packs where floats are not zero, of either sign."""
    before = (tl.program_id(0).to(tl.int64) + first_program) * BLOCKS
    left = tl.minimum(elements - before * 256, BLOCKS * 256).to(tl.int32)
    lanes, first = tile(BLOCKS)
    rows = load_rows(values + before * 256, first, left, MASKED)
    bits = tl.zeros((BLOCKS, 32), tl.uint32)
    for row in tl.static_range(8):
        bits |= (widen(rows[row]) != 0.0).to(tl.uint32) << row
    _store_bits(bits, table, before, lanes, left, SHIFT, MASKED)


@kernel
def rectify(
    out,
    table,
    elements: tl.int64,
    first_program: tl.int64,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    TINY: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sets floats to 0 where a bit is not set, and to ``TINY``, the smallest normal number, or more where it is."""
    before = (tl.program_id(0).to(tl.int64) + first_program) * BLOCKS
    left = tl.minimum(elements - before * 256, BLOCKS * 256).to(tl.int32)
    lanes, first = tile(BLOCKS)
    bits = _load_bits(table, before, lanes, left, SHIFT, MASKED)
    rows = load_rows(out + before * 256, first, left, MASKED)
    for row in tl.static_range(8):
        value = widen(rows[row])
        value = tl.where((bits >> row) & 1 != 0, largest(value, tl.full(value.shape, TINY, tl.float32)), 0.0)
        value = narrow(value, out.dtype.element_ty)
        if MASKED:
            tl.store(out + before * 256 + first + row * 32, value, mask=first + row * 32 < left)
        else:
            tl.store(out + before * 256 + first + row * 32, value)
