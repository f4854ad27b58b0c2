"""The CPU backend: launches the numba kernels, split over threads, and stages tensors whose memory has holes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from daf_kernels.backend import (
    FixedPages,
    PageAddresses,
    PageMemory,
    Pages,
    Seed,
    TwoValues,
    WrongBytesError,
    bits_of_number,
    signed_words,
)
from daf_kernels.cpu import jobs as cpu_jobs
from daf_kernels.cpu import masks as cpu_masks
from daf_kernels.cpu import ranges as cpu_ranges
from daf_kernels.cpu.bits import BFLOAT16, FLOAT16, FLOAT32
from daf_kernels.cpu.direct import DirectCodec
from daf_kernels.cpu.jobs import TILE, Kernel
from daf_kernels.cpu.thread_team import WORDS_BYTES, Scratch, Team, launch, parallel_function
from daf_kernels.layout import BLOCK, PLANE_WIDTHS, PRECISIONS, PlaneLayout, mask_pages, sampled_groups
from daf_kernels.reference.gelu_derivative import inputs_of_codes

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

SPLIT = 1 << 16
"""Elements in a part for a thread, 20 to 50 us of work; calling the team takes about 1."""

STAGE = 1 << 16
"""Elements of a tensor with holes that are copied together at a time, 256 kB of float32."""

_NO_SEED = np.zeros(4, np.uint64)
_NO_SEED_ADDRESS = _NO_SEED.ctypes.data


class CpuBackend:
    """Numba kernels for tensors in the memory of a CPU.

    Args:
        threads: Threads of torch's that large tensors are split over at most; all of them by default.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._team = Team(threads)
        self._scratch = Scratch()

    def limit_threads(self, count: int) -> None:
        """See `Backend.limit_threads`."""
        self._team.limit(count)

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
        random = None if seed is None else np.array(seed, np.uint64)  # stays until the kernel has run
        encoder = _encoder if random is None else _encoder.__wrapped__  # no two seeds have one address for long
        kernel = encoder(layout, planes, values.dtype, None if random is None else random.ctypes.data)
        return self._over(values, kernel, memory, pages, load=True) == 0

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode`."""
        self._over(out, _decoder(layout, planes, out.dtype), memory, pages, store=True)

    def direct_planes(
        self, layout: PlaneLayout, planes: int, dtype: torch.dtype, row: int, device: torch.device
    ) -> DirectCodec | None:
        """See `DirectBackend.direct_planes`."""
        if layout.elements > SPLIT or (row and (dtype is not torch.float32 or layout.elements % row)):
            return None
        return _direct_planes(layout, planes, dtype, row)

    def direct_mask(
        self, elements: int, dtype: torch.dtype, page_bytes: int, device: torch.device
    ) -> DirectCodec | None:
        """See `DirectBackend.direct_mask`."""
        return None if elements > SPLIT or dtype.itemsize == 8 else _direct_mask(elements, dtype, page_bytes)

    def encode_slopes(self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_slopes`."""
        kernel = _of_slopes(cpu_jobs.encode_slopes, layout, values.dtype, planes)
        return self._over(values, kernel, memory, pages, load=True) == 0

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_slopes`."""
        kernel = _of_slopes(cpu_jobs.decode_slopes, layout, out.dtype, planes, inputs_of_codes()[planes].ctypes.data)
        self._over(out, kernel, memory, pages, store=True)

    def two_values(self, values: Tensor) -> TwoValues | None:
        """See `Backend.two_values`."""
        if not values.is_contiguous():
            head = values.new_empty(min(values.numel(), BLOCK))
            self._copy(values, 0, head.numel(), head, into_dense=True)
            found = self._probe(head)
            if found is None or found[0] != found[1]:
                return found
            values = values.contiguous()
        return self._probe(values)

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_mask`."""
        kernel = _of_mask(cpu_jobs.encode_mask, values.element_size(), *signed_words(two))
        return self._over(values, kernel, memory, pages, load=True) == 0

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_mask`."""
        kernel = _of_mask(cpu_jobs.decode_mask, out.element_size(), *signed_words(two))
        self._over(out, kernel, memory, pages, store=True)

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.encode_nonzero`."""
        self._over(values, _of_mask(cpu_jobs.encode_nonzero, values.element_size()), memory, pages, load=True)

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.rectify`."""
        least = bits_of_number(torch.finfo(out.dtype).tiny, out.dtype)
        kernel = _of_mask(cpu_jobs.rectify, out.element_size(), least)
        self._over(out, kernel, memory, pages, load=True, store=True)

    def _sample(self, values: Tensor, layout: PlaneLayout, count: int, step: int, size: int) -> Tensor:
        """Returns dense copies of `count` scaling groups that are `step` groups apart."""
        groups = values.new_empty((count, size))
        for index, into in enumerate(groups):
            first = index * step * layout.group
            self._copy(values, first, first + size, into, into_dense=True)
        return groups

    def _probe(self, values: Tensor) -> TwoValues | None:
        scratch = self._scratch.reserve(BLOCK)
        zero, one, others = cpu_masks.probe(values.data_ptr(), values.element_size(), values.numel(), scratch)
        return None if others else (zero, one)

    def _over(
        self,
        values: Tensor,
        kernel: Kernel,
        memory: PageMemory,
        pages: Pages,
        load: bool = False,
        store: bool = False,
    ) -> int:
        """Runs a kernel over all elements and returns the sum of what it returns.

        A tensor whose memory has holes is worked on in a dense buffer, loaded from and stored to it `STAGE` elements at
        a time.
        """
        addresses, shift = memory.addresses(pages), memory.page_bytes.bit_length() - 1
        count = values.numel()
        if values.is_contiguous():
            return self._run(kernel, values.data_ptr(), shift, addresses, 0, count)
        size = values.element_size()
        stage = max(kernel.tile, STAGE // kernel.tile * kernel.tile)
        buffer = values.new_empty(min(stage, count))
        total = 0
        for start in range(0, count, stage):
            end = min(start + stage, count)
            if load:
                self._copy(values, start, end, buffer, into_dense=True)
            total += self._run(kernel, buffer.data_ptr() - size * start, shift, addresses, start, end)
            if store:
                self._copy(values, start, end, buffer, into_dense=False)
        return total

    def _run(self, kernel: Kernel, origin: int, shift: int, addresses: Pages, first: int, stop: int) -> int:
        """Runs a kernel over some elements, of which number 0 lies, or would lie, at address `origin`."""
        threads, step, stride = 1, stop - first, kernel.stride
        if step > SPLIT and (threads := self._team.threads) > 1:
            step = max(SPLIT // kernel.tile, 1) * kernel.tile
        scratch = self._scratch.reserve(WORDS_BYTES + threads * stride)
        return launch(
            parallel_function(), kernel.job, threads, kernel.address, kernel.count, origin, shift, first, stop, step,
            scratch, stride, addresses,
        )  # fmt: skip

    def _copy(self, values: Tensor, first: int, stop: int, buffer: Tensor, into_dense: bool) -> None:
        shape, strides = np.array(values.shape, np.int64), np.array(values.stride(), np.int64)
        cpu_masks.copy_strided(
            values.data_ptr(), shape, strides, values.element_size(), first, stop, buffer.data_ptr(), into_dense
        )


@lru_cache(maxsize=1024)
def _direct_planes(layout: PlaneLayout, planes: int, dtype: torch.dtype, row: int) -> DirectCodec:
    kernels = _encoder(layout, planes, dtype, None), _decoder(layout, planes, dtype)
    return DirectCodec(kernels, layout.elements, dtype.itemsize, layout.page_bytes, layout.pages(planes), row)


@lru_cache(maxsize=1024)
def _direct_mask(elements: int, dtype: torch.dtype, page_bytes: int) -> DirectCodec:
    kernels = [_of_mask(job, dtype.itemsize, 0, 0) for job in (cpu_jobs.encode_mask, cpu_jobs.decode_mask)]
    return DirectCodec(kernels, elements, dtype.itemsize, page_bytes, mask_pages(elements, page_bytes), None)


@lru_cache(maxsize=1024)
def _encoder(layout: PlaneLayout, planes: int, dtype: torch.dtype, seed: int | None) -> Kernel:
    """Returns the kernel that encodes, with the address of a seed if it rounds at random."""
    tile, starts = _tiling(layout)
    levels = 2 ** PRECISIONS[max(planes, 1) - 1] - 1
    noise_bytes = 0 if seed is None else 2 * tile
    scratch = tile + noise_bytes + 24 * (tile // layout.group) + 1024
    own = (layout.group, tile, planes, levels, noise_bytes, _NO_SEED_ADDRESS if seed is None else seed)
    return Kernel(cpu_jobs.encode_planes, KINDS[dtype], own, tile, scratch, starts)


@lru_cache(maxsize=1024)
def _decoder(layout: PlaneLayout, planes: int, dtype: torch.dtype) -> Kernel:
    """Returns the kernel that decodes."""
    tile, starts = _tiling(layout)
    scratch = tile + 16 * (tile // layout.group)
    return Kernel(cpu_jobs.decode_planes, KINDS[dtype], (layout.group, tile, planes), tile, scratch, starts)


@lru_cache(maxsize=1024)
def _of_mask(job: Callable[..., None], size: int, *own: int) -> Kernel:
    """Returns a kernel for masks or signs with its own words: to make one anew takes .1 ms."""
    return Kernel(job, size, own)


@lru_cache(maxsize=1024)
def _of_slopes(job: Callable[..., None], layout: PlaneLayout, dtype: torch.dtype, *own: int) -> Kernel:
    """Returns a kernel for derivatives of GELU."""
    return Kernel(job, KINDS[dtype], own, TILE, 5 * BLOCK, _tiling(layout)[1])


@lru_cache(maxsize=1024)
def _tiling(layout: PlaneLayout) -> tuple[int, Pages]:
    """Returns the elements to encode at a time and where each plane's pages start."""
    starts = np.array([layout.plane_start(plane) for plane in range(len(PLANE_WIDTHS))], np.int64)
    return layout.tile * max(1, TILE // layout.tile), starts


def warm_up() -> float:
    """Compiles the kernels, or loads them from numba's disk cache, and returns the seconds it took.

    Raises:
        WrongBytesError: The kernels do not give back what they were given; the numba installation is broken.
    """
    started = time.perf_counter()
    backend, layout = CpuBackend(threads=1), PlaneLayout(1024, 256, 128)
    values = torch.arange(1024, dtype=torch.float32, device="cpu")
    memory = FixedPages(layout.pages(len(PLANE_WIDTHS)), layout.page_bytes)
    pages = np.arange(layout.pages(len(PLANE_WIDTHS)))
    decoded = values.new_zeros(1024, 2)[:, 0]  # zeros: what is left in memory may be what is expected
    backend.encode(values, layout, len(PLANE_WIDTHS), memory, pages, None)
    backend.relative_range(values, layout)
    backend.decode(decoded, layout, len(PLANE_WIDTHS), memory, pages)
    mask = (values > 500).float()
    two = backend.two_values(mask)
    if two is None or not backend.encode_mask(mask, two, memory, pages):
        raise WrongBytesError("the CPU kernels took a mask for something else; reinstall numba")
    unpacked = torch.zeros_like(mask)
    backend.decode_mask(unpacked, two, memory, pages)
    backend.encode_nonzero(mask, memory, pages)
    rectified = values - 10.0
    backend.rectify(rectified, memory, pages)
    slopes, ungrouped = torch.zeros_like(values), PlaneLayout(1024, 0, 128)
    backend.encode_slopes(values - 512, ungrouped, len(PLANE_WIDTHS), memory, pages)
    backend.decode_slopes(slopes, ungrouped, len(PLANE_WIDTHS), memory, pages)
    _warm_up_direct(backend, values, mask, layout, memory, pages)
    kept = (
        torch.equal(mask, unpacked) and torch.equal(mask > 0, rectified > 0) and torch.equal(values > 512, slopes > 0.5)
    )
    if not kept or (decoded - values).abs().max() > 0.51:
        raise WrongBytesError("the CPU kernels do not give back what they were given; reinstall numba")
    return time.perf_counter() - started


def _warm_up_direct(
    backend: CpuBackend, values: Tensor, mask: Tensor, layout: PlaneLayout, memory: FixedPages, pages: Pages
) -> None:
    addresses = PageAddresses(memory.addresses(pages))
    planes = backend.direct_planes(layout, len(PLANE_WIDTHS), values.dtype, 0, values.device)
    packed = backend.direct_mask(mask.numel(), mask.dtype, memory.page_bytes, mask.device)
    assert planes is not None
    assert packed is not None
    unpacked = torch.zeros_like(mask)
    wrong = planes.encode(values.data_ptr(), addresses)[0]
    answer, zero, one, _ = packed.encode(mask.data_ptr(), addresses)
    packed.decode(unpacked.data_ptr(), addresses, (zero, one))
    if wrong or answer or not torch.equal(mask, unpacked):
        raise WrongBytesError("the CPU kernels took numbers for something else; reinstall numba")
