"""The CPU backend: launches the numba kernels, split over threads, and stages tensors whose memory has holes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daf_kernels import cpu_masks, cpu_planes, cpu_ranges, cpu_slopes
from daf_kernels.backend import FixedPages, PageMemory, Pages, TwoValues
from daf_kernels.cpu_bits import BFLOAT16, FLOAT16, FLOAT32
from daf_kernels.layout import BLOCK, PLANE_WIDTHS, PRECISIONS, PlaneLayout, sampled_groups
from daf_kernels.reference import Seed
from daf_kernels.slopes import inputs_of_codes
from daf_kernels.workers import WorkerPool

Run = Callable[[int, int, int], int]

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

TILE = 4096
"""Elements encoded at a time: 16 kB of float32 stay in the first-level cache, 32 kB do not beside the codes."""

SPLIT = 1 << 22
"""Elements a thread gets at the least, 1 ms of work. Torch's own threads spin for about as long after each operator, on
the cores that the others would take: below this, splitting made training steps of GPT-2 on 2 cores 1% slower."""

STAGE = 1 << 16
"""Elements of a tensor with holes that are copied together at a time, 256 kB of float32."""

INTEGERS = {2: torch.int16, 4: torch.int32}
_NO_SEED = np.zeros(4, np.uint64)


class _Scratch(threading.local):
    """Buffers of one thread, grown to the largest tile met."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def reserve(self, size: int) -> int:
        """Returns the address of `size` bytes, aligned to 64; they stay valid until the thread's next call."""
        if self._buffer.size < size + 64:
            self._buffer = np.empty(size + 64, np.uint8)
        return -(-self._buffer.ctypes.data // 64) * 64


class CpuBackend:
    """Numba kernels for tensors in the memory of a CPU.

    Args:
        threads: Threads that large tensors are split over; torch's own number by default.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._workers = WorkerPool(threads or torch.get_num_threads())
        self._scratch = _Scratch()

    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        """See `Backend.relative_range`."""
        count, step, size = sampled_groups(layout)
        if not values.is_contiguous():
            values, step = self._sample(values, layout, count, step, size), 1
        work = self._scratch.reserve(4 * size)
        kind = KINDS[values.dtype]
        squares, variances = cpu_ranges.squared_ranges(values.data_ptr(), kind, size, count, step, work)
        return squares / variances if variances else 0.0

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool:
        """See `Backend.encode`."""
        addresses, shift = _page_table(memory, pages)
        kind, levels = KINDS[values.dtype], np.float32(2.0 ** PRECISIONS[max(planes, 1) - 1] - 1)
        words = _NO_SEED if seed is None else np.array(seed, np.uint64)
        tile, starts = _tiling(layout)
        noise_bytes = 0 if seed is None else 2 * tile

        def run(first: int, stop: int, base: int) -> int:
            codes = self._scratch.reserve(tile + noise_bytes + 24 * (tile // layout.group) + 1024)
            noise, work = (codes + tile if noise_bytes else 0), codes + tile + noise_bytes
            return cpu_planes.encode_planes(
                base, kind, first, stop, layout.group, tile, planes, levels, words, addresses, starts, shift,
                codes, noise, work,
            )  # fmt: skip

        return self._over(values, tile, run, load=True) == 0

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode`."""
        addresses, shift = _page_table(memory, pages)
        kind = KINDS[out.dtype]
        tile, starts = _tiling(layout)

        def run(first: int, stop: int, base: int) -> int:
            codes = self._scratch.reserve(tile + 16 * (tile // layout.group))
            cpu_planes.decode_planes(
                base, kind, first, stop, layout.group, tile, planes, addresses, starts, shift, codes, codes + tile
            )
            return 0

        self._over(out, tile, run, store=True)

    def encode_slopes(self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_slopes`."""
        addresses, shift = _page_table(memory, pages)
        kind, starts = KINDS[values.dtype], _tiling(layout)[1]

        def run(first: int, stop: int, base: int) -> int:
            scratch = self._scratch.reserve(5 * BLOCK)
            return cpu_slopes.encode_slopes(base, kind, first, stop, planes, addresses, starts, shift, scratch)

        return self._over(values, TILE, run, load=True) == 0

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_slopes`."""
        addresses, shift = _page_table(memory, pages)
        kind, starts, table = KINDS[out.dtype], _tiling(layout)[1], inputs_of_codes()[planes]

        def run(first: int, stop: int, base: int) -> int:
            scratch = self._scratch.reserve(BLOCK)
            cpu_slopes.decode_slopes(base, kind, first, stop, planes, table, addresses, starts, shift, scratch)
            return 0

        self._over(out, TILE, run, store=True)

    def two_values(self, values: Tensor) -> TwoValues | None:
        """See `Backend.two_values`."""
        if not values.is_contiguous():
            head = torch.empty(min(values.numel(), BLOCK), dtype=values.dtype)
            self._copy(values, 0, head.numel(), head, into_dense=True)
            found = self._probe(head)
            if found is None or found[0] != found[1]:
                return found
            values = values.contiguous()
        return self._probe(values)

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_mask`."""
        addresses, shift = _page_table(memory, pages)
        size, zero, one = values.element_size(), np.uint64(two[0]), np.uint64(two[1])

        def run(first: int, stop: int, base: int) -> int:
            scratch = self._scratch.reserve(BLOCK)
            return cpu_masks.encode_mask(base, size, zero, one, first, stop, addresses, shift, scratch)

        return self._over(values, TILE, run, load=True) == 0

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_mask`."""
        addresses, shift = _page_table(memory, pages)
        size, zero, one = out.element_size(), np.uint64(two[0]), np.uint64(two[1])

        def run(first: int, stop: int, base: int) -> int:
            scratch = self._scratch.reserve(BLOCK)
            cpu_masks.decode_mask(base, size, zero, one, first, stop, addresses, shift, scratch)
            return 0

        self._over(out, TILE, run, store=True)

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.encode_nonzero`."""
        (addresses, shift), size = _page_table(memory, pages), values.element_size()

        def run(first: int, stop: int, base: int) -> int:
            cpu_masks.encode_nonzero(base, size, first, stop, addresses, shift, self._scratch.reserve(BLOCK))
            return 0

        self._over(values, TILE, run, load=True)

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.rectify`."""
        (addresses, shift), size = _page_table(memory, pages), out.element_size()
        least = int(torch.tensor(torch.finfo(out.dtype).tiny, dtype=out.dtype).view(INTEGERS[size]))

        def run(first: int, stop: int, base: int) -> int:
            cpu_masks.rectify(base, size, least, first, stop, addresses, shift, self._scratch.reserve(BLOCK))
            return 0

        self._over(out, TILE, run, load=True, store=True)

    def _sample(self, values: Tensor, layout: PlaneLayout, count: int, step: int, size: int) -> Tensor:
        """Returns dense copies of `count` scaling groups that are `step` groups apart."""
        groups = torch.empty((count, size), dtype=values.dtype)
        for index, into in enumerate(groups):
            first = index * step * layout.group
            self._copy(values, first, first + size, into, into_dense=True)
        return groups

    def _probe(self, values: Tensor) -> TwoValues | None:
        scratch = self._scratch.reserve(BLOCK)
        zero, one, others = cpu_masks.probe(values.data_ptr(), values.element_size(), values.numel(), scratch)
        return None if others else (zero, one)

    def _over(self, values: Tensor, tile: int, run: Run, load: bool = False, store: bool = False) -> int:
        """Sums ``run(first, stop, base)`` over ranges of elements; element i is at address base + i * size."""
        if values.is_contiguous():
            base = values.data_ptr()
            results = self._workers.run(lambda first, stop: run(first, stop, base), values.numel(), tile, SPLIT)
        else:
            stage = max(tile, STAGE // tile * tile)
            results = self._workers.run(
                lambda first, stop: self._stage(values, first, stop, stage, run, load, store),
                values.numel(),
                tile,
                SPLIT,
            )
        return sum(results)

    def _stage(self, values: Tensor, first: int, stop: int, stage: int, run: Run, load: bool, store: bool) -> int:
        """Lets `run` work on a dense buffer, loaded from and stored to the tensor `stage` elements at a time."""
        buffer = torch.empty(min(stage, stop - first), dtype=values.dtype)
        total = 0
        for start in range(first, stop, stage):
            end = min(start + stage, stop)
            if load:
                self._copy(values, start, end, buffer, into_dense=True)
            total += run(start, end, buffer.data_ptr() - values.element_size() * start)
            if store:
                self._copy(values, start, end, buffer, into_dense=False)
        return total

    def _copy(self, values: Tensor, first: int, stop: int, buffer: Tensor, into_dense: bool) -> None:
        shape, strides = np.array(values.shape, np.int64), np.array(values.stride(), np.int64)
        cpu_masks.copy_strided(
            values.data_ptr(), shape, strides, values.element_size(), first, stop, buffer.data_ptr(), into_dense
        )


def _page_table(memory: PageMemory, pages: Pages) -> tuple[npt.NDArray[np.int64], int]:
    """Returns the address of each page, and the binary logarithm of the page size."""
    return memory.addresses(pages), memory.page_bytes.bit_length() - 1


@lru_cache(maxsize=1024)
def _tiling(layout: PlaneLayout) -> tuple[int, npt.NDArray[np.int64]]:
    """Returns the elements to encode at a time and where each plane's pages start."""
    tile = layout.tile * max(1, TILE // layout.tile)
    return tile, np.array([layout.plane_start(plane) for plane in range(len(PLANE_WIDTHS))], np.int64)


def warm_up() -> float:
    """Compiles the kernels, or loads them from numba's disk cache, and returns the seconds it took.

    Raises:
        RuntimeError: The kernels do not give back what they were given; the numba installation is broken.
    """
    started = time.perf_counter()
    backend, values, layout = CpuBackend(threads=1), torch.arange(1024.0), PlaneLayout(1024, 256, 128)
    memory = FixedPages(layout.pages(len(PLANE_WIDTHS)), layout.page_bytes)
    pages = np.arange(layout.pages(len(PLANE_WIDTHS)))
    decoded = torch.empty(1024, 2)[:, 0]
    backend.encode(values, layout, len(PLANE_WIDTHS), memory, pages, None)
    backend.relative_range(values, layout)
    backend.decode(decoded, layout, len(PLANE_WIDTHS), memory, pages)
    mask = (values > 500).float()
    two = backend.two_values(mask)
    if two is None or not backend.encode_mask(mask, two, memory, pages):
        raise RuntimeError("the CPU kernels took a mask for something else; reinstall numba")
    unpacked = torch.empty_like(mask)
    backend.decode_mask(unpacked, two, memory, pages)
    backend.encode_nonzero(mask, memory, pages)
    rectified = values - 10.0
    backend.rectify(rectified, memory, pages)
    slopes, ungrouped = torch.empty(1024), PlaneLayout(1024, 0, 128)
    backend.encode_slopes(values - 512, ungrouped, len(PLANE_WIDTHS), memory, pages)
    backend.decode_slopes(slopes, ungrouped, len(PLANE_WIDTHS), memory, pages)
    kept = (
        torch.equal(mask, unpacked) and torch.equal(mask > 0, rectified > 0) and torch.equal(values > 512, slopes > 0.5)
    )
    if not kept or (decoded - values).abs().max() > 0.51:
        raise RuntimeError("the CPU kernels do not give back what they were given; reinstall numba")
    return time.perf_counter() - started
