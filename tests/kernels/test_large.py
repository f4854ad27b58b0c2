"""Tensors of more than 2**31 elements: indices and offsets are 64 bits wide.

The tensor is never touched but for its end, so it takes no memory; the kernels are called for its last tile alone.
Every page but those of that tile is one and the same, which must stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from daf_kernels import PlaneLayout, plane_layout
from daf_kernels.cpu import backend, jobs
from daf_kernels.cpu import masks as cpu_masks
from daf_kernels.cpu.thread_team import WORDS_BYTES, launch
from daf_kernels.layout import BLOCK, COLUMNS, PLANE_WIDTHS
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import flags, normal
from tests.kernels.harness import SEED, SENTINEL, plain_noise

ELEMENTS = (1 << 31) + 5000
PAGE_BYTES, PAGE_SHIFT = 1 << 12, 12
TILE = 4096
FIRST = (1 << 31) - TILE
TAIL = ELEMENTS - FIRST


@pytest.fixture
def large() -> Tensor:
    """A tensor of zeros that were never written, with normal numbers at its end."""
    try:
        values = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine does not lend 4.3 GB of address space")
    values[FIRST:] = normal(TAIL).bfloat16()
    return values


class Sparse:
    """Pages of a large activation, of which only those of its tail exist; all others are one."""

    def __init__(self, layout: PlaneLayout, planes: int) -> None:
        tail = list(_tail_pages(layout, planes))
        self._region = torch.full((len(tail) + 1, PAGE_BYTES), SENTINEL, dtype=torch.uint8)
        self.addresses: npt.NDArray[np.int64] = np.full(layout.pages(planes), self._region.data_ptr(), np.int64)
        self.addresses[tail] += PAGE_BYTES * np.arange(1, len(tail) + 1)
        self._tail = tail

    def check(self) -> None:
        assert (self._region[0] == SENTINEL).all(), "a page far from the tail was written"

    def bytes_at(self, page: int, offset: int, count: int) -> Tensor:
        """Returns the bytes from an offset in a page on, through the pages after it in the list."""
        start = PAGE_BYTES * (1 + self._tail.index(page)) + offset
        return self._region.view(-1)[start : start + count]


def _tail_pages(layout: PlaneLayout, planes: int) -> Iterator[int]:
    """Gives the pages that hold something of the elements from FIRST on."""
    yield from range(FIRST // layout.group // layout.headers_per_page, layout.header_pages)
    for plane in range(planes):
        first = FIRST // 8 * PLANE_WIDTHS[plane] // PAGE_BYTES
        yield from range(layout.plane_start(plane) + first, layout.pages(plane + 1))


def _run(kernel: jobs.Kernel, values: Tensor, addresses: npt.NDArray[np.int64]) -> int:
    """Runs a kernel for the last elements of a tensor, and returns what it answers."""
    scratch = np.zeros(WORDS_BYTES + kernel.stride, np.uint8)
    return launch(
        0, kernel.job, 1, kernel.address, kernel.count, values.data_ptr(), PAGE_SHIFT, FIRST, ELEMENTS, ELEMENTS,
        scratch.ctypes.data, kernel.stride, addresses,
    )  # fmt: skip


@pytest.mark.parametrize("row", [256, 64, 8, 1], ids="rows of {}".format)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_planes_past_two_billion_elements(
    monkeypatch: pytest.MonkeyPatch, large: Tensor, row: int, stochastic: bool
) -> None:
    """The last tiles give the bytes that they would give as a tensor of their own, and decode to the same values."""
    layout, tail = plane_layout(ELEMENTS, row, PAGE_BYTES), plane_layout(TAIL, row, PAGE_BYTES)
    first_block, seed = FIRST // BLOCK, SEED if stochastic else None
    monkeypatch.setattr(reference, "noise", lambda blocks, words, _: plain_noise(first_block, blocks, words))
    expected = reference.encode(large[FIRST:], tail, 4, seed)
    memory = Sparse(layout, 4)
    words = np.array(SEED, np.uint64)
    encoder = backend._encoder(layout, 4, torch.bfloat16, words.ctypes.data if stochastic else None)
    unusable = _run(encoder, large, memory.addresses)
    memory.check()
    assert unusable == 0
    for plane, width in enumerate(PLANE_WIDTHS):
        page, offset = divmod(first_block * COLUMNS * width, PAGE_BYTES)
        size = tail.blocks * COLUMNS * width
        start = tail.plane_start(plane)
        found = memory.bytes_at(layout.plane_start(plane) + page, offset, size)
        assert torch.equal(found, expected[start : start + tail.plane_pages(plane)].view(-1)[:size])
    out = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    _run(backend._decoder(layout, 4, torch.bfloat16), out, memory.addresses)
    assert torch.equal(out[FIRST:], reference.decode(expected, tail, 4, torch.bfloat16))


def test_masks_past_two_billion_elements(large: Tensor) -> None:
    """Bits of the tail lie in the last pages of the plane, and are unpacked to the end of the tensor."""
    ones = flags(TAIL)
    large[FIRST:] = ones.bfloat16()
    pages = -(-ELEMENTS // 8 // PAGE_BYTES)
    region = torch.full((4, PAGE_BYTES), SENTINEL, dtype=torch.uint8)
    addresses = np.full(pages, region.data_ptr(), np.int64)
    start = FIRST // 8 // PAGE_BYTES
    addresses[start:] = region.data_ptr() + PAGE_BYTES * np.arange(1, pages - start + 1)
    encoder, decoder = (backend._of_mask(job, 2, 0, 0x3F80) for job in (jobs.encode_mask, jobs.decode_mask))
    assert _run(encoder, large, addresses) == 0
    assert (region[0] == SENTINEL).all()
    size, offset = -(-TAIL // BLOCK) * COLUMNS, FIRST // 8 % PAGE_BYTES
    expected = reference.encode_mask(ones, torch.tensor(True), PAGE_BYTES).view(-1)[:size]
    assert torch.equal(region[1:].view(-1)[offset : offset + size], expected)
    out = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    _run(decoder, out, addresses)
    assert torch.equal(out[FIRST:], large[FIRST:])


@pytest.mark.parametrize("into_dense", [True, False], ids=["read", "write"])
def test_strides_past_two_billion_elements(large: Tensor, into_dense: bool) -> None:
    """A column of a tensor with holes lies at an offset that 32 bits do not hold."""
    strided = large[: 1 << 31].view(-1, 1 << 12)[:, 17::1000]
    rows, columns = strided.shape
    dense = torch.arange(columns, dtype=torch.float32).bfloat16()
    cpu_masks.copy_strided(
        strided.data_ptr(), np.array(strided.shape, np.int64), np.array(strided.stride(), np.int64), 2,
        (rows - 1) * columns, rows * columns, dense.data_ptr(), into_dense,
    )  # fmt: skip
    assert torch.equal(strided[-1], dense)
    assert dense.any()


def test_layout_past_two_billion_elements() -> None:
    """The page list of a large activation, in plain numbers."""
    layout = plane_layout(1 << 34, 256, 1 << 16)
    assert layout.groups == layout.blocks == 1 << 26
    assert layout.header_pages == -(-(1 << 26) // 10922)
    assert [layout.plane_pages(plane) for plane in range(4)] == [1 << 15, 1 << 15, 1 << 16, 1 << 17]
