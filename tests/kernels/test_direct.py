"""What works by address gives the bytes and answers of the backend's other functions."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from daf_core.codecs.planes import spreads_differ
from daf_core.codecs.scaling_groups import Grouping
from daf_kernels import FixedPages, PageAddresses, plane_layout
from daf_kernels.cpu import backend as cpu_backend
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.cpu.direct import DECLINED
from tests.core.harness import normal

ROW, ROWS, PAGE = 64, 64, 512
CPU = torch.device("cpu")


def _spread(scale: float, value: float | None = None) -> torch.Tensor:
    """Returns rows of which one spreads otherwise; a value of another one is replaced."""
    values = normal(ROWS, ROW)
    values[5] *= scale
    if value is not None:
        values[9, 3] = value
    return values


INPUTS = {
    "alike": _spread(1.0),
    "nearly": _spread(1 / 8),
    "narrow": _spread(1 / 64),
    "wide": _spread(64.0),
    "constant": _spread(0.0),
    "nan": _spread(1 / 64, math.nan),
    "negative nan": _spread(1 / 64, -math.nan),
    "infinite": _spread(1.0, math.inf),
    "infinite row": _spread(1.0).index_fill(0, torch.tensor([7]), math.inf),
    "both": _spread(1.0, -math.inf).index_fill(0, torch.tensor([7]), 0.0),
}


@pytest.mark.parametrize("values", INPUTS.values(), ids=INPUTS)
def test_rows_that_spread_otherwise_are_declined(values: torch.Tensor) -> None:
    """As `spreads_differ` says, whatever is not finite."""
    layout = plane_layout(values.numel(), ROW, PAGE)
    memory = FixedPages(layout.pages(3), PAGE)
    addresses = PageAddresses(memory.addresses(np.arange(layout.pages(3))))
    codec = CpuBackend().direct_planes(layout, 3, values.dtype, ROW, CPU)
    assert codec is not None
    answer = codec.encode(values.data_ptr(), addresses)[0]
    assert (answer == DECLINED) is spreads_differ(values, Grouping(ROW))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("planes", [1, 2, 3, 4])
def test_codes_are_those_of_the_backend(planes: int, dtype: torch.dtype) -> None:
    """Written by one, and read by the other."""
    backend, values = CpuBackend(), normal(20, 300).to(dtype)
    layout = plane_layout(values.numel(), 300, PAGE)
    pages = np.arange(layout.pages(planes))
    memory = FixedPages(pages.size, PAGE)
    addresses = PageAddresses(memory.addresses(pages))
    codec = backend.direct_planes(layout, planes, dtype, 0, CPU)
    assert codec is not None
    expected, crossed, found = (torch.empty_like(values) for _ in range(3))
    assert backend.encode(values, layout, planes, memory, pages, None)
    backend.decode(expected, layout, planes, memory, pages)
    codec.decode(crossed.data_ptr(), addresses, (0, 0))
    memory.write(pages, torch.zeros(pages.size, PAGE, dtype=torch.uint8))
    assert codec.encode(values.data_ptr(), addresses)[0] == 0
    backend.decode(found, layout, planes, memory, pages)
    assert torch.equal(expected, crossed)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_masks_come_back(dtype: torch.dtype) -> None:
    """With their two values, which are read from what is packed; three are declined."""
    mask = (normal(900) > 0).to(dtype)
    codec = CpuBackend().direct_mask(mask.numel(), dtype, PAGE, CPU)
    assert codec is not None
    memory, found = FixedPages(1, PAGE), torch.empty_like(mask)
    addresses = PageAddresses(memory.addresses(np.arange(1)))
    answer, zero, one, _ = codec.encode(mask.data_ptr(), addresses)
    codec.decode(found.data_ptr(), addresses, (zero, one))
    assert answer == 0
    assert torch.equal(found, mask)
    if dtype is not torch.bool:
        mask[-1] = 0.5
        assert codec.encode(mask.data_ptr(), addresses)[0] != 0


def test_a_codec_keeps_what_it_has_the_address_of() -> None:
    """Caches forget layouts after so many others, and codecs that are still in use go on."""
    codec = CpuBackend().direct_planes(plane_layout(8192, ROW, PAGE), 3, torch.float32, 0, CPU)
    starts = weakref.ref(cpu_backend._tiling(plane_layout(8192, ROW, PAGE))[1])
    for name in ("_tiling", "_encoder", "_decoder", "_direct_planes"):
        getattr(cpu_backend, name).cache_clear()
    gc.collect()
    assert codec is not None
    assert starts() is not None
    del codec
    assert starts() is None
