"""Triton kernels that encode and decode activations whose scaling groups have any size.

Such groups run through the borders of packing blocks. Encoding takes two kernels: one works group by group, the other
packs blocks. Decoding gathers the codes of a group from all over its blocks. Arguments are those of
`daf_kernels.triton.planes`, and ``group``: Elements of a group.
"""

import triton
import triton.language as tl

from daf_kernels.layout import MAX_GROUP
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
    line,
    moments,
    narrow,
    row_largest,
    row_least,
    step_inverses,
    widen,
)
from daf_kernels.triton.pages import code_byte, lanes_of, load_rows, own_blocks, store_lanes

LARGEST_GROUP = tl.constexpr(MAX_GROUP)


@triton.jit
def _groups(elements, group, GROUPS: tl.constexpr):
    """Of a program's groups the numbers, the elements before all, their first ones counted from there, their sizes."""
    first_number = tl.program_id(0).to(tl.int64) * GROUPS
    before = first_number * group
    size, left = group.to(tl.int32), tl.minimum(elements - before, GROUPS * group).to(tl.int32)
    first = tl.arange(0, GROUPS) * size
    return first_number + tl.arange(0, GROUPS), before, first, tl.minimum(tl.maximum(left - first, 0), size)


@kernel
def encode_groups(
    values,
    table,
    flag,
    lows,
    inverses,
    elements: tl.int64,
    group: tl.int64,
    GROUPS: tl.constexpr,
    PLANES: tl.constexpr,
    PER_PAGE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Writes the headers of groups, and what `encode_blocks` asks of them.

    Args:
        values: Dense floats; for all that is not named here see the module.
        table: See the module.
        flag: See the module.
        lows: Gets the value of each group's lowest code.
        inverses: Gets the factor from distances to code steps; 0 for a group that is not finite.
        elements: See the module.
        group: See the module.
        GROUPS: Groups of a program.
        PLANES: See the module.
        PER_PAGE: See the module.
        STOCHASTIC: Whether codes are rounded with random numbers.
    """
    LEVELS: tl.constexpr = LEVELS_OF[PLANES]
    CLIP: tl.constexpr = CLIPS[PLANES] and (not STOCHASTIC)
    number, before, first, count = _groups(elements, group, GROUPS)
    column = tl.arange(0, LARGEST_GROUP)[None, :]
    there = column < count[:, None]
    value = widen(tl.load(values + before + (first[:, None] + column), mask=there, other=0.0))
    minimum = row_least(tl.where(there, value, INFINITY))
    spread = row_largest(tl.where(there, value, -INFINITY)) - minimum
    finite = spread < SPREAD_LIMIT
    inverse, moment_inverse = step_inverses(spread, LEVELS * 1.0)
    step = biased_integer((value - minimum[:, None]) * moment_inverse[:, None])
    step = tl.where(there, step, 0)
    mean, deviation = moments(minimum, spread, count, tl.sum(step, 1), tl.sum(step * step, 1))
    exists = number * group < elements
    write_headers(table, flag, number, exists, mean, deviation, finite, PER_PAGE)
    if CLIP:
        minimum, inverse = clip(minimum, spread, mean, deviation, inverse, LEVELS * 1.0)
    if PLANES > 0:
        tl.store(lows + number, minimum, mask=exists)
        tl.store(inverses + number, inverse, mask=exists)


@kernel
def encode_blocks(
    values,
    table,
    lows,
    inverses,
    elements: tl.int64,
    first_program: tl.int64,
    group: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    key_low: tl.int64,
    key_high: tl.int64,
    counter_low: tl.int64,
    counter_high: tl.int64,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Packs the codes of blocks, with what `encode_groups` found of their groups."""
    LEVELS: tl.constexpr = LEVELS_OF[PLANES]
    CLIP: tl.constexpr = CLIPS[PLANES] and (not STOCHASTIC)
    before, left, lanes, first = own_blocks(elements, first_program, BLOCKS)
    rows = load_rows(values, before, first, left, MASKED)
    words = (0, 0, 0, 0)
    if STOCHASTIC:
        words = noise(rows[0], before * 32 + lanes, key_low, key_high, counter_low, counter_high)
    first_group = before * 256 // group
    inside = (before * 256 - first_group * group).to(tl.int32)
    # Numbers this small are divided exactly by a product: it is off by 3e-5 and a half of an element is 2e-3 at least.
    share = tl.div_rn(1.0, group.to(tl.float32))
    high, low = tl.zeros((BLOCKS, 32), tl.uint32), tl.zeros((BLOCKS, 32), tl.uint32)
    for row in tl.static_range(8):
        element = first + row * 32
        number = first_group + (((inside + element).to(tl.float32) + 0.5) * share).to(tl.int32)
        if MASKED:
            lowest = tl.load(lows + number, mask=element < left, other=0.0)
            inverse = tl.load(inverses + number, mask=element < left, other=0.0)
        else:
            lowest, inverse = tl.load(lows + number), tl.load(inverses + number)
        code = code_of(widen(rows[row]) - lowest, inverse, words, row, LEVELS, CLIP, STOCHASTIC)
        # The distance is NaN in a group that is not finite.
        code = tl.where(inverse > 0.0, code, code_bias(code, STOCHASTIC))
        high, low = add_code(high, low, code, row, PLANES)
    high = without_bias(high, 0, 8, PLANES, STOCHASTIC)
    starts, packed = (start0, start1, start2, start3), lanes_of(high, low)
    store_lanes(packed, table, starts, before, lanes, left, PLANES, SHIFT, MASKED)


@kernel
def decode_groups(
    out,
    table,
    elements: tl.int64,
    group: tl.int64,
    start0: tl.int64,
    start1: tl.int64,
    start2: tl.int64,
    start3: tl.int64,
    GROUPS: tl.constexpr,
    PLANES: tl.constexpr,
    SHIFT: tl.constexpr,
    PER_PAGE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Decodes groups of any size, `GROUPS` in a program. ``LIMIT`` is the largest number of the type of ``out``."""
    number, before, first, count = _groups(elements, group, GROUPS)
    column = tl.arange(0, LARGEST_GROUP)[None, :]
    there = column < count[:, None]
    element = first[:, None] + column
    code = tl.zeros((GROUPS, LARGEST_GROUP), tl.uint32)
    starts = (start0, start1, start2, start3)
    for plane in tl.static_range(PLANES):
        code |= code_byte(table, starts[plane], before, element, there, plane, SHIFT)
    exists = number * group < elements
    mean, deviation = read_headers(table, number, exists, PER_PAGE)
    slope, offset = line(mean, deviation, tl.maximum(count, 1), tl.sum(code, 1), tl.sum(code * code, 1))
    value = float_of(code) * slope[:, None] + offset[:, None]
    tl.store(out + before + element, narrow(bound(value, LIMIT), out.dtype.element_ty), mask=there)
