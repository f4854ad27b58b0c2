"""Pointers, casts and bit packing that the numba kernels share."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from daf_kernels.layout import COLUMNS, DEVIATION_SHIFT, HEADER_BYTES

F32, I16, I32, I64 = np.float32, np.int16, np.int32, np.int64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

MAGIC = F32(12582912.0)  # 1.5 * 2**23: adding it rounds to nearest even and leaves the integer in the low bits

INLINE = {"error_model": "numpy", "forceinline": True}
INSIDE = {"error_model": "numpy", "inline": "always"}
"""For functions that one job alone calls: compiled as a part of it, and not on their own before, which took a quarter
of the time that compiling takes."""


def _convert(result, argument, build):
    """Makes the (signature, code generator) pair of an intrinsic of one argument."""
    return result(argument), lambda _context, builder, _signature, args: build(builder, args[0])


@intrinsic
def bits_of(_typing, value):
    """float32 -> the int32 of the same bits."""
    return _convert(types.int32, types.float32, lambda builder, arg: builder.bitcast(arg, ir.IntType(32)))


@intrinsic
def float_of(_typing, bits):
    """int32 -> the float32 of the same bits."""
    return _convert(types.float32, types.int32, lambda builder, arg: builder.bitcast(arg, ir.FloatType()))


@intrinsic
def widen_half(_typing, bits):
    """Bits of a float16 -> float32."""

    def build(builder, arg):
        return builder.fpext(builder.bitcast(arg, ir.HalfType()), ir.FloatType())

    return _convert(types.float32, types.uint16, build)


@intrinsic
def narrow_half(_typing, value):
    """float32 -> bits of the nearest float16, ties to even."""

    def build(builder, arg):
        return builder.bitcast(builder.fptrunc(arg, ir.HalfType()), ir.IntType(16))

    return _convert(types.uint16, types.float32, build)


def _pointer(element, llvm_element):
    """Makes an intrinsic that turns an address into a pointer to `element`."""

    @intrinsic
    def pointer(_typing, address):
        return _convert(
            types.CPointer(element), types.int64, lambda builder, arg: builder.inttoptr(arg, llvm_element.as_pointer())
        )

    return pointer


u8_at = _pointer(types.uint8, ir.IntType(8))
u16_at = _pointer(types.uint16, ir.IntType(16))
u32_at = _pointer(types.uint32, ir.IntType(32))
u64_at = _pointer(types.uint64, ir.IntType(64))
i64_at = _pointer(types.int64, ir.IntType(64))
i16_at = _pointer(types.int16, ir.IntType(16))
i32_at = _pointer(types.int32, ir.IntType(32))
f32_at = _pointer(types.float32, ir.FloatType())


def _prefetcher(write):
    """Makes an intrinsic that asks for the cache line at an address; any address is harmless."""

    @intrinsic
    def prefetch(_typing, address):
        def build(builder, arg):
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            signature = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
            builder.call(function, [builder.inttoptr(arg, byte), word(write), word(3), word(1)])
            return arg

        return _convert(types.int64, types.int64, build)

    return prefetch


_prefetch_read, _prefetch_write = _prefetcher(0), _prefetcher(1)


@njit(**INLINE)
def prefetch_to_read(address, size):
    """Fetches memory while the tile before it is computed: waiting for it took as long as the work itself."""
    for line in range(0, size, 64):
        _prefetch_read(address + line)


@njit(**INLINE)
def prefetch_to_write(address, size):
    """As `prefetch_to_read`, for memory that is about to be written."""
    for line in range(0, size, 64):
        _prefetch_write(address + line)


@njit(**INLINE)
def address(pages, start, byte, page_shift):
    """Returns the address of a byte of a plane whose first page is `pages[start]`."""
    return pages[start + (byte >> page_shift)] + (byte & ((I64(1) << page_shift) - 1))


@njit(**INLINE)
def header_addresses(pages, page_shift, group):
    """Returns the addresses of a group's mean and deviation."""
    per_page = (I64(1) << page_shift) // HEADER_BYTES
    page, slot = pages[group // per_page], group % per_page
    return page + 4 * slot, page + 4 * per_page + 2 * slot


@njit(**INLINE)
def deviation_bits(deviation):
    """float32 -> the header's 16 bits, rounded to nearest even."""
    bits = bits_of(deviation) & I32(0x7FFFFFFF)
    return U16((bits + I32(0x3FFF) + ((bits >> I32(DEVIATION_SHIFT)) & I32(1))) >> I32(DEVIATION_SHIFT))


@njit(**INLINE)
def pack_bit(codes, bit, lanes):
    """Packs one bit of 256 codes into 32 lanes of 8 bits."""
    for column in range(COLUMNS):
        lane = U8(0)
        for row in range(8):
            lane = U8(lane | U8(U8(U8(codes[32 * row + column] >> bit) & U8(1)) << U8(row)))
        lanes[column] = lane


@njit(**INLINE)
def pack_pair(codes, lanes):
    """Packs bits 5 and 4 of 256 codes into 32 lanes of 16 bits."""
    for column in range(COLUMNS):
        low, high = U8(0), U8(0)
        for row in range(4):
            low = U8(low | U8(U8(U8(codes[32 * row + column] >> U8(4)) & U8(3)) << U8(2 * row)))
            high = U8(high | U8(U8(U8(codes[32 * row + 128 + column] >> U8(4)) & U8(3)) << U8(2 * row)))
        lanes[column] = U16(U16(low) | U16(U16(high) << U16(8)))


@njit(**INLINE)
def pack_nibble(codes, lanes):
    """Packs the low four bits of 256 codes into 32 lanes of 32 bits."""
    for column in range(COLUMNS):
        lane = U32(0)
        for row in range(8):
            lane = U32(lane | U32(U32(codes[32 * row + column] & U8(15)) << U32(4 * row)))
        lanes[column] = lane


@njit(**INLINE)
def unpack_bit(lanes, bit, codes):
    """Adds the bit plane `bit` of a block to its 256 codes; both are seen as words of 64 bits."""
    for row in range(8):
        for column in range(4):
            codes[4 * row + column] |= ((lanes[column] >> U64(row)) & U64(0x0101010101010101)) << bit


@njit(**INLINE)
def unpack_pair(lanes, codes):
    """Adds the plane of bits 5 and 4 of a block to its 256 codes."""
    for column in range(COLUMNS):
        low, high = U8(lanes[column]), U8(lanes[column] >> U16(8))
        for row in range(4):
            codes[32 * row + column] |= U8(U8(U8(low >> U8(2 * row)) & U8(3)) << U8(4))
            codes[128 + 32 * row + column] |= U8(U8(U8(high >> U8(2 * row)) & U8(3)) << U8(4))


@njit(**INLINE)
def unpack_nibble(lanes, codes):
    """Adds the plane of the low four bits of a block to its 256 codes."""
    for column in range(COLUMNS):
        for row in range(8):
            codes[32 * row + column] |= U8(U32(lanes[column] >> U32(4 * row)) & U32(15))


@njit(**INLINE)
def narrow_bfloat16(value):
    """float32 -> bits of the nearest bfloat16, ties to even."""
    bits = bits_of(value)
    rounded = I32(bits + I32(0x7FFF) + I32(I32(bits >> I32(16)) & I32(1)))
    return U16(I32(rounded if value == value else I32(0x7FC00000)) >> I32(16))


@njit(**INLINE)
def pack_block(codes, block, planes, pages, starts, page_shift):
    """Packs the 256 codes of one block into its first `planes` planes."""
    if planes > 0:
        pack_bit(codes, U8(7), u8_at(address(pages, starts[0], 32 * block, page_shift)))
    if planes > 1:
        pack_bit(codes, U8(6), u8_at(address(pages, starts[1], 32 * block, page_shift)))
    if planes > 2:
        pack_pair(codes, u16_at(address(pages, starts[2], 64 * block, page_shift)))
    if planes > 3:
        pack_nibble(codes, u32_at(address(pages, starts[3], 128 * block, page_shift)))


@njit(**INLINE)
def unpack_block(codes, block, planes, pages, starts, page_shift):
    """Reads the 256 left-aligned codes of one block, at address `codes`, from its first `planes` planes."""
    words = u64_at(codes)
    for word in range(32):
        words[word] = U64(0)
    if planes > 0:
        unpack_bit(u64_at(address(pages, starts[0], 32 * block, page_shift)), U64(7), words)
    if planes > 1:
        unpack_bit(u64_at(address(pages, starts[1], 32 * block, page_shift)), U64(6), words)
    if planes > 2:
        unpack_pair(u16_at(address(pages, starts[2], 64 * block, page_shift)), u8_at(codes))
    if planes > 3:
        unpack_nibble(u32_at(address(pages, starts[3], 128 * block, page_shift)), u8_at(codes))
