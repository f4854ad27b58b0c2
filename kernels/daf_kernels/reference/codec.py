"""The truth in plain torch: what every backend computes, byte for byte, and the path for devices without a kernel.

Slow and obvious on purpose. The numeric contract, in float32 with every operation rounded on its own:

- ``spread = maximum - minimum`` of a scaling group. Where it is not finite (a NaN or an infinity) or
  2**124 and more, the group's header is NaN and its codes are 0, so that all its values decode to NaN and no other
  group's do.
- codes, to nearest even: ``round((x - minimum) * (levels / spread))`` with ``levels = 2**precision - 1``;
  stochastic: ``floor`` of the same plus a uniform number, in 2**14 steps.
- moments from the integers ``s = round((x - minimum) * (4095 / spread))``: their sums are exact in any order, so a
  group's mean ``minimum + spread * sum(s) / (4095 n)`` and deviation
  ``spread * sqrt(n * sum(s**2) - sum(s)**2) / (4095 n)`` do not depend on how a backend adds up.
- codes of 1 and 2 bits, to nearest: in groups whose spread is less than 10 deviations and whose extremes are both
  more than 1.2 deviations from the mean, ``round(clamp((x - low) * (levels / (3 deviation)), 0, levels))`` with
  ``low = mean - 1.5 deviation``, as suits a normal distribution.
- a group whose spread is below 4095 / 3.4e38 is stored as its minimum.
- decoding maps the codes that are left (0 for missing planes) linearly so that the group has the header's mean and
  deviation: ``slope = deviation * n / sqrt(n * sum(c**2) - sum(c)**2)``, ``x = c * slope + (mean - slope * mean(c))``,
  bounded by the largest number of the type: a value near it must not come back as an infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daf_kernels.backend import Seed
from daf_kernels.layout import (
    BLOCK,
    CLIP,
    CLIPPED_PRECISION,
    COLUMNS,
    DEVIATION_SHIFT,
    HEADER_BYTES,
    LARGEST_CLIPPED,
    LARGEST_SPREAD,
    LEAST_TAIL,
    PLANE_WIDTHS,
    PRECISIONS,
    ROWS,
    PlaneLayout,
)

MOMENT_STEPS = 4095.0
_LOW = 0xFFFFFFFF


def encode(values: Tensor, layout: PlaneLayout, planes: int, seed: Seed | None = None) -> Tensor:
    """Encodes `values` as header and planes.

    Args:
        values: Float tensor of shape (elements,), float32, bfloat16 or float16.
        layout: Where header and planes lie.
        planes: Leading planes to store, 0 to 4; 0 stores headers alone.
        seed: Random stream for stochastic rounding; None rounds to nearest.

    Returns:
        uint8 tensor of shape (pages, page_bytes); bytes that hold nothing are 0.
    """
    groups, valid = _grouped(values.float(), layout.group)
    codes, mean, deviation = _quantize(groups, valid, PRECISIONS[max(planes, 1) - 1], _noise_like(groups, layout, seed))
    return torch.cat([_header_pages(mean, deviation, layout), pack_planes(codes[valid], layout, planes)])


def decode(pages: Tensor, layout: PlaneLayout, planes: int, dtype: torch.dtype) -> Tensor:
    """Decodes what `encode` made, or its first `planes` planes.

    Args:
        pages: uint8 tensor of shape (at least layout.pages(planes), page_bytes).
        layout: Where header and planes lie.
        planes: Leading planes that are left, 0 to 4; 0 gives the group means.
        dtype: Type of the result.

    Returns:
        Tensor of shape (elements,).
    """
    groups, valid = _grouped(unpack_planes(pages, layout, planes), layout.group)
    mean, deviation = read_header(pages[: layout.header_pages], layout)
    slope, offset = _line(groups, valid, mean, deviation)
    values = (groups.float() * slope[:, None] + offset[:, None])[valid]
    return values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def pack_planes(codes: Tensor, layout: PlaneLayout, planes: int) -> Tensor:
    """Packs left-aligned codes of shape (elements,) into the pages of the first `planes` planes."""
    flat = torch.zeros(layout.blocks * BLOCK, dtype=torch.int64, device=codes.device)
    flat[: layout.elements] = codes
    rows = [_to_pages(_pack(flat, plane), layout.page_bytes) for plane in range(planes)]
    return torch.cat(rows) if rows else torch.zeros(0, layout.page_bytes, dtype=torch.uint8, device=codes.device)


def unpack_planes(pages: Tensor, layout: PlaneLayout, planes: int) -> Tensor:
    """Returns what the first `planes` planes hold of the left-aligned codes, shape (elements,)."""
    codes = torch.zeros(layout.blocks * BLOCK, dtype=torch.int64, device=pages.device)
    for plane in range(planes):
        start = layout.plane_start(plane)
        codes |= _unpack(pages[start : start + layout.plane_pages(plane)].reshape(-1), plane, layout.blocks)
    return codes[: layout.elements]


def encode_mask(values: Tensor, one: Tensor, page_bytes: int) -> Tensor:
    """Packs ``values == one`` (shape (elements,)) at one bit each into uint8 pages of shape (pages, page_bytes)."""
    flags = torch.zeros(-(-values.numel() // BLOCK) * BLOCK, dtype=torch.int64, device=values.device)
    flags[: values.numel()] = values == one
    return _to_pages(_pack(flags << 7, 0), page_bytes)


def decode_mask(pages: Tensor, elements: int) -> Tensor:
    """Returns the bool tensor of shape (elements,) that `encode_mask` packed."""
    return _unpack(pages.reshape(-1), 0, -(-elements // BLOCK))[:elements].bool()


def noise(blocks: int, seed: Seed, device: torch.device | None = None) -> Tensor:
    """Returns 14 random bits for each element of `blocks` blocks, shape (blocks * 256,).

    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one call for each column of
    a block: its four words hold two numbers each, for rows 0 to 7 in order.
    """
    lane = torch.arange(blocks * COLUMNS, device=device)
    words = [lane & _LOW, lane >> 32, torch.full_like(lane, seed[2]), torch.full_like(lane, seed[3])]
    key = (seed[0], seed[1])
    for _ in range(10):
        words = _philox_round(words, key)
        key = ((key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW)
    rows = [half for word in words for half in ((word >> 2) & 0x3FFF, (word >> 18) & 0x3FFF)]
    return torch.stack(rows).view(ROWS, blocks, COLUMNS).transpose(0, 1).reshape(-1)


def _philox_round(words: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
    return [
        ((second >> 32) & _LOW) ^ words[1] ^ key[0],
        second & _LOW,
        ((first >> 32) & _LOW) ^ words[3] ^ key[1],
        first & _LOW,
    ]


def _grouped(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Cuts (elements,) into (groups, group), the last padded with zeros, and says which places are real."""
    count = -(-values.numel() // group)
    valid = torch.arange(count * group, device=values.device).view(count, group) < values.numel()
    padded = torch.zeros(count * group, dtype=values.dtype, device=values.device)
    padded[: values.numel()] = values
    return padded.view(count, group), valid


def _noise_like(groups: Tensor, layout: PlaneLayout, seed: Seed | None) -> Tensor | None:
    if seed is None:
        return None
    return _grouped(noise(layout.blocks, seed, groups.device)[: layout.elements], layout.group)[0]


def _quantize(groups: Tensor, valid: Tensor, precision: int, random: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns left-aligned codes of shape (groups, group), and means and deviations of shape (groups,)."""
    levels = float(2**precision - 1)
    minimum = groups.where(valid, torch.inf).amin(1)
    spread = groups.where(valid, -torch.inf).amax(1) - minimum
    finite = spread < LARGEST_SPREAD
    # full_like, because torch computes `number / tensor` as a reciprocal and a product: two roundings.
    factors = [torch.full_like(spread, steps) / spread for steps in (levels, MOMENT_STEPS)]
    visible = finite & (factors[1] < torch.inf)
    inverse, moment_inverse = (torch.where(visible, factor, 0.0) for factor in factors)
    offsets = torch.where(valid & finite[:, None], groups - minimum[:, None], 0.0)
    scaled = offsets * inverse[:, None]
    codes = scaled.round().long() if random is None else ((scaled * 2.0**14).round().long() + random) >> 14
    steps = (offsets * moment_inverse[:, None]).round().long()
    mean, deviation = _moments(steps, valid.sum(1), minimum, spread)
    if random is None and precision <= CLIPPED_PRECISION:
        narrow = is_clipped(minimum, spread, mean, deviation) & visible
        low = mean - CLIP * deviation
        inverse = torch.full_like(deviation, levels) / (2 * CLIP * deviation)
        inside = ((groups - low[:, None]) * inverse[:, None]).clamp(0, levels).round()
        codes = torch.where(valid & narrow[:, None], inside.nan_to_num(0.0).long(), codes)
    bad = torch.full_like(mean, torch.nan)
    return codes << (8 - precision), torch.where(finite, mean, bad), torch.where(finite, deviation, bad)


def is_clipped(minimum: Tensor, spread: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Says which groups are coded between deviations from their mean rather than between their extremes."""
    least = LEAST_TAIL * deviation
    return (
        (deviation > 0)
        & (spread < LARGEST_CLIPPED * deviation)
        & (mean - minimum > least)
        & (spread - (mean - minimum) > least)
    )


def _moments(steps: Tensor, count: Tensor, minimum: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    total, squares = steps.sum(1), (steps * steps).sum(1)
    scale = MOMENT_STEPS * count.float()
    mean = minimum + spread * (total.float() / scale)
    return mean, spread * (_root(count * squares - total * total) / scale)


def _line(codes: Tensor, valid: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    count, total, squares = valid.sum(1), codes.sum(1), (codes * codes).sum(1)
    square_spread = count * squares - total * total
    slope = torch.where(square_spread > 0, deviation * (count.float() / _root(square_spread)), 0.0)
    return slope, mean - slope * (total.float() / count.float())


def _root(square: Tensor) -> Tensor:
    """Square root of integers, correctly rounded: torch's own float32 one is off by a bit in 5% of cases on CPUs."""
    return square.float().double().sqrt().float()


def _lanes(plane: int, device: torch.device) -> tuple[Tensor, int]:
    """Returns the left shift of each row's bits inside a lane, shape (8, 1), and the bytes of a lane."""
    width = PLANE_WIDTHS[plane]
    return (torch.arange(ROWS, device=device) * width)[:, None], width


def _plane_position(plane: int) -> int:
    """Returns the lowest bit of the code byte that a plane holds."""
    return 8 - sum(PLANE_WIDTHS[: plane + 1])


def _pack(codes: Tensor, plane: int) -> Tensor:
    """Packs left-aligned codes of whole blocks into the bytes of one plane."""
    shifts, width = _lanes(plane, codes.device)
    bits = (codes.view(-1, ROWS, COLUMNS) >> _plane_position(plane)) & (2**width - 1)
    lanes = (bits << shifts).sum(1)
    bytes_of_lane = torch.arange(width, device=codes.device) * 8
    return ((lanes[..., None] >> bytes_of_lane) & 255).to(torch.uint8).reshape(-1)


def _unpack(data: Tensor, plane: int, blocks: int) -> Tensor:
    """Returns what one plane holds of the left-aligned codes of `blocks` blocks."""
    shifts, width = _lanes(plane, data.device)
    lane_bytes = data[: blocks * COLUMNS * width].long().view(blocks, COLUMNS, width)
    lanes = (lane_bytes << (torch.arange(width, device=data.device) * 8)).sum(-1)
    bits = (lanes[:, None, :] >> shifts) & (2**width - 1)
    return (bits << _plane_position(plane)).reshape(-1)


def _to_pages(data: Tensor, page_bytes: int) -> Tensor:
    pages = torch.zeros(-(-data.numel() // page_bytes) * page_bytes, dtype=torch.uint8, device=data.device)
    pages[: data.numel()] = data
    return pages.view(-1, page_bytes)


def _header_pages(mean: Tensor, deviation: Tensor, layout: PlaneLayout) -> Tensor:
    """Lays headers out: each page holds the means of its groups, then their deviations."""
    per_page = layout.headers_per_page
    pages = torch.zeros(layout.header_pages, layout.page_bytes, dtype=torch.uint8, device=mean.device)
    slots = torch.zeros(2, layout.header_pages * per_page, dtype=torch.int32, device=mean.device)
    slots[0, : layout.groups] = mean.view(torch.int32)
    slots[1, : layout.groups] = _deviation_bits(deviation)
    means = slots[0].view(torch.uint8).view(-1, 4 * per_page)
    deviations = slots[1].to(torch.int16).view(torch.uint8).view(-1, 2 * per_page)
    pages[:, : HEADER_BYTES * per_page] = torch.cat([means, deviations], 1)
    return pages


def _deviation_bits(deviation: Tensor) -> Tensor:
    bits = deviation.view(torch.int32).long() & 0x7FFFFFFF
    return ((bits + 0x3FFF + ((bits >> DEVIATION_SHIFT) & 1)) >> DEVIATION_SHIFT).to(torch.int32)


def read_header(pages: Tensor, layout: PlaneLayout) -> tuple[Tensor, Tensor]:
    """Returns the mean and the deviation of each group, float32 of shape (groups,), from the header's pages."""
    per_page = layout.headers_per_page
    mean = pages[:, : 4 * per_page].contiguous().view(torch.float32).reshape(-1)
    stored = pages[:, 4 * per_page : HEADER_BYTES * per_page].contiguous().view(torch.int16).reshape(-1)
    bits = (stored.to(torch.int32) & 0xFFFF) << DEVIATION_SHIFT
    return mean[: layout.groups], bits.view(torch.float32)[: layout.groups]
