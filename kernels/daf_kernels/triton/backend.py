"""The Triton backend: GPUs, and, interpreted, a machine that has none."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daf_kernels.backend import (
    DeviceFlag,
    DirectCodec,
    FixedPages,
    PageMemory,
    Pages,
    Seed,
    TwoValues,
    WrongBytesError,
    bits_of_elements,
    signed_words,
)
from daf_kernels.layout import BLOCK, PLANE_WIDTHS, PlaneLayout
from daf_kernels.reference import codec as reference
from daf_kernels.reference.backend import ReferenceBackend, sample_groups
from daf_kernels.reference.gelu_derivative import inputs_of_codes
from daf_kernels.triton.autotune import Selector, cuda_timer, default_file, problem_class
from daf_kernels.triton.direct import DirectCodec as GpuCodec
from daf_kernels.triton.direct import Launches
from daf_kernels.triton.flags import Flags
from daf_kernels.triton.gelu_derivative import decode_slopes, encode_slopes
from daf_kernels.triton.groups import decode_groups, encode_blocks, encode_groups
from daf_kernels.triton.launch import launch, launch_over_blocks, launches_over_blocks, prepared
from daf_kernels.triton.masks import decode_mask, encode_mask, encode_nonzero, rectify
from daf_kernels.triton.numerics import INTERPRETED
from daf_kernels.triton.page_tables import PageTables
from daf_kernels.triton.planes import decode_fused, encode_fused
from daf_kernels.triton.reduction import group_ranges, strategies

FUSED_GROUPS = (32, 64, 128, 256)
"""Groups that are whole rows of a packing block: one kernel reads each element once."""

GROUPS = {"GROUPS": 32} if INTERPRETED.value else {"GROUPS": 2, "num_warps": 1}
"""Groups of a program where they do not follow packing blocks. A single warp finds the sums of a group without waiting
for others, and repeats what is done once a group for 8 elements of it in each thread; 4 warps did for 2, in 2.4 times
the instructions of sm_90. With 4 groups, a thread that decodes needs more than its 255 registers. An interpreted
program costs 40 ms whatever its size."""

MOST_CODECS = 1024
"""Codecs that are kept: a step of RoBERTa-base has some ten for each length of its batch."""

_NO_SEED: Seed = (0, 0, 0, 0)
_ENCODING, _DECODING = (torch.int64, torch.int32), (torch.int64,)
"""Types of what a kernel is given besides the elements: addresses of pages, and a flag."""


class TritonBackend:
    """Triton kernels. Tensors with holes go through dense copies.

    Args:
        selector: Chooses between ways of doing the same; by rule alone by default.
    """

    def __init__(self, selector: Selector | None = None) -> None:
        self._torch = ReferenceBackend()
        self._selector = selector or Selector(torch.device("cpu"))
        self._tables = PageTables()
        self._flags = Flags()
        self._codecs: dict[tuple[object, ...], DirectCodec] = {}

    def limit_threads(self, count: int) -> None:
        """See `Backend.limit_threads`; kernels run on the GPU."""

    def group_ranges(self, values: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Returns the minimum and the maximum of groups by the strategy that is fastest here; see `group_ranges`."""
        problem = problem_class("range", values.dtype, values.numel() // group, group)
        ways = {name: partial(group_ranges, values, group, name) for name in strategies(group)}
        return ways[self._selector.choose(problem, ways)]()

    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        """See `Backend.relative_range`."""
        sample = sample_groups(values, layout)
        minimum, maximum = self.group_ranges(sample.view(-1), sample.shape[1])
        squares = (maximum - minimum).double().square().sum()
        variances = sample.double().var(1, correction=0).sum()
        return float(torch.where(variances == 0, 0.0, squares / variances))

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool | DeviceFlag:
        """See `Backend.encode`."""
        values = _flat(values)
        table, flag = self._tables.table(memory, pages, values.device), self._flags.take(values.device)
        arguments = (values, table, flag.pointer, layout, planes, memory.page_bytes, seed)
        ways = {"two kernels": partial(_encode_in_two, *arguments)}
        if layout.group in FUSED_GROUPS:
            ways = {"fused": partial(_encode_fused, *arguments), **ways}
        ways[self._selector.choose(_problem(layout, planes, values.dtype, seed), ways)]()
        return flag.unless()

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode`."""
        table, headers = self._tables.table(memory, pages, out.device), _decoder_constants(layout, planes, out.dtype)
        with _dense(out) as dense:
            if layout.group in FUSED_GROUPS:
                launch_over_blocks(
                    decode_fused,
                    (dense, table),
                    _starts(layout),
                    memory.page_bytes,
                    planes,
                    GROUP=layout.group,
                    **headers,
                )
            else:
                numbers = (dense.numel(), layout.group, *_starts(layout))
                shift = memory.page_bytes.bit_length() - 1
                launch(decode_groups, _programs(layout), (dense, table), numbers, SHIFT=shift, **GROUPS, **headers)

    def direct_planes(
        self, layout: PlaneLayout, planes: int, dtype: torch.dtype, row: int, device: torch.device
    ) -> DirectCodec | None:
        """See `DirectBackend.direct_planes`; only what one kernel encodes."""
        if row or layout.group not in FUSED_GROUPS:
            return None
        known = self._codecs.get(key := (layout, planes, dtype, device))
        if known is not None:
            return known
        if self._selector.known(_problem(layout, planes, dtype, None), "fused") != "fused":
            return None
        starts, size = _starts(layout), (layout.elements, dtype, layout.page_bytes, planes, device)
        header = {"GROUP": layout.group, **_header_constants(layout, planes, None)}
        encodes = _prepared_over_blocks(encode_fused, _ENCODING, (*starts, *_NO_SEED), *size, **header)
        decoder = {"GROUP": layout.group, **_decoder_constants(layout, planes, dtype)}
        decodes = partial(_prepared_over_blocks, decode_fused, _DECODING, starts, *size, **decoder)
        return None if encodes is None else self._keep(key, GpuCodec(device, encodes, decodes, self._flags))

    def direct_mask(
        self, elements: int, dtype: torch.dtype, page_bytes: int, device: torch.device
    ) -> DirectCodec | None:
        """See `DirectBackend.direct_mask`; only of bools, and of floats, which are never taken for a mask."""
        known = self._codecs.get(key := (elements, dtype, page_bytes, device))
        if known is not None:
            return known
        if dtype.is_floating_point and not INTERPRETED.value:
            return self._keep(key, GpuCodec(device, (), lambda: None, None))
        if dtype is not torch.bool:
            return None
        size = elements, torch.uint8, page_bytes, 1, device
        encodes = _prepared_over_blocks(encode_nonzero, _DECODING, (), *size)
        decodes = partial(_prepared_over_blocks, decode_mask, _DECODING, (0, 1), *size)
        return None if encodes is None else self._keep(key, GpuCodec(device, encodes, decodes, None))

    def encode_slopes(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages
    ) -> bool | DeviceFlag:
        """See `Backend.encode_slopes`."""
        values = _flat(values)
        table, flag = self._tables.table(memory, pages, values.device), self._flags.take(values.device)
        pointers = (values, table, flag.pointer)
        launch_over_blocks(encode_slopes, pointers, _starts(layout), memory.page_bytes, planes, PLANES=planes)
        return flag.unless()

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_slopes`."""
        inputs = _inputs_of_codes(out.device)[planes]
        table = self._tables.table(memory, pages, out.device)
        with _dense(out) as dense:
            pointers = (dense, table, inputs)
            launch_over_blocks(decode_slopes, pointers, _starts(layout), memory.page_bytes, planes, PLANES=planes)

    def two_values(self, values: Tensor) -> TwoValues | None:
        """See `Backend.two_values`; floats on a GPU are not looked at.

        To wait for what is in them would leave the GPU without work at each, and its dropouts save masks of bools.
        """
        if values.dtype is torch.bool:
            return 0, 1
        if values.is_floating_point() and not INTERPRETED.value:
            return None
        if self._torch.two_values(values.reshape(-1)[:BLOCK]) is None:
            return None
        return self._torch.two_values(values)

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_mask`; of bools, which a GPU's dropouts save, none is a third: nothing is waited for."""
        bits = bits_of_elements(_flat(values))
        if values.dtype is torch.bool:
            self.encode_nonzero(bits, memory, pages)
            return True
        table, flag = self._tables.table(memory, pages, values.device), self._flags.take(values.device)
        launch_over_blocks(encode_mask, (bits, table, flag.pointer), signed_words(two), memory.page_bytes, 1)
        return bool(flag.unless())

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_mask`."""
        table = self._tables.table(memory, pages, out.device)
        with _dense(out) as dense:
            bits = bits_of_elements(dense)
            launch_over_blocks(decode_mask, (bits, table), signed_words(two), memory.page_bytes, 1)

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.encode_nonzero`."""
        table = self._tables.table(memory, pages, values.device)
        launch_over_blocks(encode_nonzero, (_flat(values), table), (), memory.page_bytes, 1)

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.rectify`."""
        table, tiny = self._tables.table(memory, pages, out.device), torch.finfo(out.dtype).tiny
        with _dense(out, load=True) as dense:
            launch_over_blocks(rectify, (dense, table), (), memory.page_bytes, 1, TINY=tiny)

    def _keep(self, key: tuple[object, ...], codec: DirectCodec) -> DirectCodec:
        if len(self._codecs) >= MOST_CODECS:
            self._codecs.clear()
        self._codecs[key] = codec
        return codec


def _prepared_over_blocks(
    kernel: Any, pointers: Sequence[torch.dtype], numbers: Sequence[int], elements: int, dtype: torch.dtype,
    page_bytes: int, planes: int, device: torch.device, **constants: Any,
) -> Launches | None:  # fmt: skip
    """Returns the launches of `launch_over_blocks`, given the types of the pointers after the first; see `prepared`."""
    nbytes, launches = elements * dtype.itemsize, []
    for programs, first, own in launches_over_blocks(elements, dtype.itemsize, page_bytes, planes):
        launch_again = prepared(
            kernel, programs, device, (dtype, *pointers), nbytes, (elements, first, *numbers), **constants, **own
        )
        if launch_again is None:
            return None
        launches.append(launch_again)
    return launches


def _problem(layout: PlaneLayout, planes: int, dtype: torch.dtype, seed: Seed | None) -> str:
    """Returns the class of problems that an encoding belongs to."""
    # Pages of a rehearsal are so small that a program has a few blocks, which says nothing of those of training.
    name = f"encode {planes} on {layout.page_bytes}" + (" stochastic" if seed else "")
    return problem_class(name, dtype, layout.groups, layout.group)


def _flat(values: Tensor) -> Tensor:
    """Returns the elements densely, of shape (elements,)."""
    return values.contiguous().view(-1)


def _encode_fused(
    values: Tensor,
    table: Tensor,
    flag: Tensor,
    layout: PlaneLayout,
    planes: int,
    page_bytes: int,
    seed: Seed | None,
) -> None:
    launch_over_blocks(
        encode_fused,
        (values, table, flag),
        (*_starts(layout), *(seed or _NO_SEED)),
        page_bytes,
        planes,
        GROUP=layout.group,
        **_header_constants(layout, planes, seed),
    )


def _encode_in_two(
    values: Tensor,
    table: Tensor,
    flag: Tensor,
    layout: PlaneLayout,
    planes: int,
    page_bytes: int,
    seed: Seed | None,
) -> None:
    lows, inverses = torch.empty(2, layout.groups, dtype=torch.float32, device=values.device)
    launch(
        encode_groups,
        _programs(layout),
        (values, table, flag, lows, inverses),
        (values.numel(), layout.group),
        **GROUPS,
        **_header_constants(layout, planes, seed),
    )
    if planes:
        launch_over_blocks(
            encode_blocks,
            (values, table, lows, inverses),
            (layout.group, *_starts(layout), *(seed or _NO_SEED)),
            page_bytes,
            planes,
            PLANES=planes,
            STOCHASTIC=seed is not None,
        )


def _programs(layout: PlaneLayout) -> int:
    return -(-layout.groups // GROUPS["GROUPS"])


def _decoder_constants(layout: PlaneLayout, planes: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"PLANES": planes, "PER_PAGE": layout.headers_per_page, "LIMIT": torch.finfo(dtype).max}


def _header_constants(layout: PlaneLayout, planes: int, seed: Seed | None) -> dict[str, int]:
    return {"PLANES": planes, "PER_PAGE": layout.headers_per_page, "STOCHASTIC": seed is not None}


@contextmanager
def _dense(out: Tensor, load: bool = False) -> Generator[Tensor]:
    """Gives a dense tensor of shape (elements,) whose content becomes that of `out`."""
    if out.is_contiguous():
        yield out.view(-1)
        return
    dense = _flat(out) if load else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    yield dense
    out.copy_(dense.view(out.shape))


@lru_cache(maxsize=4096)
def _starts(layout: PlaneLayout) -> tuple[int, ...]:
    """Returns where the pages of each plane start; to find them is a fifth of what the host does for a tensor."""
    return tuple(layout.plane_start(plane) for plane in range(len(PLANE_WIDTHS)))


@lru_cache(maxsize=8)
def _inputs_of_codes(device: torch.device) -> Tensor:
    return torch.from_numpy(inputs_of_codes()).to(device)


def load(device: torch.device) -> TritonBackend:
    """Returns the kernels for a GPU, after a look at what they give.

    Raises:
        WrongBytesError: They give other bytes than the reference.
    """
    backend = TritonBackend(Selector(device, cuda_timer(device), default_file()))
    layout = PlaneLayout(4 * BLOCK, BLOCK, 128)
    values = torch.arange(float(layout.elements), device=device)
    memory = FixedPages(layout.pages(len(PLANE_WIDTHS)), layout.page_bytes, device)
    pages = np.arange(layout.pages(len(PLANE_WIDTHS)))
    memory.write(pages, torch.zeros(pages.size, layout.page_bytes, dtype=torch.uint8, device=device))
    TritonBackend().encode(values, layout, len(PLANE_WIDTHS), memory, pages, None)
    out = torch.empty_like(values)
    backend.decode(out, layout, len(PLANE_WIDTHS), memory, pages)
    expected = reference.encode(values, layout, len(PLANE_WIDTHS))
    if not torch.equal(memory.read(pages), expected) or float((out - values).abs().max()) > 0.51:
        raise WrongBytesError(
            f"the Triton kernels give other bytes than the reference on {torch.cuda.get_device_name(device)}; "
            'reinstall triton, or set backend="reference"'
        )
    return backend
