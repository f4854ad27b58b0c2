"""Numba functions that find the range of scaling groups, for CPUs."""

import numpy as np
from numba import njit

from daf_kernels.cpu.bits import (
    FLOAT16,
    FLOAT32,
    I32,
    INLINE,
    bits_of,
    f32_at,
    float_of,
    i32_at,
    u16_at,
    widen_half,
)
from daf_kernels.cpu.compile_cache import kernel


@njit(**INLINE)
def _ordered(bits):
    """The bits of a float as an integer of the same order; its own inverse. -NaN < -inf < ... < inf < NaN."""
    return I32(bits ^ I32((bits >> I32(31)) & I32(0x7FFFFFFF)))


@njit(**INLINE)
def value_range(bits, count):
    """Returns the minimum of `count` floats and its distance to the maximum; NaN or infinite where a value is."""
    low, high = I32(0x7FFFFFFF), I32(-0x80000000)
    for i in range(count):
        key = _ordered(bits[i])
        low, high = min(low, key), max(high, key)
    minimum = float_of(_ordered(low))
    return minimum, float_of(_ordered(high)) - minimum


@njit(**INLINE)
def _widen(address, kind, count, bits):
    """Writes the float32 bits of 16-bit floats."""
    values = u16_at(address)
    if kind == FLOAT16:
        for i in range(count):
            bits[i] = bits_of(widen_half(values[i]))
    else:
        for i in range(count):
            bits[i] = I32(I32(values[i]) << I32(16))


@njit(**INLINE)
def bits_address(values, kind, first, count, scratch):
    """Returns the address of the float32 bits of `count` values from `first` on: in place, or widened in `scratch`."""
    if kind == FLOAT32:
        return values + 4 * first
    _widen(values + 2 * first, kind, count, i32_at(scratch))
    return scratch


@njit(**INLINE)
def _variance(values, count):
    """Returns the variance of `count` floats, in double precision."""
    total = 0.0
    for i in range(count):
        total += np.float64(values[i])
    mean, squares = total / count, 0.0
    for i in range(count):
        distance = np.float64(values[i]) - mean
        squares += distance * distance
    return squares / count


@kernel
def squared_ranges(values, kind, group, count, step, work):
    """Returns the summed squared ranges and variances of `count` groups of `group` floats, `step` groups apart.

    Args:
        values: Address of the first group.
        kind: FLOAT32, BFLOAT16 or FLOAT16.
        group: Elements in a group.
        count: How many groups.
        step: 1 for groups that follow each other.
        work: Address of 4 * group bytes of scratch.
    """
    squares, variances = 0.0, 0.0
    for index in range(count):
        bits = bits_address(values, kind, index * step * group, group, work)
        _, spread = value_range(i32_at(bits), group)
        squares += np.float64(spread) * np.float64(spread)
        variances += _variance(f32_at(bits), group)
    return squares, variances
