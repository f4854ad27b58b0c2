"""Numba kernels that encode GELU's derivative into planes and decode it, for CPUs."""

import numpy as np
from numba import njit

from daf_kernels.cpu.bits import (
    BFLOAT16,
    F32,
    FLOAT32,
    I32,
    I64,
    INLINE,
    INSIDE,
    MAGIC,
    U8,
    U32,
    bits_of,
    f32_at,
    float_of,
    i32_at,
    narrow_bfloat16,
    narrow_half,
    pack_block,
    prefetch_to_read,
    prefetch_to_write,
    u8_at,
    u16_at,
    unpack_block,
)
from daf_kernels.cpu.ranges import bits_address
from daf_kernels.layout import BLOCK
from daf_kernels.reference.gelu_derivative import LIMIT, MIDDLE, ODD, STEPS

_SCALE, _MIDDLE, _STEPS = F32(1 / LIMIT), F32(MIDDLE), F32(STEPS)
_LIMIT_BITS, _INFINITY_BITS = I32(np.float32(LIMIT).view(np.int32)), I32(0x7F800000)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (F32(coefficient) for coefficient in ODD)


@njit(**INLINE)
def _slope_codes(bits, count, codes):
    """Writes the codes of `count` inputs; returns the largest of their magnitudes' bits."""
    largest = I32(0)
    for i in range(count):
        magnitude = I32(bits[i] & I32(0x7FFFFFFF))
        largest = max(largest, magnitude)
        s = float_of(I32(min(magnitude, _LIMIT_BITS) | I32(bits[i] & I32(-0x80000000)))) * _SCALE
        q = s * s
        odd = ((((((_C7 * q + _C6) * q + _C5) * q + _C4) * q + _C3) * q + _C2) * q + _C1) * q + _C0
        codes[i] = U8(U32(bits_of((odd * s + _MIDDLE) * _STEPS + MAGIC)))
    return largest


@njit(**INSIDE)
def encode_slopes(values, kind, first, stop, planes, pages, starts, page_shift, scratch):
    """Encodes GELU's derivative at elements [first, stop) of the floats at address `values`.

    The arguments are those of `cpu_planes.encode_planes`; `first` is a multiple of 256, and `scratch` the address of
    1,280 bytes. Returns 1 where an element is not finite, otherwise 0.
    """
    codes, largest = u8_at(scratch), I32(0)
    size = 4 if kind == FLOAT32 else 2
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        prefetch_to_read(values + size * (start + 4 * BLOCK), size * BLOCK)
        bits = i32_at(bits_address(values, kind, start, count, scratch + BLOCK))
        if count == BLOCK:  # a loop of constant length is three times as fast
            largest = max(largest, _slope_codes(bits, BLOCK, codes))
        else:
            largest = max(largest, _slope_codes(bits, count, codes))
            for i in range(count, BLOCK):
                codes[i] = U8(0)
        pack_block(codes, start >> 8, planes, pages, starts, page_shift)
    return I64(largest >= _INFINITY_BITS)


@njit(**INSIDE)
def decode_slopes(out, kind, first, stop, planes, table, pages, starts, page_shift, scratch):
    """Decodes elements [first, stop) to address `out`, with `table` of 256 float32; `scratch` has 256 bytes."""
    codes = u8_at(scratch)
    size = 4 if kind == FLOAT32 else 2
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        prefetch_to_write(out + size * (start + 4 * BLOCK), size * BLOCK)
        unpack_block(scratch, start >> 8, planes, pages, starts, page_shift)
        if kind == FLOAT32:
            floats = f32_at(out)
            for i in range(count):
                floats[start + i] = table[codes[i]]
        elif kind == BFLOAT16:
            halves = u16_at(out)
            for i in range(count):
                halves[start + i] = narrow_bfloat16(table[codes[i]])
        else:
            halves = u16_at(out)
            for i in range(count):
                halves[start + i] = narrow_half(table[codes[i]])
