"""The unified layout in plain integers: which bit of which byte of which page holds which element.

Every backend (torch reference, numba, Triton) writes and reads exactly this layout, so bytes packed by one can be
unpacked by any other.

Elements are taken in storage order and seen in *packing blocks* of 256: 8 rows x 32 columns, element ``32 * row +
column``. Each element has a code of up to 8 bits, left-aligned in a byte: at precision 4 the code occupies the upper
four bits and the lower four are zero. The code byte is cut into *planes*, most significant first::

    bit of the code byte   7    6    5 4    3 2 1 0
    plane                  0    1     2        3
    width                  1    1     2        4

In a plane of width ``w``, lane ``c`` (``8 * w`` bits, little endian) holds the ``w`` bits of the 8 elements of column
``c``, row ``r`` at bits ``[w * r, w * r + w)``: ``32 * w`` bytes a block. Planes of a block never straddle a page.

The quantization scale belongs to *scaling groups*: runs of ``group_size`` elements in storage order. Each has a header
of 6 bytes: its mean (float32) and its standard deviation (see `DEVIATION_SHIFT`). A header page of ``P`` bytes holds
``P // 6`` headers, first all their means, then all their deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

ROWS = 8
COLUMNS = 32
BLOCK = ROWS * COLUMNS
"""Elements in a packing block."""

PLANE_WIDTHS = (1, 1, 2, 4)
"""Bits per element of each plane, most significant plane first."""

PRECISIONS = (1, 2, 4, 8)
"""Code bits per element that can be stored: the sums of the leading plane widths."""

MAX_GROUP = 256
"""Largest scaling group: n * 4095**2 must fit in 32 unsigned bits for the moments to be exact integers."""

SHARED_ROW = 64
"""Rows up to this length share a scaling group: a header for each would take 0.75 bits an element and more. Queries,
keys and values have rows of a head, 32 or 64 elements. With a group for each, MiniLM's adapters had an error of .59 and
.71 in 1/20 of the bytes, with shared ones .57 and .63; in 1/10 it was .16 to .17 both ways."""

SAMPLED_GROUPS = 16
"""Groups that are looked at to rank an activation: 4,096 elements, some microseconds."""

LARGEST_SPREAD = 2.0**124
"""From this range on a group is not encoded. The line that gives codes their deviation overshoots the range by up to a
factor of 8, which stays within float32 below this."""

LARGEST_SPREAD_RATIO = 16
"""Between rows that share a scaling group and are normalized: at 4 bits an error is 1/30 of the group's spread, and
where a row spreads 1/16 of that, half of what its normalization returns. A token of zeros, such as a new class token,
returns noise alone."""

CLIPPED_PRECISION = 2
"""Codes of so many bits or fewer, rounded to nearest, may clip a group's tails: few steps between the extremes leave
most values of a normal distribution to two of four codes. The relative error of MiniLM's queries, keys and values at 2
bits falls from .40 to .51 to .34 to .38; with 4 bits or more clipping would cost more than it gains."""

CLIP = 1.5
"""Deviations from the mean to the outermost codes: with four codes close to the best for a normal distribution (Max,
"Quantizing for minimum distortion", 1960)."""

LARGEST_CLIPPED = 10.0
LEAST_TAIL = 1.2
"""Groups are clipped whose spread is less than the former and whose tails are longer than the latter, in deviations.
Others are skewed or have outliers that matter, such as probabilities and inputs of normalizations."""

HEADER_BYTES = 6
DEVIATION_SHIFT = 15
"""A deviation is a float32 without its sign and its lowest 15 fraction bits: 8 exponent and 8 fraction bits, rounded
to nearest even. The sign is not needed, and 2**-9 of relative rounding is far below the error of 8-bit codes."""


def planes_for(precision: int) -> int:
    """Returns how many leading planes hold a code of `precision` bits; 0 bits are no plane."""
    return PRECISIONS.index(precision) + 1 if precision else 0


def group_size(row: int) -> int:
    """Returns the scaling group for rows of `row` elements: whole rows or equal pieces of a row, 256 at most.

    A row of up to 256 elements is one group. A longer row is cut into the fewest equal pieces of at most 256; where its
    length has no divisor of at least 64 that fits, groups of 256 run through the rows. Rows of up to
    `SHARED_ROW` elements share a group, as many whole rows as fit.
    """
    if row < 1:
        raise ValueError(f"a row has at least one element, got {row}")
    if row <= SHARED_ROW:
        return row * (MAX_GROUP // row)
    fewest = math.ceil(row / MAX_GROUP)
    sizes = (row // pieces for pieces in range(fewest, row // 64 + 1) if row % pieces == 0)
    return row if row <= MAX_GROUP else next(sizes, MAX_GROUP)


def shares_groups(row: int) -> bool:
    """Says whether rows of so many elements share scaling groups."""
    return row % group_size(row) != 0


def bit_of(element: int, plane: int) -> tuple[int, int]:
    """Returns (byte, lowest bit) of an element inside a plane, counted from the plane's first byte."""
    width = PLANE_WIDTHS[plane]
    block, inside = divmod(element, BLOCK)
    row, column = divmod(inside, COLUMNS)
    byte, bit = divmod(width * row, 8)
    return (block * COLUMNS + column) * width + byte, bit


@dataclass(frozen=True)
class PlaneLayout:
    """Where the header and the planes of one activation lie in a list of pages.

    The page list is the header's pages, then plane 0's, plane 1's, and so on; lowering the precision is cutting its
    tail off.

    Attributes:
        elements: Number of elements.
        group: Elements in a scaling group; the last group may be shorter. 0 where codes stand for themselves: there are
            no groups, and one header page with nothing in it is left when all planes are gone.
        page_bytes: Bytes in a page, a power of two and at least 128 (a block of the widest plane).
    """

    elements: int
    group: int
    page_bytes: int

    @property
    def blocks(self) -> int:
        """Packing blocks; the last may be padded with code 0."""
        return -(-self.elements // BLOCK)

    @property
    def groups(self) -> int:
        """Scaling groups."""
        return -(-self.elements // self.group) if self.group else 0

    @property
    def tile(self) -> int:
        """Smallest number of elements that ends both a group and a block: the unit in which work is split."""
        return math.lcm(self.group or BLOCK, BLOCK)

    @property
    def headers_per_page(self) -> int:
        """Headers in one header page."""
        return self.page_bytes // HEADER_BYTES

    @property
    def header_pages(self) -> int:
        """Pages of the header."""
        return -(-self.groups // self.headers_per_page) if self.group else 1

    def plane_pages(self, plane: int) -> int:
        """Returns the pages of one plane."""
        return -(-self.blocks * COLUMNS * PLANE_WIDTHS[plane] // self.page_bytes)

    def pages(self, planes: int) -> int:
        """Returns the pages of the header and the first `planes` planes."""
        return self.header_pages + sum(self.plane_pages(plane) for plane in range(planes))

    def plane_start(self, plane: int) -> int:
        """Returns the index of a plane's first page in the page list."""
        return self.pages(plane)


@lru_cache(maxsize=4096)
def plane_layout(elements: int, row: int, page_bytes: int) -> PlaneLayout:
    """Returns the layout of `elements` elements in rows of `row`, or without groups where that is 0.

    Cached, since shapes repeat every step.
    """
    return PlaneLayout(elements, group_size(row) if row else 0, page_bytes)


def sampled_groups(layout: PlaneLayout) -> tuple[int, int, int]:
    """Returns the groups that stand for all when a range is estimated: how many, their distance and their size.

    Up to `SAMPLED_GROUPS` whole groups, evenly spread from the first; the only group where it is not whole.
    """
    whole = layout.elements // layout.group
    count = min(max(whole, 1), SAMPLED_GROUPS)
    return count, max(whole // count, 1), min(layout.group, layout.elements)


def mask_pages(elements: int, page_bytes: int) -> int:
    """Returns the pages of a bit mask: one plane of width 1 and no header."""
    return PlaneLayout(elements, BLOCK, page_bytes).plane_pages(0)
