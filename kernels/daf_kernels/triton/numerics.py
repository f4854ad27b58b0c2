"""Arithmetic that the Triton kernels share, rounded as `daf_kernels.reference.codec` rounds it.

Every product and sum is rounded on its own, so kernels are launched without fused multiply-add, and divisions and roots
are the correctly rounded ones. Two things are done by hand in Triton's interpreter, which runs the kernels on a machine
without a GPU: it truncates float32 to bfloat16, and it calls a function for every element of a reduction that is not
built in.
"""

import triton
import triton.language as tl

from daf_kernels.layout import CLIP, LARGEST_CLIPPED, LARGEST_SPREAD, LEAST_TAIL


@triton.jit
def least(a, b):
    """The smaller of two; NaN where one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(a, b):
    """The larger of two; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


INTERPRETED = tl.constexpr(not isinstance(least, triton.JITFunction))
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to nearest even and leaves the integer in the low bits
MOMENT_STEPS = tl.constexpr(4095.0)
SPREAD_LIMIT = tl.constexpr(LARGEST_SPREAD)
CLIPPED = tl.constexpr(CLIP)
CLIPPED_WIDTH = tl.constexpr(2 * CLIP)
CLIPPED_SPREAD = tl.constexpr(LARGEST_CLIPPED)
TAIL = tl.constexpr(LEAST_TAIL)
BIAS = tl.constexpr(0x4B400000)  # the bits of MAGIC
FINE_STEPS = tl.constexpr(16384.0)  # 14 bits of a code step, in stochastic rounding
FINE_BIAS = tl.constexpr(0x4B400000 >> 14)
TWICE_BIAS = tl.constexpr(2 * 0x4B400000 & 0xFFFFFFFF)
INFINITY = tl.constexpr(float("inf"))
NAN_BITS = tl.constexpr(0x7FC00000)
LOW_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def widen(values):
    """Floats of any type as float32, exactly."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """float32 rounded to the nearest of a type."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values != values, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def row_least(values):
    """The minimum of each row; NaN where one of its elements is."""
    if INTERPRETED:
        lost = tl.max((values != values).to(tl.int32), axis=1)
        return tl.where(lost > 0, float("nan"), tl.min(values, axis=1))
    return tl.reduce(values, 1, least)


@triton.jit
def row_largest(values):
    """The maximum of each row; NaN where one of its elements is."""
    if INTERPRETED:
        lost = tl.max((values != values).to(tl.int32), axis=1)
        return tl.where(lost > 0, float("nan"), tl.max(values, axis=1))
    return tl.reduce(values, 1, largest)


@triton.jit
def biased_integer(values):
    """float32 from 0 to 2**22 rounded to the nearest integer, ties to even, plus `BIAS`."""
    return (values + MAGIC).to(tl.uint32, bitcast=True)


@triton.jit
def float_of(codes):
    """Integers below 2**23 as float32: cheaper than a conversion, which GPUs do at a quarter of the rate."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def step_inverses(spread, levels: tl.constexpr):
    """Factors from distances to code steps and to moment steps; 0 where no step can be seen."""
    moment_inverse = tl.div_rn(tl.full(spread.shape, MOMENT_STEPS, tl.float32), spread)
    visible = (spread < SPREAD_LIMIT) & (moment_inverse < INFINITY)
    inverse = tl.div_rn(tl.full(spread.shape, levels, tl.float32), spread)
    return tl.where(visible, inverse, 0.0), tl.where(visible, moment_inverse, 0.0)


@triton.jit
def _square_spread(count, total, squares):
    """Of n numbers s, n * sum(s**2) - sum(s)**2 in 64 bits."""
    total = total.to(tl.int64)
    return count.to(tl.int64) * squares.to(tl.int64) - total * total


@triton.jit
def moments(minimum, spread, count, total, squares):
    """Mean and deviation of groups.

    Args:
        minimum: Of each group.
        spread: Distance from it to the maximum.
        count: Elements.
        total: Sum of `biased_integer` of their 12-bit steps over `count` elements, modulo 2**32.
        squares: Sum of the squares of those.
    """
    total -= count.to(tl.uint32) * BIAS
    squares -= total * TWICE_BIAS  # (s + BIAS)**2 = s**2 + 2 s BIAS modulo 2**32
    scale = count.to(tl.float32) * MOMENT_STEPS
    root = tl.sqrt_rn(_square_spread(count, total, squares).to(tl.float32))
    mean = minimum + spread * tl.div_rn(total.to(tl.float32), scale)
    return mean, spread * tl.div_rn(root, scale)


@triton.jit
def clip(minimum, spread, mean, deviation, inverse, levels: tl.constexpr):
    """The lowest code's value and the inverse step, of groups whose tails are better clipped those that clip them."""
    low = mean - minimum
    # Constants stand on the right: the interpreter of Triton 3.8 takes a constant times a tensor for a constant.
    tail = deviation * TAIL
    normal = (deviation > 0.0) & (spread < deviation * CLIPPED_SPREAD) & (low > tail) & (spread - low > tail)
    normal = normal & (inverse > 0.0)
    clipped = tl.div_rn(tl.full(deviation.shape, levels, tl.float32), deviation * CLIPPED_WIDTH)
    return tl.where(normal, mean - deviation * CLIPPED, minimum), tl.where(normal, clipped, inverse)


@triton.jit
def line(mean, deviation, count, total, squares):
    """Slope and offset that give codes with these sums the mean and the deviation."""
    spread = _square_spread(count, total, squares)
    size = count.to(tl.float32)
    slope = deviation * tl.div_rn(size, tl.sqrt_rn(spread.to(tl.float32)))
    slope = tl.where(spread > 0, slope, 0.0)
    return slope, mean - slope * tl.div_rn(total.to(tl.float32), size)


@triton.jit
def bound(values, limit: tl.constexpr):
    """Values no further from 0 than `limit`; NaN stays."""
    most = tl.full(values.shape, limit, tl.float32)
    return largest(least(values, most), -most)


@triton.jit
def deviation_bits(deviation):
    """float32 as a header's 16 bits."""
    bits = deviation.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    return ((bits + 0x3FFF + ((bits >> 15) & 1)) >> 15).to(tl.uint16)


@triton.jit
def philox(lane, low, high, counter_low, counter_high):
    """Philox-4x32-10 of (lane, counter) with the key (low, high): four words for each lane; see `reference.noise`."""
    c0, c1 = (lane & LOW_WORD).to(tl.uint32), (lane >> 32).to(tl.uint32)
    c2, c3 = c0 * 0 + counter_low.to(tl.uint32), c0 * 0 + counter_high.to(tl.uint32)
    k0, k1 = low.to(tl.uint32), high.to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_bits(words, row: tl.constexpr):
    """14 random bits for row `row` of a block: its four words hold two numbers each."""
    word = words[row // 2]
    if row % 2 == 0:
        return (word >> 2) & 0x3FFF
    return word >> 18
