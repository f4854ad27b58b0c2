"""Results of a ReLU: what was zero comes back as zero, and what was not comes back positive."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from daf_kernels import mask_pages
from daf_kernels.backend import Backend
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, flags, normal
from tests.kernels.harness import CPU, PAGE_BYTES, REFERENCE, SENTINEL, Embedded, GuardedPages, bits, decode, encode

BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]


def nonzero_bits(backend: Backend, values: Tensor, fill: int = 0) -> GuardedPages:
    """Packs where a tensor is not zero into new pages."""
    memory = GuardedPages(mask_pages(values.numel(), PAGE_BYTES), PAGE_BYTES, fill, values.device)
    backend.encode_nonzero(values, memory, memory.pages)
    return memory


def rectified(backend: Backend, memory: GuardedPages, values: Tensor) -> Tensor:
    """Rectifies a dense copy of a tensor."""
    out = values.clone(memory_format=torch.contiguous_format)
    backend.rectify(out, memory, memory.pages)
    return out


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_rectified_bits_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    """Both backends pack the same bytes, and give the same values, NaNs as decoding makes them among them."""
    values = make(dtype)
    values.masked_fill_(values.isnan(), math.nan)
    found, expected = nonzero_bits(CPU, values), nonzero_bits(REFERENCE, values)
    assert torch.equal(found.content, expected.content)
    assert torch.equal(bits(rectified(CPU, found, values)), bits(rectified(REFERENCE, expected, values)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_signs_of_a_relu_come_back(backend: Backend, dtype: torch.dtype) -> None:
    """Zeros of either sign stay zero; what decoding took to zero or below becomes the smallest normal number."""
    tiny = torch.finfo(dtype).tiny
    saved = torch.tensor(
        [0.0, -0.0, tiny * torch.finfo(dtype).eps, 1.0, 1.0, 1.0, 1.0, 2.0, 0.0, math.nan], dtype=dtype
    )
    decoded = torch.tensor([3.0, -2.0, 0.0, -0.5, -0.0, tiny / 2, -math.inf, 2.5, math.inf, math.nan], dtype=dtype)
    expected = torch.tensor([0.0, 0.0, tiny, tiny, tiny, tiny, tiny, 2.5, 0.0, math.nan], dtype=dtype)
    assert torch.equal(bits(rectified(backend, nonzero_bits(backend, saved), decoded)), bits(expected))


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_lost_group_stays_lost(value: float, dtype: torch.dtype) -> None:
    """Rectifying compares bits, and a NaN with a sign would be below zero: decoding must not make such."""
    values = normal(3, 256).relu().to(dtype)
    values[1, :9] = value
    memory = encode(CPU, values, 4)[0]
    out = rectified(CPU, nonzero_bits(CPU, values), decode(CPU, memory, values, 4))
    assert out[1][values[1] != 0].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 255, 257, 5000])
@pytest.mark.parametrize("step", [1, 3], ids=["dense", "holes"])
def test_rectifying_writes_its_elements_only(backend: Backend, size: int, dtype: torch.dtype, step: int) -> None:
    values = normal(size).relu().to(dtype)
    memory, out = nonzero_bits(backend, values), Embedded((size,), dtype, step)
    out.tensor.copy_(normal(size, seed=1))
    expected = torch.where(values > 0, out.tensor.clamp_min(torch.finfo(dtype).tiny), 0.0)
    backend.rectify(out.tensor, memory, memory.pages)
    assert torch.equal(out.tensor, expected)
    out.check()


@pytest.mark.parametrize("size", [1, 256, 257, 5000])
def test_packing_nonzeros_writes_its_bits_only(size: int) -> None:
    """What a page holds besides them stays, and every byte of them is written, whatever was there before."""
    values, used = normal(size).relu(), -(-size // 256) * 32
    dirty, other = (nonzero_bits(CPU, values, fill).content.view(-1) for fill in (SENTINEL, SENTINEL ^ 0xFF))
    assert (dirty[used:] == SENTINEL).all()
    assert torch.equal(dirty[:used], other[:used])


@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, holes: bool) -> None:
    """A tensor that is split over threads, and staged in pieces, is packed and rectified as one that is not."""
    values = (normal(60001, 2) * flags(60001, 2))[:, 0]
    values = values if holes else values.contiguous()
    monkeypatch.setattr(cpu, "SPLIT", 512)
    monkeypatch.setattr(cpu, "STAGE", 8192)
    split = CpuBackend(threads=3)
    memory, expected = nonzero_bits(split, values), rectified(REFERENCE, nonzero_bits(REFERENCE, values), values)
    assert torch.equal(memory.content, reference.encode_mask(values != 0, torch.tensor(True), PAGE_BYTES))
    split.rectify(values, memory, memory.pages)
    assert torch.equal(values, expected)
