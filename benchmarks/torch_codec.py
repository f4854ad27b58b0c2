"""The codec in plain torch operations, as one would write it without kernels: what the kernels are measured against.

It gives the bytes of `daf_kernels.reference.codec`, which is slow on purpose, with what makes torch fast: no int64
where 8 or 32 bits do, eight codes in a machine word while they are packed, results written in place, and, if asked to,
work on few enough elements at a time for a cache. Codes are rounded to nearest; stochastic rounding is left out.

Pages are one contiguous tensor here. Kernels write to pages anywhere in memory, which is harder.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from daf_kernels.layout import (
    BLOCK,
    CLIP,
    CLIPPED_PRECISION,
    COLUMNS,
    DEVIATION_SHIFT,
    HEADER_BYTES,
    LARGEST_SPREAD,
    PLANE_WIDTHS,
    PRECISIONS,
    ROWS,
    PlaneLayout,
)
from daf_kernels.reference.codec import MOMENT_STEPS, is_clipped, read_header

CHUNK = 1 << 18
"""Elements that a CPU had better work on at a time: of 2**24 float32 at 4 bits, chunks of 2**16, 2**18 and 2**20 took a
Xeon 229, 128 and 208 ms, and all elements at once 976."""

MAGIC = 1.5 * 2**23
"""A float32 plus this is rounded to nearest even, and its low bits are the integer."""

_WORD_ROWS = COLUMNS // 8
"""64-bit words in a row of a packing block, a byte for each code."""


def encode(values: Tensor, layout: PlaneLayout, planes: int, chunk: int | None = None) -> Tensor:
    """Encodes `values` of shape (elements,) as header and planes, about `chunk` elements at a time or all at once."""
    pages = torch.zeros(layout.pages(planes), layout.page_bytes, dtype=torch.uint8, device=values.device)
    mean, deviation = torch.empty(2, layout.groups, dtype=torch.float32, device=values.device)
    for first, stop in _chunks(layout, chunk):
        groups = slice(first // layout.group, -(-stop // layout.group))
        codes = _quantize(values[first:stop], layout.group, planes, mean[groups], deviation[groups])
        for plane in range(planes):
            target = _plane_bytes(pages, layout, plane, first, stop)
            target.copy_(_pack(codes, plane, PRECISIONS[planes - 1]).view_as(target))
    _write_header(pages[: layout.header_pages], layout, mean, deviation)
    return pages


def decode(pages: Tensor, layout: PlaneLayout, planes: int, out: Tensor, chunk: int | None = None) -> None:
    """Decodes the first `planes` planes into `out`, dense and of shape (elements,)."""
    mean, deviation = read_header(pages[: layout.header_pages], layout)
    for first, stop in _chunks(layout, chunk):
        words = torch.zeros(-(-(stop - first) // BLOCK), ROWS, _WORD_ROWS, dtype=torch.int64, device=out.device)
        for plane in range(planes):
            words |= _unpack(_plane_bytes(pages, layout, plane, first, stop), plane)
        groups = slice(first // layout.group, -(-stop // layout.group))
        codes = words.view(torch.uint8).view(-1)[: stop - first]
        _dequantize(codes, layout.group, mean[groups], deviation[groups], out[first:stop])


def encode_mask(bits: Tensor, zero: int, one: int, page_bytes: int, chunk: int | None = None) -> tuple[Tensor, bool]:
    """Packs where integers of shape (elements,) are `one`; returns pages, and whether all others are `zero`."""
    layout = PlaneLayout(bits.numel(), BLOCK, page_bytes)
    pages = torch.zeros(layout.plane_pages(0), page_bytes, dtype=torch.uint8, device=bits.device)
    known = torch.ones((), dtype=torch.bool, device=bits.device)
    for first, stop in _chunks(layout, chunk):
        part, flags = bits[first:stop], _blocks_of_codes(stop - first, bits.device)
        ones = torch.eq(part, one, out=flags[: stop - first].view(torch.bool))
        known &= (ones | (part == zero)).all()
        _mask_bytes(pages, first, flags.numel()).copy_(_pack(flags, 0, 1).view(-1))
    return pages, bool(known)


def decode_mask(pages: Tensor, zero: int, one: int, out: Tensor, chunk: int | None = None) -> None:
    """Unpacks a mask into the integers `out` of shape (elements,)."""
    layout = PlaneLayout(out.numel(), BLOCK, pages.shape[1])
    values = torch.tensor([zero, one], dtype=out.dtype, device=out.device)
    for first, stop in _chunks(layout, chunk):
        count = -(-(stop - first) // BLOCK) * BLOCK
        flags = _unpack(_mask_bytes(pages, first, count).view(-1, COLUMNS, 1), 0).view(torch.uint8)
        torch.where(flags.view(-1)[: stop - first] != 0, values[1], values[0], out=out[first:stop])


def _chunks(layout: PlaneLayout, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Gives first and stop of runs of whole groups and blocks that are worked on together."""
    step = layout.tile * max(chunk // layout.tile, 1) if chunk else layout.elements
    for first in range(0, layout.elements, step):
        yield first, min(first + step, layout.elements)


def _runs(elements: int, group: int) -> Iterator[tuple[slice, slice, int]]:
    """Gives elements, groups and the size of these groups: all whole ones, then one that is shorter, if there is."""
    count, rest = divmod(elements, group)
    if count:
        yield slice(0, count * group), slice(0, count), group
    if rest:
        yield slice(count * group, elements), slice(count, count + 1), rest


def _blocks_of_codes(elements: int, device: torch.device) -> Tensor:
    """Returns a byte for each element of whole blocks; those beyond the last element are 0."""
    codes = torch.empty(-(-elements // BLOCK) * BLOCK, dtype=torch.uint8, device=device)
    codes[elements:] = 0
    return codes


def _quantize(values: Tensor, group: int, planes: int, mean: Tensor, deviation: Tensor) -> Tensor:
    """Returns the codes of whole blocks, one a byte, and fills in the headers."""
    codes = _blocks_of_codes(values.numel(), values.device)
    for elements, groups, size in _runs(values.numel(), group):
        rows = values[elements].float().view(-1, size)
        _quantize_groups(rows, planes, codes[elements].view(-1, size), mean[groups], deviation[groups])
    return codes


def _quantize_groups(rows: Tensor, planes: int, codes: Tensor, mean: Tensor, deviation: Tensor) -> None:
    """Fills in codes and headers of groups of shape (groups, size)."""
    minimum = rows.amin(1)  # amin and amax take 40 us each of 2**18 elements, aminmax 750
    spread = rows.amax(1) - minimum
    finite = spread < LARGEST_SPREAD
    all_finite = bool(finite.all())
    if not all_finite:
        rows, minimum = rows.where(finite[:, None], 0.0), minimum.where(finite, 0.0)
    factor = torch.full_like(spread, MOMENT_STEPS) / spread
    visible = finite & (factor < torch.inf)
    offsets = rows - minimum[:, None]
    total, squares = _moment_sums(offsets, factor.where(visible, 0.0))
    _moments(rows.shape[1], total, squares, minimum, spread, mean, deviation)
    if planes:
        levels = 2.0 ** PRECISIONS[planes - 1] - 1
        inverse = (torch.full_like(spread, levels) / spread).where(visible, 0.0)
        if PRECISIONS[planes - 1] <= CLIPPED_PRECISION:
            clipped = is_clipped(minimum, spread, mean, deviation) & visible
            low = (mean - CLIP * deviation).where(clipped, minimum)
            inverse = (torch.full_like(spread, levels) / (2 * CLIP * deviation)).where(clipped, inverse)
            codes.copy_(torch.sub(rows, low[:, None], out=offsets).mul_(inverse[:, None]).clamp_(0, levels).round_())
        else:
            codes.copy_(offsets.mul_(inverse[:, None]).round_())
    if not all_finite:
        mean[~finite] = deviation[~finite] = torch.nan


def _moment_sums(offsets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of 12-bit steps and of their squares; up to 2**32, so squares are added up modulo that."""
    steps = (offsets * factor[:, None]).add_(MAGIC).view(torch.int32).bitwise_and_(0xFFF)
    total = steps.sum(1, dtype=torch.int32).long()
    return total, steps.mul_(steps).sum(1, dtype=torch.int32).long() & 0xFFFFFFFF


def _moments(
    count: int, total: Tensor, squares: Tensor, minimum: Tensor, spread: Tensor, mean: Tensor, deviation: Tensor
) -> None:
    scale = torch.full_like(spread, MOMENT_STEPS * count)
    torch.add(minimum, spread * (total.float() / scale), out=mean)
    torch.mul(spread, _root(count * squares - total * total) / scale, out=deviation)


def _dequantize(codes: Tensor, group: int, mean: Tensor, deviation: Tensor, out: Tensor) -> None:
    limit = torch.finfo(out.dtype).max
    for elements, groups, size in _runs(codes.numel(), group):
        # Sums of 256 codes of 8 bits and of their squares are below 2**24: float32 holds them exactly.
        rows = codes[elements].float().view(-1, size)
        total, squares = rows.sum(1), torch.linalg.vecdot(rows, rows)
        spread = size * squares.long() - total.long() ** 2
        slope = (deviation[groups] * (torch.full_like(total, size) / _root(spread))).where(spread > 0, 0.0)
        offset = mean[groups] - slope * (total / torch.full_like(total, size))
        rows.mul_(slope[:, None]).add_(offset[:, None]).clamp_(-limit, limit)
        out[elements] = rows.view(-1)


def _root(square: Tensor) -> Tensor:
    return square.float().double().sqrt().float()


def _repeated(byte: int) -> int:
    """Returns a byte eight times over, as a 64-bit integer with a sign."""
    return int.from_bytes(bytes([byte] * 8), "little", signed=True)


def _plane_bytes(pages: Tensor, layout: PlaneLayout, plane: int, first: int, stop: int) -> Tensor:
    """Returns the part of a plane that holds some blocks, of shape (blocks, 32, width)."""
    width, start = PLANE_WIDTHS[plane], layout.plane_start(plane) * layout.page_bytes
    part = slice(start + first // 8 * width, start + -(-stop // BLOCK) * COLUMNS * width)
    return pages.view(-1)[part].view(-1, COLUMNS, width)


def _mask_bytes(pages: Tensor, first: int, count: int) -> Tensor:
    return pages.view(-1)[first // 8 : (first + count) // 8]


def _pack(codes: Tensor, plane: int, precision: int) -> Tensor:
    """Returns one plane of codes of `precision` bits, of shape (blocks, 32, width)."""
    width = PLANE_WIDTHS[plane]
    shift, mask = precision - sum(PLANE_WIDTHS[: plane + 1]), _repeated(2**width - 1)
    # Words have the same byte of each lane's rows one after the other: eight columns are packed together.
    bits = (codes.view(torch.int64).view(-1, width, ROWS // width, _WORD_ROWS) >> shift) & mask
    packed = bits[:, :, 0]
    for row in range(1, ROWS // width):
        packed |= bits[:, :, row] << (row * width)
    return packed.contiguous().view(torch.uint8).view(-1, width, COLUMNS).transpose(1, 2)


def _unpack(lanes: Tensor, plane: int) -> Tensor:
    """Returns what one plane holds of left-aligned codes, eight in a word of shape (blocks, 8, 4)."""
    width = PLANE_WIDTHS[plane]
    position, mask = 8 - sum(PLANE_WIDTHS[: plane + 1]), _repeated(2**width - 1)
    packed = lanes.transpose(1, 2).reshape(-1).view(torch.int64).view(-1, width, 1, _WORD_ROWS)
    shifts = torch.arange(0, 8, width, device=lanes.device)[:, None]
    return (((packed >> shifts) & mask) << position).view(-1, ROWS, _WORD_ROWS)


def _write_header(pages: Tensor, layout: PlaneLayout, mean: Tensor, deviation: Tensor) -> None:
    """Lays headers out: each page holds the means of its groups, then their deviations."""
    per_page, padding = layout.headers_per_page, layout.header_pages * layout.headers_per_page - layout.groups
    bits = deviation.view(torch.int32) & 0x7FFFFFFF
    bits = (bits + 0x3FFF + ((bits >> DEVIATION_SHIFT) & 1)) >> DEVIATION_SHIFT
    means, deviations = (torch.nn.functional.pad(part, (0, padding)) for part in (mean, bits.to(torch.int16)))
    pages[:, : 4 * per_page] = means.view(-1, per_page).view(torch.uint8)
    pages[:, 4 * per_page : HEADER_BYTES * per_page] = deviations.view(-1, per_page).view(torch.uint8)
