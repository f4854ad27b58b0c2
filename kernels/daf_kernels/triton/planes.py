"""Triton kernels that encode and decode activations whose scaling groups are whole rows of a packing block.

`daf_kernels.reference.codec` says in plain torch what they compute. A program sees its packing blocks as 8 rows of
(blocks, 32) elements, so that packing is the OR of rows and needs no exchange between threads, and reads each element
once.

Arguments that all kernels of planes and masks have:

- ``table``: Addresses of the activation's pages.
- ``elements``: How many there are.
- ``first_program``: Number of the launch's first program; of many, a second launch does the end, with ``MASKED``.
- ``start0`` to ``start3``: Index of the first page of each plane.
- ``key_low``, ``key_high``, ``counter_low``, ``counter_high``: The words of a `daf_kernels.backend.Seed`.
- ``flag``: int32, set to 1 where a group is not finite.
- ``GROUP``, ``PLANES``, ``BLOCKS``: Elements of a group, planes that are stored, blocks of a program.
- ``SHIFT``, ``PER_PAGE``: Binary logarithm of the page size, headers in a page.
"""

import triton.language as tl

from daf_kernels.triton.codes import (
    CLIPS,
    LEVELS_OF,
    add_code,
    code_bias,
    code_of,
    noise,
    read_headers,
    without_bias,
    write_headers,
)
from daf_kernels.triton.launch import kernel
from daf_kernels.triton.numerics import (
    INFINITY,
    SPREAD_LIMIT,
    biased_integer,
    bound,
    clip,
    float_of,
    largest,
    least,
    line,
    moments,
    narrow,
    row_largest,
    row_least,
    step_inverses,
    widen,
)
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


@kernel
def encode_fused(
    values,
    table,
    flag,
    elements: tl.int64,
    first_program: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    key_low: tl.int64,
    key_high: tl.int64,
    counter_low: tl.int64,
    counter_high: tl.int64,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    PER_PAGE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes blocks whose groups have 32, 64, 128 or 256 elements."""
    LEVELS: tl.constexpr = LEVELS_OF[PLANES]
    CLIP: tl.constexpr = CLIPS[PLANES] and (not STOCHASTIC)
    PARTS: tl.constexpr = 256 // GROUP
    HEIGHT: tl.constexpr = 8 // PARTS
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    rows = load_rows(values, before, first, left, MASKED)
    words = (0, 0, 0, 0)
    if STOCHASTIC:
        words = noise(rows[0], before * 32 + lanes, key_low, key_high, counter_low, counter_high)
    high_bits, low_bits = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.uint32)
    for part in tl.static_range(PARTS):
        low, high = tl.full((BLOCKS, 32), INFINITY, tl.float32), tl.full((BLOCKS, 32), -INFINITY, tl.float32)
        for row in tl.static_range(part * HEIGHT, part * HEIGHT + HEIGHT):
            value = widen(rows[row])
            if MASKED:
                there = first + row * 32 < left
                low = least(low, tl.where(there, value, INFINITY))
                high = largest(high, tl.where(there, value, -INFINITY))
            else:
                low, high = least(low, value), largest(high, value)
        minimum = row_least(low)
        spread = row_largest(high) - minimum
        finite = spread < SPREAD_LIMIT
        inverse, moment_inverse = step_inverses(spread, LEVELS * 1.0)
        totals, squares = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.uint32)
        for row in tl.static_range(part * HEIGHT, part * HEIGHT + HEIGHT):
            step = biased_integer((widen(rows[row]) - minimum[:, None]) * moment_inverse[:, None])
            if MASKED:
                step = tl.where(first + row * 32 < left, step, 0)
            totals += step
            squares += step * step
        number = tl.arange(0, BLOCKS) * PARTS + part
        count = tl.minimum(tl.maximum(left - number * GROUP, 1), GROUP)
        mean, deviation = moments(minimum, spread, count, tl.sum(totals, 1), tl.sum(squares, 1))
        if CLIP:
            minimum, inverse = clip(minimum, spread, mean, deviation, inverse, LEVELS * 1.0)
        if PLANES > 0:
            high, low = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.uint32)
            for row in tl.static_range(part * HEIGHT, part * HEIGHT + HEIGHT):
                distance = widen(rows[row]) - minimum[:, None]
                code = code_of(distance, inverse[:, None], words, row, LEVELS, CLIP, STOCHASTIC)
                if MASKED:
                    code = tl.where(first + row * 32 < left, code, code_bias(code, STOCHASTIC))
                high, low = add_code(high, low, code, row, PLANES)
            high = without_bias(high, part * HEIGHT, part * HEIGHT + HEIGHT, PLANES, STOCHASTIC)
            high_bits += tl.where(finite[:, None], high, 0)
            low_bits += tl.where(finite[:, None], low, 0)
        write_headers(table, flag, before * PARTS + number, number * GROUP < left, mean, deviation, finite, PER_PAGE)
    starts, packed = (start0, start1, start2, start3), lanes_of(high_bits, low_bits)
    store_lanes(packed, table, starts, before, lanes, left, PLANES, SHIFT, MASKED)


@kernel
def decode_fused(
    out,
    table,
    elements: tl.int64,
    first_program: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    PER_PAGE: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decodes what `encode_fused` encodes. ``LIMIT`` is the largest number of the type of ``out``."""
    PARTS: tl.constexpr = 256 // GROUP
    HEIGHT: tl.constexpr = 8 // PARTS
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    starts = (start0, start1, start2, start3)
    packed = load_lanes(table, starts, before, lanes, left, PLANES, SHIFT, MASKED)
    high, low = words_of(packed, PLANES)
    for part in tl.static_range(PARTS):
        # Sums of 256 codes of 8 bits and of their squares are below 2**24: float32 holds them exactly.
        totals, squares = tl.zeros((BLOCKS, 32), tl.float32), tl.zeros((BLOCKS, 32), tl.float32)
        for row in tl.static_range(part * HEIGHT, part * HEIGHT + HEIGHT):
            code = float_of(code_in_words(high, low, row, PLANES))
            totals += code
            squares = tl.fma(code, code, squares)
        number = tl.arange(0, BLOCKS) * PARTS + part
        count = tl.minimum(tl.maximum(left - number * GROUP, 1), GROUP)
        mean, deviation = read_headers(table, before * PARTS + number, number * GROUP < left, PER_PAGE)
        slope, offset = line(mean, deviation, count, tl.sum(totals, 1), tl.sum(squares, 1))
        for row in tl.static_range(part * HEIGHT, part * HEIGHT + HEIGHT):
            value = float_of(code_in_words(high, low, row, PLANES)) * slope[:, None] + offset[:, None]
            value = narrow(bound(value, LIMIT), out.dtype.element_ty)
            store_row(out, before, first, left, row, value, MASKED)
