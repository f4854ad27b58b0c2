"""The layout's arithmetic, and that the reference puts every bit where the layout says."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf_kernels import PRECISIONS, PlaneLayout, mask_pages, plane_layout, planes_for
from daf_kernels.cpu import bits as cpu_bits
from daf_kernels.layout import BLOCK, HEADER_BYTES, MAX_GROUP, PLANE_WIDTHS, SHARED_ROW, bit_of, group_size
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import flags, normal

ELEMENTS = st.integers(1, 1 << 34)
ROWS = st.integers(1, 1 << 16)
PAGE_SIZES = st.integers(7, 21).map(lambda shift: 1 << shift)


@given(row=ROWS)
def test_groups_are_whole_rows_or_equal_pieces(row: int) -> None:
    """256 elements at most; a longer row is cut into the fewest equal pieces of 64 or more, where there are any."""
    size = group_size(row)
    pieces = [piece for piece in range(64, MAX_GROUP + 1) if row % piece == 0]
    if row <= SHARED_ROW:
        assert size % row == 0
        assert MAX_GROUP - row < size <= MAX_GROUP
    elif row <= MAX_GROUP:
        assert size == row
    else:
        assert size == max(pieces, default=MAX_GROUP)


@pytest.mark.parametrize(
    ("row", "size"),
    [(1, 256), (8, 256), (31, 248), (32, 256), (50, 250), (64, 256), (65, 65), (79, 79), (256, 256), (257, 256),
     (300, 150), (768, 256), (1000, 250), (3072, 256), (127 * 3, 127), (2 * 251, 251), (4 * 63, 252), (61 * 61, 256)],
)  # fmt: skip
def test_group_sizes_by_example(row: int, size: int) -> None:
    assert group_size(row) == size


@pytest.mark.parametrize("row", [0, -1])
def test_a_row_has_an_element(row: int) -> None:
    with pytest.raises(ValueError, match=f"at least one element, got {row}"):
        group_size(row)


def test_planes_for_every_precision_and_no_other() -> None:
    """A precision is the sum of the leading plane widths."""
    assert [planes_for(precision) for precision in PRECISIONS] == [1, 2, 3, 4]
    assert [sum(PLANE_WIDTHS[: planes_for(precision)]) for precision in PRECISIONS] == list(PRECISIONS)
    with pytest.raises(ValueError, match="not in"):
        planes_for(3)


@given(elements=ELEMENTS, row=ROWS, page_bytes=PAGE_SIZES)
def test_pages_hold_what_they_must_and_no_page_is_spare(elements: int, row: int, page_bytes: int) -> None:
    """The page list is the header, then the planes; each of them fills its pages but for the last."""
    layout = PlaneLayout(elements, group_size(row), page_bytes)
    assert (layout.groups - 1) * layout.group < elements <= layout.groups * layout.group
    assert (layout.blocks - 1) * BLOCK < elements <= layout.blocks * BLOCK
    assert layout.headers_per_page * HEADER_BYTES <= page_bytes
    assert (layout.header_pages - 1) * layout.headers_per_page < layout.groups
    assert layout.groups <= layout.header_pages * layout.headers_per_page
    assert layout.pages(0) == layout.plane_start(0) == layout.header_pages
    for plane, width in enumerate(PLANE_WIDTHS):
        size = layout.blocks * BLOCK * width // 8
        assert (layout.plane_pages(plane) - 1) * page_bytes < size <= layout.plane_pages(plane) * page_bytes
        assert layout.pages(plane + 1) == layout.plane_start(plane) + layout.plane_pages(plane)
    assert mask_pages(elements, page_bytes) == layout.plane_pages(0)


@given(row=ROWS, elements=ELEMENTS)
def test_tiles_end_groups_and_blocks(row: int, elements: int) -> None:
    """Work that is split at multiples of the tile shares neither a header nor a byte of a plane."""
    layout = plane_layout(elements, row, 4096)
    assert layout.tile % layout.group == 0
    assert layout.tile % BLOCK == 0
    assert layout.tile <= layout.group * BLOCK


@given(block=st.integers(0, 1 << 26), plane=st.integers(0, 3), page_bytes=PAGE_SIZES)
def test_blocks_never_straddle_pages(block: int, plane: int, page_bytes: int) -> None:
    places = [bit_of(BLOCK * block + inside, plane)[0] // page_bytes for inside in range(BLOCK)]
    assert len(set(places)) == 1


@pytest.mark.parametrize("plane", range(4))
def test_every_bit_of_a_block_belongs_to_one_element(plane: int) -> None:
    """The elements of two blocks fill the bytes of a plane without a gap, and never leave a byte."""
    width = PLANE_WIDTHS[plane]
    places = [bit_of(element, plane) for element in range(2 * BLOCK)]
    assert all(bit + width <= 8 for _, bit in places)
    assert {8 * byte + bit for byte, bit in places} == set(range(0, 2 * BLOCK * width, width))


def _counting(rows: int, row: int) -> torch.Tensor:
    """Integers from 0 to 255, both of them in every scaling group: at 8 bits they are their own codes."""
    groups = (normal(rows * row // group_size(row), group_size(row)) * 60 + 128).round().clamp(0, 255)
    groups[:, 3], groups[:, -5] = 0, 255
    return groups.view(rows, row)


@pytest.mark.parametrize(("rows", "row"), [(3, 256), (5, 79), (2, 512), (9, 100)])
def test_the_reference_packs_where_bit_of_says(rows: int, row: int) -> None:
    """Every bit of every code lies in its plane's pages, at the byte and bit that the layout's docstring gives."""
    values = _counting(rows, row)
    layout = plane_layout(values.numel(), row, 128)
    pages = reference.encode(values.view(-1), layout, 4)
    position = 8
    for plane, width in enumerate(PLANE_WIDTHS):
        position -= width
        first = layout.plane_start(plane)
        data = pages[first : first + layout.plane_pages(plane)].view(-1).tolist()
        for element, code in enumerate(values.view(-1).int().tolist()):
            byte, bit = bit_of(element, plane)
            assert data[byte] >> bit & (1 << width) - 1 == code >> position & (1 << width) - 1, (plane, element)


def test_masks_are_packed_as_a_plane_of_width_one() -> None:
    ones = flags(1500)
    data = reference.encode_mask(ones, torch.tensor(True), 128).view(-1).tolist()
    for element, one in enumerate(ones.tolist()):
        byte, bit = bit_of(element, 0)
        assert data[byte] >> bit & 1 == one


def test_headers_lie_where_the_layout_says() -> None:
    """A header page holds the means of its groups, then their deviations without sign and lowest 15 bits."""
    values = normal(50, 256)
    layout = plane_layout(values.numel(), 256, 128)
    pages = reference.encode(values.view(-1), layout, 1)
    means, deviations = reference.read_header(pages[: layout.header_pages], layout)
    for group in range(layout.groups):
        page, slot = divmod(group, 128 // 6)
        data = bytes(pages[page].tolist())
        (stored,) = struct.unpack_from("<H", data, 4 * (128 // 6) + 2 * slot)
        assert struct.unpack_from("<f", data, 4 * slot) == (means[group].item(),)
        assert struct.unpack("<f", struct.pack("<I", stored << 15)) == (deviations[group].item(),)
    torch.testing.assert_close(means, values.mean(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(deviations, values.std(1, correction=0), atol=0, rtol=5e-3)


@pytest.mark.parametrize(
    ("deviation", "stored"),
    [
        pytest.param(1.0, 0x7F00, id="exact"),
        pytest.param(1.0 + 2**-8, 0x7F01, id="last bit"),
        pytest.param(1.0 + 2**-9, 0x7F00, id="tie to even below"),
        pytest.param(1.0 + 3 * 2**-9, 0x7F02, id="tie to even above"),
        pytest.param(1.0 + 2**-9 + 2**-23, 0x7F01, id="just above a tie"),
        pytest.param(1.0 + 3 * 2**-9 - 2**-23, 0x7F01, id="just below a tie"),
        pytest.param(2.0 - 2**-20, 0x8000, id="carry into the exponent"),
        pytest.param(2.0**-134, 1, id="smallest"),
        pytest.param(2.0**-135, 0, id="too small"),
        pytest.param(0.0, 0, id="zero"),
        pytest.param(-1.0, 0x7F00, id="sign dropped"),
        pytest.param(math.nan, 0xFF80, id="nan"),
    ],
)
def test_deviations_round_to_nearest_even(deviation: float, stored: int) -> None:
    """In every backend: a deviation half way between two is rare enough for random numbers never to meet it."""
    assert reference._deviation_bits(torch.tensor([deviation])).item() == stored
    assert cpu_bits.deviation_bits(np.float32(deviation)) == stored


def test_bytes_that_hold_nothing_are_zero() -> None:
    """The reference fills whole pages, so that the same tensor gives the same pages."""
    layout = plane_layout(300, 300, 4096)
    pages = reference.encode(normal(300), layout, 4, (1, 2, 3, 4))
    assert not pages[0, 4 * 2 : 4 * layout.headers_per_page].any()
    assert not pages[1, 2 * 32 :].any()
    assert not pages[4, 2 * 128 :].any()
