"""How Triton kernels find the elements of an activation, and its planes and headers on their pages.

A program works on whole packing blocks, as few as fit in a page at the widest plane, and begins at a multiple of them:
what it reads or writes of a plane lies in one page, at an address that vectors may be used at.
"""

import triton
import triton.language as tl

from daf_kernels.layout import PLANE_WIDTHS, PRECISIONS

WIDTHS = tl.constexpr(PLANE_WIDTHS)
BITS = tl.constexpr((0, *PRECISIONS))


@triton.jit
def own_blocks(elements, first_program, BLOCKS: tl.constexpr):
    """Which blocks a program works on.

    Args:
        elements: How many there are.
        first_program: Number of the launch's first program.
        BLOCKS: Blocks of a program.

    Returns:
        The blocks before them, the elements from the first of them on (as many as they hold at most), the numbers of
        their lanes, of shape (blocks, 32), and of the elements of their first row.
    """
    before = (tl.program_id(0).to(tl.int64) + first_program) * BLOCKS
    left = tl.minimum(elements - before * 256, BLOCKS * 256).to(tl.int32)
    block, column = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 32)[None, :]
    return before, left, block * 32 + column, block * 256 + column


@triton.jit
def load_rows(values, before, first, left, MASKED: tl.constexpr):
    """The 8 rows of a program's blocks; 0 beyond the last element."""
    own, rows = values + before * 256, ()
    for row in tl.static_range(8):
        if MASKED:
            rows = rows + (tl.load(own + first + row * 32, mask=first + row * 32 < left, other=0.0),)
        else:
            rows = rows + (tl.load(own + first + row * 32),)
    return rows


@triton.jit
def store_row(out, before, first, left, row: tl.constexpr, value, MASKED: tl.constexpr):
    """Writes a row of a program's blocks."""
    own = out + before * 256
    if MASKED:
        tl.store(own + first + row * 32, value, mask=first + row * 32 < left)
    else:
        tl.store(own + first + row * 32, value)


@triton.jit
def lane_pointer(table, start, blocks_before, columns, width: tl.constexpr, SHIFT: tl.constexpr):
    """Pointers to the lanes of a program's blocks in a plane, of type uint8, uint16 or uint32.

    Args:
        table: Addresses of the activation's pages.
        start: Index of the plane's first page.
        blocks_before: Blocks before the program's.
        columns: Numbers of the lanes within the program.
        width: Bits an element of the plane.
        SHIFT: Binary logarithm of the page size.
    """
    byte = blocks_before * (32 * width)
    address = tl.load(table + start + (byte >> SHIFT)) + (byte & ((1 << SHIFT) - 1))
    if width == 1:
        lanes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    elif width == 2:
        lanes = tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), 16)
    else:
        lanes = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    return lanes + columns


@triton.jit
def header_addresses(table, group, exists, PER_PAGE: tl.constexpr):
    """Addresses of the means and deviations of groups."""
    page = group // PER_PAGE
    slot = group - page * PER_PAGE
    address = tl.load(table + page, mask=exists, other=0)
    return address + 4 * slot, address + 4 * PER_PAGE + 2 * slot


@triton.jit
def _gather_bits(word):
    """Bits 0, 4, 8 and so on of a word, side by side."""
    word = word & 0x11111111
    word = (word | (word >> 3)) & 0x03030303
    word = (word | (word >> 6)) & 0x000F000F
    return (word | (word >> 12)) & 0xFF


@triton.jit
def _spread_bits(bits):
    """The opposite of `_gather_bits`."""
    bits = (bits | (bits << 12)) & 0x000F000F
    bits = (bits | (bits << 6)) & 0x03030303
    return (bits | (bits << 3)) & 0x11111111


@triton.jit
def _gather_pairs(word):
    """Bits 0 and 1, 4 and 5, and so on of a word, side by side."""
    word = word & 0x33333333
    word = (word | (word >> 2)) & 0x0F0F0F0F
    word = (word | (word >> 4)) & 0x00FF00FF
    return (word | (word >> 8)) & 0xFFFF


@triton.jit
def _spread_pairs(pairs):
    """The opposite of `_gather_pairs`."""
    pairs = (pairs | (pairs << 8)) & 0x00FF00FF
    pairs = (pairs | (pairs << 4)) & 0x0F0F0F0F
    return (pairs | (pairs << 2)) & 0x33333333


@triton.jit
def lanes_of(high, low):
    """The lanes of all planes, from words of the high and the low four bits of 8 codes.

    Taking a word of 8 codes apart costs 3 instructions an element, taking each code apart 6.
    """
    return _gather_bits(high >> 3), _gather_bits(high >> 2), _gather_pairs(high), low


@triton.jit
def words_of(lanes, PLANES: tl.constexpr):
    """The opposite of `lanes_of`; what missing planes would hold is 0."""
    high = lanes[0] & 0
    low = high
    if PLANES > 0:
        high |= _spread_bits(lanes[0]) << 3
    if PLANES > 1:
        high |= _spread_bits(lanes[1]) << 2
    if PLANES > 2:
        high |= _spread_pairs(lanes[2])
    if PLANES > 3:
        low = lanes[3]
    return high, low


@triton.jit
def code_in_words(high, low, row: tl.constexpr, PLANES: tl.constexpr):
    """The left-aligned code of a row."""
    if row > 0:
        code = (high >> (4 * row - 4)) & 0xF0
    else:
        code = (high << 4) & 0xF0
    if PLANES > 3:
        code |= (low >> (4 * row)) & 15
    return code


@triton.jit
def store_lanes(
    lanes,
    table,
    starts,
    blocks_before,
    columns,
    left,
    PLANES: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes lanes to the pages of their planes."""
    for plane in tl.static_range(PLANES):
        pointer = lane_pointer(table, starts[plane], blocks_before, columns, WIDTHS[plane], SHIFT)
        if MASKED:
            tl.store(pointer, lanes[plane].to(pointer.dtype.element_ty), mask=columns // 32 * 256 < left)
        else:
            tl.store(pointer, lanes[plane].to(pointer.dtype.element_ty))


@triton.jit
def load_lanes(
    table, starts, blocks_before, columns, left, PLANES: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr
):
    """Reads lanes from the pages of their planes; those of planes that are missing are zero."""
    lanes = ()
    for plane in tl.static_range(4):
        if plane < PLANES:
            pointer = lane_pointer(table, starts[plane], blocks_before, columns, WIDTHS[plane], SHIFT)
            if MASKED:
                lanes = lanes + (tl.load(pointer, mask=columns // 32 * 256 < left, other=0).to(tl.uint32),)
            else:
                lanes = lanes + (tl.load(pointer).to(tl.uint32),)
        else:
            lanes = lanes + (tl.zeros(columns.shape, tl.uint32),)
    return lanes


@triton.jit
def code_byte(table, start, before, element, there, plane: tl.constexpr, SHIFT: tl.constexpr):
    """What one plane holds of the codes of elements, left-aligned in a byte; elements may lie anywhere.

    Args:
        table: Addresses of the activation's pages.
        start: Index of the plane's first page.
        before: Elements before those that are counted.
        element: Numbers of elements counted from there, in 32 bits: with 64 it takes twice the instructions.
        there: Which of them exist.
        plane: Which plane.
        SHIFT: Binary logarithm of the page size.
    """
    width: tl.constexpr = WIDTHS[plane]
    first = (before >> 8) * (32 * width)
    element += (before & 255).to(tl.int32)
    bit = ((element >> 5) & 7) * width
    byte = (first & ((1 << SHIFT) - 1)).to(tl.int32) + ((element >> 8) * 32 + (element & 31)) * width + (bit >> 3)
    page = tl.load(table + start + (first >> SHIFT) + (byte >> SHIFT), mask=there, other=0)
    address = (page + (byte & ((1 << SHIFT) - 1))).to(tl.pointer_type(tl.uint8))
    stored = tl.load(address, mask=there, other=0).to(tl.uint32)
    return ((stored >> (bit & 7).to(tl.uint32)) & ((1 << width) - 1)) << (8 - BITS[plane + 1])
