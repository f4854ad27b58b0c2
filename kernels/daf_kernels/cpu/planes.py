"""Numba kernels that encode activations into planes and decode them, for CPUs.

`daf_kernels.cpu.backend` calls them; `daf_kernels.reference.codec` says in plain torch what they compute. How they are
made fast (`benchmarks/kernels.py` has the figures):

- A floating-point minimum or sum is not vectorized by LLVM, because its order matters; integer ones are. So the minimum
  is taken over order-preserving integers, and the moments over the values scaled to integers of 12 bits, whose sums are
  exact in any order.
- Memory is passed as addresses and read through pointers. Numba counts references, atomically, at every slice of an
  array, and checks every index for being negative: together that cost a factor of three.
- Groups of 256, 128 and 64 run through loops of constant length: LLVM unrolls a loop of unknown length for 256 elements
  at a time and leaves shorter groups to the scalar remainder.
- The next tile is prefetched while this one is computed: 13 GB/s became 19 at fp32 and 4 bits on one Zen 5 core.
- Arithmetic on small integers is cast back at every step: numba widens it to 64 bits otherwise.
- Codes pass through one byte per element of scratch that stays in the first-level cache.
"""

import math

import numpy as np
from numba import njit

from daf_kernels.cpu.bits import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    I32,
    I64,
    INLINE,
    INSIDE,
    MAGIC,
    U8,
    U16,
    U32,
    bits_of,
    deviation_bits,
    f32_at,
    float_of,
    header_addresses,
    i32_at,
    narrow_bfloat16,
    narrow_half,
    pack_block,
    prefetch_to_read,
    prefetch_to_write,
    u8_at,
    u16_at,
    u32_at,
    unpack_block,
)
from daf_kernels.cpu.philox import fill_noise
from daf_kernels.cpu.ranges import bits_address, value_range
from daf_kernels.layout import CLIP, CLIPPED_PRECISION, DEVIATION_SHIFT, LARGEST_CLIPPED, LARGEST_SPREAD, LEAST_TAIL

INFINITY = F32(np.inf)
LIMIT = F32(LARGEST_SPREAD)
MOMENT_STEPS = F32(4095.0)
MOST_CLIPPED = F32(2**CLIPPED_PRECISION - 1)
CLIPPED, WIDTH, LARGEST, LEAST = F32(CLIP), F32(2 * CLIP), F32(LARGEST_CLIPPED), F32(LEAST_TAIL)
NAN = F32(np.nan)


@njit(**INLINE)
def _quantize_nearest(bits, count, minimum, inverse, moment_inverse, shift, codes):
    """Writes left-aligned codes; returns the sums of the 12-bit integers and of their squares."""
    total, squares = U32(0), U32(0)
    for i in range(count):
        offset = float_of(bits[i]) - minimum
        codes[i] = U8(U32(bits_of(offset * inverse + MAGIC)) << shift)
        step = U32(bits_of(offset * moment_inverse + MAGIC) & I32(0xFFF))
        total = U32(total + step)
        squares = U32(squares + U32(step * step))
    return total, squares


@njit(**INLINE)
def _sum_steps(bits, count, minimum, moment_inverse):
    """Returns the sums of the 12-bit integers and of their squares."""
    total, squares = U32(0), U32(0)
    for i in range(count):
        step = U32(bits_of((float_of(bits[i]) - minimum) * moment_inverse + MAGIC) & I32(0xFFF))
        total = U32(total + step)
        squares = U32(squares + U32(step * step))
    return total, squares


@njit(**INLINE)
def _quantize_clipped(bits, count, low, inverse, levels, shift, codes):
    """Writes left-aligned codes between `low` and `levels` steps above it; 0 for a NaN, as where `inverse` is 0."""
    for i in range(count):
        place = (float_of(bits[i]) - low) * inverse
        place = place if place > F32(0.0) else F32(0.0)
        place = place if place < levels else levels
        codes[i] = U8(U32(bits_of(place + MAGIC)) << shift)


@njit(**INLINE)
def _clip(groups, levels, minimum, spread, mean, deviation, inverse):
    """Replaces the minimum and the inverse step of groups whose tails are better clipped."""
    for group in range(groups):
        low, width = mean[group] - minimum[group], deviation[group]
        least, visible = LEAST * width, inverse[group] > F32(0.0)
        normal = (width > F32(0.0)) & (spread[group] < LARGEST * width) & (low > least) & (spread[group] - low > least)
        inverse[group] = levels / (WIDTH * width) if normal & visible else inverse[group]
        minimum[group] = mean[group] - CLIPPED * width if normal & visible else minimum[group]


@njit(**INLINE)
def _quantize_stochastic(bits, count, minimum, inverse, moment_inverse, shift, noise, codes):
    """As `_quantize_nearest`, rounding up with the probability of the remainder, in 2**14 steps."""
    total, squares = U32(0), U32(0)
    for i in range(count):
        offset = float_of(bits[i]) - minimum
        fine = U32(bits_of(offset * inverse * F32(16384.0) + MAGIC) & I32(0x3FFFFF))
        codes[i] = U8(U32(U32(fine + U32(noise[i])) >> U32(14)) << shift)
        step = U32(bits_of(offset * moment_inverse + MAGIC) & I32(0xFFF))
        total = U32(total + step)
        squares = U32(squares + U32(step * step))
    return total, squares


@njit(**INLINE)
def _inverses(groups, spread, levels, inverse, moment_inverse):
    """Turns ranges of groups into factors to code steps and moment steps: 0 where there is no step to be seen."""
    for group in range(groups):
        visible = (spread[group] < LIMIT) & (MOMENT_STEPS / spread[group] < INFINITY)
        inverse[group] = levels / spread[group] if visible else F32(0.0)
        moment_inverse[group] = MOMENT_STEPS / spread[group] if visible else F32(0.0)


@njit(**INLINE)
def _moments(groups, count, minimum, spread, totals, squares, mean, deviation):
    """Turns sums of 12-bit steps into means and deviations of groups of `count`: NaN where the range is not finite."""
    scale = MOMENT_STEPS * F32(count)
    for group in range(groups):
        total = I64(totals[group])
        square_spread = F32(I64(count) * I64(squares[group]) - total * total)
        finite = spread[group] < LIMIT
        mean[group] = minimum[group] + spread[group] * (F32(total) / scale) if finite else NAN
        deviation[group] = spread[group] * (F32(math.sqrt(square_spread)) / scale) if finite else NAN


@njit(**INLINE)
def _code_sums(codes, count):
    """Returns the sum of the codes of a group and of their squares."""
    total, squares = I32(0), I32(0)
    for i in range(count):
        code = I32(codes[i])
        total = I32(total + code)
        squares = I32(squares + I32(code * code))
    return total, squares


@njit(**INLINE)
def _lines(groups, count, totals, squares, mean, deviation):
    """Turns means and deviations of groups of `count` into the offsets and slopes that give them to their codes."""
    for group in range(groups):
        total = I64(totals[group])
        square_spread = I64(count) * I64(squares[group]) - total * total
        slope = deviation[group] * (F32(count) / F32(math.sqrt(F32(square_spread))))
        slope = slope if square_spread > 0 else F32(0.0)
        deviation[group] = slope
        mean[group] = mean[group] - slope * (F32(total) / F32(count))


@njit(**INLINE)
def _dequantize(codes, count, slope, offset, kind, out, first):
    """Writes the values of a group's codes at element `first` of `out`."""
    if kind == FLOAT32:
        floats = f32_at(out + 4 * first)
        for i in range(count):
            floats[i] = F32(I32(codes[i])) * slope + offset
    elif kind == BFLOAT16:
        halves = u16_at(out + 2 * first)
        for i in range(count):
            halves[i] = narrow_bfloat16(F32(I32(codes[i])) * slope + offset)
    else:
        halves = u16_at(out + 2 * first)
        for i in range(count):
            halves[i] = narrow_half(F32(I32(codes[i])) * slope + offset)


@njit(**INLINE)
def _encode_groups(values, kind, first, groups, group, levels, shift, noise, codes, work, capacity):
    """Encodes `groups` groups of `group` elements from `first` on; their moments are left in the first rows of `work`.

    `work` has 6 rows of `capacity` numbers of 32 bits and a last one of 256. `noise` is 0 for rounding to nearest.
    """
    row = 4 * capacity
    minimum, spread = f32_at(work + 2 * row), f32_at(work + 3 * row)
    inverse, moment_inverse = f32_at(work + 4 * row), f32_at(work + 5 * row)
    totals, squares = u32_at(work + 4 * row), u32_at(work + 5 * row)
    for index in range(groups):
        bits = i32_at(bits_address(values, kind, first + index * group, group, work + 6 * row))
        minimum[index], spread[index] = value_range(bits, group)
    _inverses(groups, spread, levels, inverse, moment_inverse)
    size = 4 if kind == FLOAT32 else 2
    if noise == 0 and levels <= MOST_CLIPPED:
        for index in range(groups):
            prefetch_to_read(values + size * (first + (groups + index) * group), size * group)
            bits = i32_at(bits_address(values, kind, first + index * group, group, work + 6 * row))
            totals[index], squares[index] = _sum_steps(bits, group, minimum[index], moment_inverse[index])
        _moments(groups, group, minimum, spread, totals, squares, f32_at(work), f32_at(work + row))
        _inverses(groups, spread, levels, inverse, moment_inverse)  # sums lay in their place
        _clip(groups, levels, minimum, spread, f32_at(work), f32_at(work + row), inverse)
        for index in range(groups):
            bits = i32_at(bits_address(values, kind, first + index * group, group, work + 6 * row))
            into = u8_at(codes + index * group)
            _quantize_clipped(bits, group, minimum[index], inverse[index], levels, shift, into)
        return
    for index in range(groups):
        prefetch_to_read(values + size * (first + (groups + index) * group), size * group)
        into = u8_at(codes + index * group)
        bits = i32_at(bits_address(values, kind, first + index * group, group, work + 6 * row))
        if not spread[index] < LIMIT:
            for i in range(group):
                into[i] = U8(0)
        elif noise == 0:
            totals[index], squares[index] = _quantize_nearest(
                bits, group, minimum[index], inverse[index], moment_inverse[index], shift, into
            )
        else:
            random = u16_at(noise + 2 * index * group)
            totals[index], squares[index] = _quantize_stochastic(
                bits, group, minimum[index], inverse[index], moment_inverse[index], shift, random, into
            )
    _moments(groups, group, minimum, spread, totals, squares, f32_at(work), f32_at(work + row))


@njit(error_model="numpy")
def _encode_unusual(values, kind, first, groups, group, levels, shift, noise, codes, work, capacity):
    """As `_encode_groups`, of which a fourth copy inside the kernel would take LLVM 3 s, for groups of any size."""
    _encode_groups(values, kind, first, groups, group, levels, shift, noise, codes, work, capacity)


@njit(**INLINE)
def _write_headers(pages, page_shift, first, groups, work, capacity):
    """Writes the headers of consecutive groups; returns how many of them are NaN."""
    means, deviations = f32_at(work), f32_at(work + 4 * capacity)
    unusable = 0
    for group in range(groups):
        mean, deviation = header_addresses(pages, page_shift, first + group)
        f32_at(mean)[0] = means[group]
        u16_at(deviation)[0] = deviation_bits(deviations[group])
        unusable += means[group] != means[group]
    return unusable


@njit(**INSIDE)
def encode_planes(
    values, kind, first, stop, group, tile, planes, levels, seed, pages, starts, page_shift, codes, noise, work
):
    """Encodes elements [first, stop) of the floats at address `values`; returns how many groups are not finite.

    Args:
        values: Address of the elements, in storage order.
        kind: FLOAT32, BFLOAT16 or FLOAT16.
        first: First element, a multiple of `tile`.
        stop: End of the elements.
        group: Elements in a scaling group.
        tile: Elements encoded at a time: a multiple of the group and of a block.
        planes: Leading planes to store; 0 stores headers alone.
        levels: 2**precision - 1 as float32.
        seed: uint64 array of the four words of a `daf_kernels.backend.Seed`.
        pages: int64 array of page addresses: header, plane 0, plane 1 and so on.
        starts: int64 array, index of each plane's first page.
        page_shift: Binary logarithm of the page size.
        codes: Address of `tile` bytes of scratch.
        noise: Address of 2 * tile bytes of scratch for stochastic rounding; 0 rounds to nearest.
        work: Address of 24 * (tile // group) + 1024 bytes of scratch.
    """
    capacity = tile // group
    shift = U32(8 - ((1, 1, 2, 4, 8)[planes]))
    unusable = 0
    for start in range(first, stop, tile):
        end = min(start + tile, stop)
        groups = (end - start) // group
        if noise != 0:
            fill_noise(u16_at(noise), start >> 8, (end - start + 255) >> 8, seed)
        if group == 256:
            _encode_groups(values, kind, start, groups, 256, levels, shift, noise, codes, work, capacity)
        elif group == 128:
            _encode_groups(values, kind, start, groups, 128, levels, shift, noise, codes, work, capacity)
        elif group == 64:
            _encode_groups(values, kind, start, groups, 64, levels, shift, noise, codes, work, capacity)
        else:
            _encode_unusual(values, kind, start, groups, group, levels, shift, noise, codes, work, capacity)
        unusable += _write_headers(pages, page_shift, start // group, groups, work, capacity)
        done = groups * group
        if start + done < end:
            rest = noise + 2 * done if noise != 0 else noise
            _encode_unusual(
                values, kind, start + done, I64(1), end - start - done, levels, shift, rest, codes + done, work,
                capacity,
            )  # fmt: skip
            unusable += _write_headers(pages, page_shift, start // group + groups, 1, work, capacity)
        blocks = (end - start + 255) >> 8
        padding = u8_at(codes)
        for i in range(end - start, 256 * blocks):
            padding[i] = U8(0)
        for block in range(blocks):
            pack_block(u8_at(codes + 256 * block), (start >> 8) + block, planes, pages, starts, page_shift)
    return unusable


@njit(**INLINE)
def _bound(words, first, count, infinity, magnitude):
    """Replaces infinities by the largest number of their sign, whose bits lie just below."""
    for i in range(count):
        word = words[first + i]
        words[first + i] = word - 1 if word & magnitude == infinity else word


@njit(**INLINE)
def _keep_finite(count, slope, offset, kind, out, first):
    """Bounds a group whose line may leave its type's range: codes are 0 at the least and 255 at the most."""
    limit = F32(65504.0) if kind == FLOAT16 else F32(2.0**127)
    if -limit < offset and offset + slope * F32(255.0) < limit:
        return
    if kind == FLOAT32:
        _bound(u32_at(out), first, count, U32(0x7F800000), U32(0x7FFFFFFF))
    else:
        _bound(u16_at(out), first, count, U16(0x7C00) if kind == FLOAT16 else U16(0x7F80), U16(0x7FFF))


@njit(**INLINE)
def _decode_groups(codes, kind, groups, group, pages, page_shift, header, work, capacity, out, first):
    """Decodes `groups` groups of `group` elements, whose headers begin at `header`, to element `first` on of `out`.

    `work` has 4 rows of `capacity` numbers of 32 bits.
    """
    row = 4 * capacity
    mean, slope, totals, squares = f32_at(work), f32_at(work + row), i32_at(work + 2 * row), i32_at(work + 3 * row)
    for index in range(groups):
        totals[index], squares[index] = _code_sums(u8_at(codes + index * group), group)
        mean_at, deviation_at = header_addresses(pages, page_shift, header + index)
        mean[index] = f32_at(mean_at)[0]
        slope[index] = float_of(I32(I32(u16_at(deviation_at)[0]) << I32(DEVIATION_SHIFT)))
    _lines(groups, group, totals, squares, mean, slope)
    for index in range(groups):
        _dequantize(u8_at(codes + index * group), group, slope[index], mean[index], kind, out, first + index * group)
        _keep_finite(group, slope[index], mean[index], kind, out, first + index * group)


@njit(**INSIDE)
def decode_planes(out, kind, first, stop, group, tile, planes, pages, starts, page_shift, codes, work):
    """Decodes elements [first, stop) to address `out`; the arguments are those of `encode_planes`.

    `planes` may be fewer than were encoded, down to 0: group means. `work` has 16 * (tile // group) bytes.
    """
    capacity = tile // group
    size = 4 if kind == FLOAT32 else 2
    for start in range(first, stop, tile):
        end = min(start + tile, stop)
        for block in range((end - start + 255) >> 8):
            prefetch_to_write(out + size * (start + 256 * block), size * 256)
            unpack_block(codes + 256 * block, (start >> 8) + block, planes, pages, starts, page_shift)
        groups, header = (end - start) // group, start // group
        if group == 256:
            _decode_groups(codes, kind, groups, 256, pages, page_shift, header, work, capacity, out, start)
        elif group == 128:
            _decode_groups(codes, kind, groups, 128, pages, page_shift, header, work, capacity, out, start)
        elif group == 64:
            _decode_groups(codes, kind, groups, 64, pages, page_shift, header, work, capacity, out, start)
        else:
            _decode_groups(codes, kind, groups, group, pages, page_shift, header, work, capacity, out, start)
        done = groups * group
        if start + done < end:
            _decode_groups(
                codes + done, kind, 1, end - start - done, pages, page_shift, header + groups, work, capacity,
                out, start + done,
            )  # fmt: skip
