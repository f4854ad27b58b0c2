"""What the kernel tests share: page memory that notices strayed writes, bitwise comparison, and a plain Philox."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daf_kernels import PlaneLayout, Seed, mask_pages, plane_layout
from daf_kernels.backend import Backend, Pages
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.layout import BLOCK, COLUMNS, PLANE_WIDTHS
from daf_kernels.reference.backend import ReferenceBackend

SENTINEL = 0xA5
"""What memory holds that nobody may write."""

MARGIN = 512
"""Elements of sentinels on either side of a tensor, more than a block."""

PAGE_BYTES = 512
"""Small, so that little data crosses many pages."""

SEED: Seed = (0x12345678, 0x9ABCDEF0, 0x0F1E2D3C, 0x4B5A6978)

REFERENCE, CPU = ReferenceBackend(), CpuBackend(threads=1)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW = 0xFFFFFFFF


class GuardedPages:
    """A `PageMemory` of shuffled pages, each of them between two that nobody may write.

    Args:
        count: Number of pages.
        page_bytes: Bytes in a page.
        fill: What every byte of them holds at first.
        device: Where they lie.
    """

    def __init__(
        self, count: int, page_bytes: int = PAGE_BYTES, fill: int = 0, device: torch.device | None = None
    ) -> None:
        self.page_bytes = page_bytes
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        self.pages: Pages = (2 * order + 1).numpy()
        self._region = torch.full((2 * count + 1, page_bytes), SENTINEL, dtype=torch.uint8, device=device)
        self._region[1::2] = fill

    def addresses(self, pages: Pages) -> npt.NDArray[np.int64]:
        return pages * self.page_bytes + self._region.data_ptr()

    def read(self, pages: Pages) -> Tensor:
        return self._region[torch.from_numpy(pages)]

    def write(self, pages: Pages, content: Tensor) -> None:
        self._region[torch.from_numpy(pages)] = content

    @property
    def content(self) -> Tensor:
        """The pages in their order, after a look at what lies between them."""
        assert bool((self._region[::2] == SENTINEL).all()), "a page that belongs to nobody was written"
        return self.read(self.pages)


class Embedded:
    """A tensor inside a buffer of sentinels, at every `step`-th element of it."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, step: int, device: torch.device | None = None
    ) -> None:
        size = (2 * MARGIN + step * int(np.prod(shape)), dtype.itemsize)
        self._bytes = torch.full(size, SENTINEL, dtype=torch.uint8, device=device)
        self._inside = slice(MARGIN, MARGIN + step * (int(np.prod(shape)) - 1) + 1, step)
        self.tensor = self._bytes.view(dtype).view(-1)[self._inside].view(shape)

    def check(self) -> None:
        """Fails if anything around the tensor was written."""
        around = torch.ones(self._bytes.shape[0], dtype=torch.bool)
        around[self._inside] = False
        assert (self._bytes[around] == SENTINEL).all(), "an element beside the tensor was written"


def layout_of(values: Tensor, page_bytes: int = PAGE_BYTES, own: bool = False) -> PlaneLayout:
    """Returns the layout of a tensor whose scaling groups follow its last dimension, or are rows of it if `own`."""
    row = values.shape[-1] if values.dim() else 1
    return PlaneLayout(values.numel(), row, page_bytes) if own else plane_layout(values.numel(), row, page_bytes)


def encode(
    backend: Backend, values: Tensor, planes: int, seed: Seed | None = None, page_bytes: int = PAGE_BYTES,
    fill: int = 0, own: bool = False,
) -> tuple[GuardedPages, bool]:  # fmt: skip
    """Encodes a tensor into new pages; returns them and what the backend answered."""
    layout = layout_of(values, page_bytes, own)
    memory = GuardedPages(layout.pages(planes), page_bytes, fill, values.device)
    return memory, bool(backend.encode(values, layout, planes, memory, memory.pages, seed))


def decode(backend: Backend, memory: GuardedPages, like: Tensor, planes: int, own: bool = False) -> Tensor:
    """Decodes what is left of an encoded tensor, with only the pages that are left at hand."""
    layout = layout_of(like, memory.page_bytes, own)
    out = torch.full(like.shape, -77.0, dtype=like.dtype, device=like.device)
    backend.decode(out, layout, planes, memory, memory.pages[: layout.pages(planes)])
    return out


def bits(values: Tensor) -> Tensor:
    """Returns the bits of the elements in row-major order, all NaNs alike."""
    dense = values.reshape(-1)
    return bit_patterns(torch.where(dense.isnan(), torch.full_like(dense, torch.nan), dense))


def bit_patterns(values: Tensor) -> Tensor:
    """Returns the bits of the elements in row-major order."""
    return values.reshape(-1).view(_INTEGERS[values.element_size()])


def groups_of(values: Tensor, layout: PlaneLayout) -> Iterator[Tensor]:
    """Gives the scaling groups of a tensor, as float64."""
    yield from values.reshape(-1).double().split(layout.group)


def used_bytes(layout: PlaneLayout, planes: int) -> Tensor:
    """Returns a bool tensor of shape (pages, page_bytes): which bytes of the pages hold something."""
    used = torch.zeros(layout.pages(planes), layout.page_bytes, dtype=torch.bool)
    for group in range(layout.groups):
        page, slot = divmod(group, layout.headers_per_page)
        deviation = 4 * layout.headers_per_page + 2 * slot
        used[page, 4 * slot : 4 * slot + 4] = True
        used[page, deviation : deviation + 2] = True
    for plane in range(planes):
        first = layout.plane_start(plane)
        used[first : first + layout.plane_pages(plane)].view(-1)[: layout.blocks * COLUMNS * PLANE_WIDTHS[plane]] = True
    return used


def pack_mask(backend: Backend, values: Tensor, two: tuple[int, int], fill: int = 0) -> tuple[GuardedPages, bool]:
    """Packs a mask into new pages; returns them and what the backend answered."""
    memory = GuardedPages(mask_pages(values.numel(), PAGE_BYTES), PAGE_BYTES, fill, values.device)
    return memory, backend.encode_mask(values, two, memory, memory.pages)


def unpack_mask(backend: Backend, memory: GuardedPages, two: tuple[int, int], like: Tensor) -> Tensor:
    """Unpacks a mask into a new dense tensor."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    backend.decode_mask(out, two, memory, memory.pages)
    return out


def encode_slopes(
    backend: Backend, values: Tensor, planes: int, page_bytes: int = PAGE_BYTES, fill: int = 0
) -> tuple[GuardedPages, bool]:
    """Encodes GELU's derivative into new pages; returns them and what the backend answered."""
    layout = plane_layout(values.numel(), 0, page_bytes)
    memory = GuardedPages(layout.pages(planes), page_bytes, fill, values.device)
    return memory, bool(backend.encode_slopes(values, layout, planes, memory, memory.pages))


def decode_slopes(backend: Backend, memory: GuardedPages, out: Tensor, planes: int) -> Tensor:
    """Decodes what is left of GELU's derivative into `out`, with only the pages that are left at hand."""
    layout = plane_layout(out.numel(), 0, memory.page_bytes)
    backend.decode_slopes(out, layout, planes, memory, memory.pages[: layout.pages(planes)])
    return out


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers, as Salmon et al. write it down."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (second >> 32 ^ counter[1] ^ key[0], second & _LOW, first >> 32 ^ counter[3] ^ key[1], first & _LOW)
        key = ((key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW)
    return counter


def plain_noise(first_block: int, blocks: int, seed: Seed) -> Tensor:
    """Returns the 14 random bits of every element of some blocks: word k holds those of rows 2k and 2k + 1."""
    noise = torch.empty(blocks, BLOCK, dtype=torch.int64)
    for block in range(blocks):
        for column in range(COLUMNS):
            lane = (first_block + block) * COLUMNS + column
            words = philox((lane & _LOW, lane >> 32, seed[2], seed[3]), (seed[0], seed[1]))
            halves = [half for word in words for half in (word >> 2 & 0x3FFF, word >> 18)]
            noise[block, column::COLUMNS] = torch.tensor(halves)
    return noise.view(-1)
