"""Kernels touch the memory they were given, and not a byte beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from daf_kernels import FixedPages, Seed, mask_pages
from daf_kernels.backend import Backend
from daf_kernels.layout import COLUMNS
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, HARD_MASKS, Make, each, flags, normal
from tests.kernels.harness import (
    CPU,
    PAGE_BYTES,
    REFERENCE,
    SEED,
    SENTINEL,
    Embedded,
    decode,
    encode,
    layout_of,
    pack_mask,
    used_bytes,
)

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]


@pytest.mark.parametrize("planes", [1, 4], ids="planes{}".format)
@pytest.mark.parametrize("seed", [pytest.param(None, id="nearest"), pytest.param(SEED, id="stochastic")])
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_encoding_writes_its_headers_and_planes_only(
    make: Make, dtype: torch.dtype, seed: Seed | None, planes: int
) -> None:
    """What a page holds besides them stays, and every byte of them is written, whatever was there before."""
    values = make(dtype)
    used = used_bytes(layout_of(values), planes)
    dirty, other = (encode(CPU, values, planes, seed, fill=fill)[0].content for fill in (SENTINEL, SENTINEL ^ 0xFF))
    assert (dirty[~used] == SENTINEL).all()
    assert torch.equal(dirty[used], other[used])


@pytest.mark.parametrize(("make", "dtype"), each(HARD_MASKS))
def test_packing_writes_its_bits_only(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype)
    two = CPU.two_values(values)
    assert two is not None
    size = -(-values.numel() // 256) * COLUMNS
    dirty, other = (pack_mask(CPU, values, two, fill)[0].content.view(-1) for fill in (SENTINEL, SENTINEL ^ 0xFF))
    assert (dirty[size:] == SENTINEL).all()
    assert torch.equal(dirty[:size], other[:size])


SHAPES = [(1,), (255,), (257,), (3, 79), (5, 50), (7, 300), (2, 4096), (65, 64)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", [1, 3], ids=["dense", "holes"])
def test_decoding_writes_its_elements_only(
    backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, step: int
) -> None:
    """The tensor lies in a buffer of sentinels: they stay, on either side and in its holes."""
    values = normal(*shape).to(dtype)
    memory, _ = encode(CPU, values, 4)
    out = Embedded(shape, dtype, step)
    backend.decode(out.tensor, layout_of(values), 4, memory, memory.pages)
    assert torch.equal(out.tensor, decode(REFERENCE, memory, values, 4))
    out.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", [1, 3], ids=["dense", "holes"])
def test_unpacking_writes_its_elements_only(
    backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, step: int
) -> None:
    values = flags(*shape).to(dtype)
    two = CPU.two_values(values)
    assert two is not None
    memory, _ = pack_mask(CPU, values, two)
    out = Embedded(shape, dtype, step)
    backend.decode_mask(out.tensor, two, memory, memory.pages)
    assert torch.equal(out.tensor, values)
    out.check()


def test_inputs_are_not_written() -> None:
    """Encoding reads: the tensor still belongs to the model."""
    values, ones = normal(5, 300), flags(700)
    copies = values.clone(), ones.clone()
    two = CPU.two_values(ones)
    assert two is not None
    encode(CPU, values, 4, SEED)
    pack_mask(CPU, ones, two)
    assert torch.equal(values, copies[0])
    assert torch.equal(ones, copies[1])


AT_THE_EDGE = """
import ctypes, mmap
import numpy as np
import torch
from daf_kernels import FixedPages, mask_pages, plane_layout
from daf_kernels.cpu.backend import CpuBackend

ROOM, keep = 1 << 20, []

def at_the_edge(count, dtype):
    region = mmap.mmap(-1, ROOM + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + ROOM), mmap.PAGESIZE, 0) == 0  # PROT_NONE
    keep.append(region)
    size = count * dtype.itemsize
    return torch.frombuffer(region, dtype=dtype, count=count, offset=ROOM - size)

class Edge(FixedPages):
    def __init__(self, count, page_bytes):
        self.page_bytes = page_bytes
        self._region = at_the_edge(count * page_bytes, torch.uint8).view(count, page_bytes)

backend = CpuBackend(threads=1)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for rows, row in ((1, 1), (1, 257), (5, 79), (3, 256), (9, 50), (65, 64), (3, 4000)):
        for seed in (None, (1, 2, 3, 4)):
            layout = plane_layout(rows * row, row, 128)
            values, out = (at_the_edge(rows * row, dtype).view(rows, row) for _ in range(2))
            values.copy_(torch.randn(rows, row))
            memory, pages = Edge(layout.pages(4), 128), np.arange(layout.pages(4))
            assert backend.encode(values, layout, 4, memory, pages, seed)
            backend.decode(out, layout, 4, memory, pages)
            backend.decode(out[:, ::2], plane_layout(out[:, ::2].numel(), row, 128), 1, memory, pages)
for dtype in (torch.bool, torch.int16, torch.float32, torch.int64):
    for size in (1, 255, 256, 257, 5000):
        values, out = at_the_edge(size, dtype), at_the_edge(size, dtype)
        values.copy_(torch.rand(size) < 0.5)
        memory, pages = Edge(mask_pages(size, 128), 128), np.arange(mask_pages(size, 128))
        two = backend.two_values(values)
        assert backend.encode_mask(values, two, memory, pages)
        backend.decode_mask(out, two, memory, pages)
        assert torch.equal(out, values)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects memory with Linux's mprotect")
def test_nothing_is_read_past_the_end() -> None:
    """Tensors and pages that end where the process may not read: a byte further would kill it."""
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-c", AT_THE_EDGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"


def test_fixed_pages_are_the_memory_at_their_addresses() -> None:
    """What is written to pages is read from them in any order, and lies at the addresses they name."""
    memory, order = FixedPages(5, 256), np.array([3, 0, 4])
    content = torch.arange(3 * 256).view(3, 256).to(torch.uint8)
    memory.write(order, content)
    assert torch.equal(memory.read(order[::-1].copy()), content.flip(0))
    addresses = memory.addresses(order)
    assert (addresses - addresses[1]).tolist() == [3 * 256, 0, 4 * 256]
    assert memory.page_bytes == 256
    assert mask_pages(256 * 8 + 1, PAGE_BYTES // 2) == 2
