"""Two-valued tensors come back bit for bit from one bit an element, and others are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf_kernels.backend import Backend
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import HARD_MASKS, Make, each, flags, nan_payloads
from tests.kernels.harness import CPU, PAGE_BYTES, REFERENCE, bit_patterns, pack_mask, unpack_mask

BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("make", "dtype"), each(HARD_MASKS))
def test_masks_come_back_bit_for_bit(backend: Backend, make: Make, dtype: torch.dtype) -> None:
    """Whatever the type, the values, the strides and the length: what was packed is unpacked."""
    values = make(dtype)
    two = backend.two_values(values)
    assert two is not None
    assert {pattern & _all_ones(values) for pattern in bit_patterns(values).tolist()} == set(two)
    memory, answer = pack_mask(backend, values, two)
    assert answer
    assert torch.equal(bit_patterns(unpack_mask(backend, memory, two, values)), bit_patterns(values))


@pytest.mark.parametrize(("make", "dtype"), each(HARD_MASKS))
def test_packed_masks_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    """Both backends write the same bytes and read each other's."""
    values = make(dtype)
    two = CPU.two_values(values)
    assert two is not None
    found, expected = pack_mask(CPU, values, two)[0], pack_mask(REFERENCE, values, two)[0]
    assert torch.equal(found.content, expected.content)
    assert torch.equal(
        bit_patterns(unpack_mask(CPU, expected, two, values)), bit_patterns(unpack_mask(REFERENCE, found, two, values))
    )


def _all_ones(values: Tensor) -> int:
    return (1 << 8 * values.element_size()) - 1


def _third(index: int, dtype: torch.dtype = torch.float32, size: int = 5000) -> Tensor:
    values = flags(size).to(dtype)
    values[index] = 3
    return values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [2, 100, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
def test_a_third_value_at_the_beginning_is_no_mask(backend: Backend, dtype: torch.dtype, index: int) -> None:
    """Normal numbers are told from masks by their first block, without reading the rest."""
    values = _third(index, dtype)
    assert backend.two_values(values) is None
    assert backend.two_values(torch.stack([values, values], 1)[:, 0]) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [256, 4095, 4096, 4864, 4999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_a_late_third_value_is_noticed_while_packing(
    backend: Backend, dtype: torch.dtype, index: int, holes: bool
) -> None:
    """No value is lost unseen: packing answers False wherever a third value lies."""
    values = _third(index, dtype)
    values = torch.stack([values, values], 1)[:, 0] if holes else values
    assert not pack_mask(backend, values, (0, int(bit_patterns(torch.ones(1, dtype=dtype)))))[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.tensor([0.0, 1.0, -0.0]), id="zeros of both signs"),
        pytest.param(torch.cat([nan_payloads(60), torch.zeros(1)]), id="nan payloads and a number"),
        pytest.param(torch.tensor([1.0, 1.0 + 2**-23, 1.0 - 2**-24]), id="neighbours"),
    ],
)
def test_values_are_compared_bit_by_bit(backend: Backend, values: Tensor) -> None:
    """Equal numbers of different bits are different values: -0.0 must come back as such."""
    assert backend.two_values(values) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_differing_bit_is_a_third_value(backend: Backend) -> None:
    """Packing compares all bits of an element, at every size."""
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for bit in range(8 * dtype.itemsize):
            values = torch.zeros(300, dtype=dtype)
            values[299] = 1 << bit if bit < 8 * dtype.itemsize - 1 or dtype is torch.uint8 else torch.iinfo(dtype).min
            one = (1 << (bit + 1) % (8 * dtype.itemsize)) & _all_ones(values)
            assert not pack_mask(backend, values, (0, one))[1], (dtype, bit)


@settings(max_examples=50)
@given(
    size=st.integers(1, 3000),
    probability=st.floats(0, 1),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.bool, torch.int16, torch.float32, torch.int64]),
)
def test_any_flags_come_back(size: int, probability: float, seed: int, dtype: torch.dtype) -> None:
    values = (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < probability).to(dtype)
    two = CPU.two_values(values)
    assert two is not None
    memory, answer = pack_mask(CPU, values, two)
    assert answer
    assert torch.equal(unpack_mask(CPU, memory, two, values), values)


@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, holes: bool) -> None:
    """A mask that is split over threads, and staged in pieces, is packed and unpacked as one that is not."""
    values = flags(60001, 2).float()
    values = values[:, 0] if holes else values[:, 0].contiguous()
    monkeypatch.setattr(cpu, "SPLIT", 512)
    monkeypatch.setattr(cpu, "STAGE", 8192)
    split = CpuBackend(threads=3)
    two = split.two_values(values)
    assert two is not None
    memory, answer = pack_mask(split, values, two)
    assert answer
    patterns = bit_patterns(values)
    assert torch.equal(memory.content, reference.encode_mask(patterns, torch.tensor(two[1]), PAGE_BYTES))
    out = torch.empty_strided(values.shape, values.stride())
    split.decode_mask(out, two, memory, memory.pages)
    assert torch.equal(out, values)
    values[59999] = 2
    assert not pack_mask(split, values, two)[1]
