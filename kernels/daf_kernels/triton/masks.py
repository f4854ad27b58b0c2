"""Triton kernels that pack two-valued tensors to one bit an element, and unpack them.

A mask is a plane of width 1 and no header; arguments are those of `daf_kernels.triton.planes`.
"""

import triton.language as tl

from daf_kernels.triton.launch import kernel
from daf_kernels.triton.numerics import largest, narrow, widen
from daf_kernels.triton.pages import load_lanes, load_rows, own_blocks, store_lanes, store_row


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
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    rows = load_rows(values, before, first, left, MASKED)
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
    store_lanes((bits,), table, (0,), before, lanes, left, 1, SHIFT, MASKED)
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
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    bits = load_lanes(table, (0,), before, lanes, left, 1, SHIFT, MASKED)[0]
    low, high = zero.to(out.dtype.element_ty), one.to(out.dtype.element_ty)
    for row in tl.static_range(8):
        value = tl.where((bits >> row) & 1 != 0, high, low)
        store_row(out, before, first, left, row, value, MASKED)


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
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    rows = load_rows(values, before, first, left, MASKED)
    bits = tl.zeros((BLOCKS, 32), tl.uint32)
    for row in tl.static_range(8):
        bits |= (widen(rows[row]) != 0.0).to(tl.uint32) << row
    store_lanes((bits,), table, (0,), before, lanes, left, 1, SHIFT, MASKED)


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
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    bits = load_lanes(table, (0,), before, lanes, left, 1, SHIFT, MASKED)[0]
    rows = load_rows(out, before, first, left, MASKED)
    for row in tl.static_range(8):
        value = widen(rows[row])
        value = tl.where((bits >> row) & 1 != 0, largest(value, tl.full(value.shape, TINY, tl.float32)), 0.0)
        value = narrow(value, out.dtype.element_ty)
        store_row(out, before, first, left, row, value, MASKED)
