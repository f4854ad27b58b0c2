"""Triton kernels that encode GELU's derivative into planes and decode it; see `daf_kernels.reference.gelu_derivative`.

Arguments are those of `daf_kernels.triton.planes`.
"""

import triton
import triton.language as tl

from daf_kernels.reference import gelu_derivative as slopes
from daf_kernels.triton.codes import add_code
from daf_kernels.triton.launch import kernel
from daf_kernels.triton.numerics import INFINITY, biased_integer, narrow, widen
from daf_kernels.triton.pages import (
    code_in_words,
    lanes_of,
    load_lanes,
    load_rows,
    own_blocks,
    store_lanes,
    store_row,
    words_of,
)

LIMIT = tl.constexpr(slopes.LIMIT)
SCALE = tl.constexpr(1 / slopes.LIMIT)
MIDDLE = tl.constexpr(slopes.MIDDLE)
STEPS = tl.constexpr(slopes.STEPS)
ODD = tl.constexpr(slopes.ODD)
ALL_PLANES = tl.constexpr(4)  # codes have 8 bits, of which some planes are stored


@triton.jit
def _slope_code(value, negative):
    """8-bit codes of the derivative at float32 inputs; what is not a number counts as an infinity of its sign."""
    magnitude = tl.abs(value)
    magnitude = tl.where(magnitude < LIMIT, magnitude, LIMIT)
    s = tl.where(negative, -magnitude, magnitude) * SCALE
    square = s * s
    odd = square * 0.0 + ODD[7]
    for index in tl.static_range(7):
        odd = odd * square + ODD[6 - index]
    return biased_integer((odd * s + MIDDLE) * STEPS) & 255


@triton.jit
def _is_negative(value):
    """Whether the sign is set, of NaNs too."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
    else:  # Triton compiles what follows a return, too
        bits = value.to(tl.int16, bitcast=True)
    return bits < 0


@kernel
def encode_slopes(
    values,
    table,
    flag,
    elements: tl.int64,
    first_program: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes GELU's derivative; sets the flag where a value is not finite."""
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    rows = load_rows(values, before, first, left, MASKED)
    high, low = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.uint32)
    lost = tl.zeros((BLOCKS, 32), tl.int32)
    for row in tl.static_range(8):
        value = widen(rows[row])
        lost |= (tl.abs(value) < INFINITY).to(tl.int32) ^ 1
        code = _slope_code(value, _is_negative(rows[row]))
        if MASKED:
            code = tl.where(first + row * 32 < left, code, 0)
        high, low = add_code(high, low, code, row, ALL_PLANES)
    starts, packed = (start0, start1, start2, start3), lanes_of(high, low)
    store_lanes(packed, table, starts, before, lanes, left, PLANES, SHIFT, MASKED)
    if tl.max(tl.max(lost, axis=1), axis=0) > 0:
        tl.store(flag, 1)


@kernel
def decode_slopes(
    out,
    table,
    inputs,
    elements: tl.int64,
    first_program: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes the input that each code stands for, of 256 `inputs`."""
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    starts = (start0, start1, start2, start3)
    packed = load_lanes(table, starts, before, lanes, left, PLANES, SHIFT, MASKED)
    high, low = words_of(packed, PLANES)
    for row in tl.static_range(8):
        value = narrow(tl.load(inputs + code_in_words(high, low, row, PLANES)), out.dtype.element_ty)
        store_row(out, before, first, left, row, value, MASKED)
