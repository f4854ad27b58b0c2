"""Numba kernels for two-valued tensors and for tensors whose memory has holes, for CPUs."""

from numba import njit

from daf_kernels.cpu.bits import (
    I16,
    I32,
    I64,
    INLINE,
    INSIDE,
    U8,
    U64,
    address,
    i16_at,
    i32_at,
    pack_bit,
    prefetch_to_write,
    u8_at,
    u16_at,
    u32_at,
    u64_at,
    unpack_bit,
)
from daf_kernels.cpu.compile_cache import kernel
from daf_kernels.layout import BLOCK


@njit(**INLINE)
def _flag_block(values, first, count, zero, one, flags):
    """Writes ``value == one`` for `count` values; returns how many are neither `zero` nor `one`."""
    strangers = I64(0)
    for i in range(count):
        value = U64(values[first + i])
        flags[i] = U8(value == one)
        strangers += I64((value != one) & (value != zero))
    return strangers


@njit(**INLINE)
def _flag(values, size, first, count, zero, one, flags):
    if size == 1:
        return _flag_block(u8_at(values), first, count, zero, one, flags)
    if size == 2:
        return _flag_block(u16_at(values), first, count, zero, one, flags)
    if size == 4:
        return _flag_block(u32_at(values), first, count, zero, one, flags)
    return _flag_block(u64_at(values), first, count, zero, one, flags)


@njit(**INLINE)
def _second(values, count):
    for i in range(count):
        if values[i] != values[0]:
            return U64(values[i])
    return U64(values[0])


@kernel
def probe(values, size, count, scratch) -> tuple[int, int, int]:
    """Looks for the two values of a mask.

    Args:
        values: Address of the elements.
        size: Bytes of an element: 1, 2, 4 or 8.
        count: Number of elements, at least 1.
        scratch: Address of 256 bytes.

    Returns:
        The bits of the first value and of the first that differs (the same where all are equal), and how many of the
        first 256 are neither.
    """
    if size == 1:
        first, second = U64(u8_at(values)[0]), _second(u8_at(values), count)
    elif size == 2:
        first, second = U64(u16_at(values)[0]), _second(u16_at(values), count)
    elif size == 4:
        first, second = U64(u32_at(values)[0]), _second(u32_at(values), count)
    else:
        first, second = U64(u64_at(values)[0]), _second(u64_at(values), count)
    return first, second, _flag(values, size, 0, min(count, BLOCK), first, second, u8_at(scratch))


@njit(**INSIDE)
def encode_mask(values, size, zero, one, first, stop, pages, page_shift, scratch):
    """Packs elements [first, stop) at one bit each: 1 where the value is `one`.

    Args:
        values: Address of the elements.
        size: Bytes of an element: 1, 2, 4 or 8.
        zero: Bits of the one value, zero-extended to 64.
        one: Bits of the other.
        first: First element, a multiple of 256.
        stop: End of the elements.
        pages: int64 array of page addresses.
        page_shift: Binary logarithm of the page size.
        scratch: Address of 256 bytes.

    Returns:
        0, or how many other values the first block held that was not of these two; the rest was not written then.
    """
    flags = u8_at(scratch)
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        strangers = _flag(values, size, start, count, zero, one, flags)
        if strangers:
            return strangers
        for i in range(count, BLOCK):
            flags[i] = U8(0)
        pack_bit(flags, U8(0), u8_at(address(pages, 0, start >> 3, page_shift)))
    return I64(0)


@njit(**INSIDE)
def decode_mask(out, size, zero, one, first, stop, pages, page_shift, scratch):
    """Writes `zero` or `one` for elements [first, stop) to address `out`; arguments as in `encode_mask`."""
    flags, words = u8_at(scratch), u64_at(scratch)
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        prefetch_to_write(out + size * (start + BLOCK), size * BLOCK)
        for word in range(BLOCK // 8):
            words[word] = U64(0)
        unpack_bit(u64_at(address(pages, 0, start >> 3, page_shift)), U64(0), words)
        if size == 1:
            bytes_out = u8_at(out)
            for i in range(count):
                bytes_out[start + i] = one if flags[i] else zero
        elif size == 2:
            halves = u16_at(out)
            for i in range(count):
                halves[start + i] = one if flags[i] else zero
        elif size == 4:
            floats = u32_at(out)
            for i in range(count):
                floats[start + i] = one if flags[i] else zero
        else:
            doubles = u64_at(out)
            for i in range(count):
                doubles[start + i] = one if flags[i] else zero


@njit(**INLINE)
def _flag_nonzero(values, first, count, magnitude, flags):
    for i in range(count):
        flags[i] = U8(U64(values[first + i]) & magnitude != 0)


@njit(**INSIDE)
def encode_nonzero(values, size, first, stop, pages, page_shift, scratch):
    """Packs where floats differ from 0.0 and -0.0, at one bit each; arguments as in `encode_mask`, `size` 2 or 4."""
    flags = u8_at(scratch)
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        if size == 4:
            _flag_nonzero(u32_at(values), start, count, U64(0x7FFFFFFF), flags)
        else:
            _flag_nonzero(u16_at(values), start, count, U64(0x7FFF), flags)
        for i in range(count, BLOCK):
            flags[i] = U8(0)
        pack_bit(flags, U8(0), u8_at(address(pages, 0, start >> 3, page_shift)))


@njit(**INLINE)
def _rectify(values, first, count, least, flags):
    """Makes flagged values positive and the others 0; positive floats are ordered as their bits are."""
    for i in range(count):
        value = values[first + i]
        positive = value if value > least else least
        values[first + i] = positive if flags[i] else least - least


@njit(**INSIDE)
def rectify(out, size, least, first, stop, pages, page_shift, scratch):
    """Sets what `encode_nonzero` saw as 0 to 0, and makes everything else positive.

    Args:
        out: Address of the floats.
        size: Bytes of a float, 2 or 4.
        least: Bits of the smallest value a positive one may take.
        first: First element, a multiple of 256.
        stop: End of the elements.
        pages: int64 array of page addresses.
        page_shift: Binary logarithm of the page size.
        scratch: Address of 256 bytes.
    """
    flags, words = u8_at(scratch), u64_at(scratch)
    for start in range(first, stop, BLOCK):
        count = min(BLOCK, stop - start)
        for word in range(BLOCK // 8):
            words[word] = U64(0)
        unpack_bit(u64_at(address(pages, 0, start >> 3, page_shift)), U64(0), words)
        if size == 4:
            _rectify(i32_at(out), start, count, I32(least), flags)
        else:
            _rectify(i16_at(out), start, count, I16(least), flags)


@njit(**INLINE)
def _copy_run(source, source_first, source_step, target, target_first, target_step, count):
    for i in range(count):
        target[target_first + i * target_step] = source[source_first + i * source_step]


@njit(**INLINE)
def _copy(source, source_first, source_step, target, target_first, target_step, count, size):
    if size == 4:
        _copy_run(u32_at(source), source_first, source_step, u32_at(target), target_first, target_step, count)
    elif size == 2:
        _copy_run(u16_at(source), source_first, source_step, u16_at(target), target_first, target_step, count)
    elif size == 8:
        _copy_run(u64_at(source), source_first, source_step, u64_at(target), target_first, target_step, count)
    else:
        _copy_run(u8_at(source), source_first, source_step, u8_at(target), target_first, target_step, count)


@kernel
def copy_strided(strided, shape, strides, size, first, stop, dense, into_dense):
    """Copies elements [first, stop), in row-major order, between a strided tensor and a dense buffer.

    Args:
        strided: Address of the strided tensor's first element.
        shape: int64 array.
        strides: int64 array, in elements.
        size: Bytes of an element: 1, 2, 4 or 8.
        first: First element.
        stop: End of the elements.
        dense: Address of the dense buffer, which holds element `first` at its start.
        into_dense: True to read the strided tensor, False to write it.
    """
    inner, step = shape[-1], strides[-1]
    done = first
    while done < stop:
        outer, column = done // inner, done % inner
        position = column * step
        for axis in range(shape.shape[0] - 2, -1, -1):
            position += (outer % shape[axis]) * strides[axis]
            outer //= shape[axis]
        run = min(inner - column, stop - done)
        if into_dense:
            _copy(strided, position, step, dense, done - first, 1, run, size)
        else:
            _copy(dense, done - first, 1, strided, position, step, run, size)
        done += run
