"""Codes of rows of elements, the words of eight codes that are split into planes, and headers of groups."""

import triton
import triton.language as tl

from daf_kernels.layout import CLIPPED_PRECISION, DEVIATION_SHIFT, PRECISIONS
from daf_kernels.triton.numerics import (
    BIAS,
    FINE_BIAS,
    FINE_STEPS,
    NAN_BITS,
    biased_integer,
    deviation_bits,
    philox,
    random_bits,
    widen,
)
from daf_kernels.triton.pages import BITS, header_addresses

DEVIATION = tl.constexpr(DEVIATION_SHIFT)
LEVELS_OF = tl.constexpr(tuple(2 ** max(bits, 1) - 1 for bits in (0, *PRECISIONS)))
CLIPS = tl.constexpr(tuple(0 < bits <= CLIPPED_PRECISION for bits in (0, *PRECISIONS)))


@triton.jit
def noise(row, lane, key_low, key_high, counter_low, counter_high):
    """Random words for each lane, in the layout that the row was loaded in: exchanged, they took 19 barriers."""
    zero = (widen(row).to(tl.uint32, bitcast=True) >> 31) >> 31
    return philox(lane + zero, key_low, key_high, counter_low, counter_high)


@triton.jit
def code_of(
    distance, inverse, words, row: tl.constexpr, LEVELS: tl.constexpr, CLIP: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Codes of distances from the lowest code's value, plus `code_bias`."""
    place = distance * inverse
    if STOCHASTIC:
        return (biased_integer(place * FINE_STEPS) + random_bits(words, row)) >> 14
    if CLIP:
        place = tl.where(place > 0.0, place, 0.0)
        place = tl.where(place < LEVELS, place, LEVELS * 1.0)
    return biased_integer(place)


@triton.jit
def code_bias(like, STOCHASTIC: tl.constexpr):
    """What `code_of` adds. Off each code it would cost an instruction, off a word of 8 codes an eighth of one."""
    if STOCHASTIC:
        bias = (like & 0) + FINE_BIAS
    else:
        bias = (like & 0) + BIAS
    return bias


@triton.jit
def add_code(high, low, code, row: tl.constexpr, PLANES: tl.constexpr):
    """Adds the codes of a row to the words of their high and their low four bits, 8 codes in each."""
    if PLANES == 4:
        high += (code >> 4) << (4 * row)
        low += (code & 15) << (4 * row)
    else:
        high += code << (4 * row + 4 - BITS[PLANES])
    return high, low


@triton.jit
def without_bias(high, first: tl.constexpr, stop: tl.constexpr, PLANES: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The word of high bits without what the biases of rows `first` to `stop` added to it."""
    bias, none = code_bias(high, STOCHASTIC), high & 0
    for row in tl.static_range(first, stop):
        high -= add_code(none, none, bias, row, PLANES)[0]
    return high


@triton.jit
def write_headers(table, flag, group, exists, mean, deviation, finite, PER_PAGE: tl.constexpr):
    """Writes the headers of groups: NaN where they are not finite, which is reported."""
    mean_at, deviation_at = header_addresses(table, group, exists, PER_PAGE)
    mean_bits = tl.where(finite, mean.to(tl.uint32, bitcast=True), NAN_BITS)
    stored = tl.where(finite, deviation_bits(deviation), NAN_BITS >> DEVIATION).to(tl.uint16)
    tl.store(mean_at.to(tl.pointer_type(tl.uint32)), mean_bits, mask=exists)
    tl.store(deviation_at.to(tl.pointer_type(tl.uint16)), stored, mask=exists)
    if tl.max((exists & (finite == 0)).to(tl.int32), axis=0) > 0:
        tl.store(flag, 1)


@triton.jit
def read_headers(table, group, exists, PER_PAGE: tl.constexpr):
    """Means and deviations of groups."""
    mean_at, deviation_at = header_addresses(table, group, exists, PER_PAGE)
    mean = tl.load(mean_at.to(tl.pointer_type(tl.float32)), mask=exists, other=0.0)
    stored = tl.load(deviation_at.to(tl.pointer_type(tl.uint16)), mask=exists, other=0)
    return mean, (stored.to(tl.uint32) << DEVIATION).to(tl.float32, bitcast=True)
