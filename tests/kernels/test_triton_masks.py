"""Masks, signs of ReLUs and slopes of GELUs: the Triton kernels give the bytes of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from daf_kernels.triton import launch
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, HARD_MASKS, Make, each, flags, normal
from tests.kernels.harness import (
    REFERENCE,
    Embedded,
    bit_patterns,
    bits,
    decode_slopes,
    encode_slopes,
    pack_mask,
    unpack_mask,
)
from tests.kernels.test_gelu_derivative import SLOPE_INPUTS
from tests.kernels.test_rectify import nonzero_bits, rectified
from tests.kernels.triton_device import DEVICE, PAGE_BYTES, TRITON


@pytest.mark.parametrize(("make", "dtype"), each(HARD_MASKS))
def test_packed_masks_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype)
    two = (0, 1) if dtype is torch.bool else REFERENCE.two_values(values)
    assert two is not None
    assert TRITON.two_values(values.to(DEVICE)) == (None if DEVICE.type == "cuda" and dtype.is_floating_point else two)
    found, answer = pack_mask(TRITON, values.to(DEVICE), two)
    assert answer
    assert torch.equal(found.content.cpu(), pack_mask(REFERENCE, values, two)[0].content)
    unpacked = unpack_mask(TRITON, found, two, values.to(DEVICE))
    assert torch.equal(bit_patterns(unpacked.cpu()), bit_patterns(values))


def test_nothing_is_waited_for_where_there_is_no_third_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a dropout's mask: a GPU would be without work at each."""
    values = flags(5000)
    expected = pack_mask(REFERENCE, values, (0, 1))[0].content
    monkeypatch.setattr(Tensor, "item", lambda _: pytest.fail("waited"))
    found, answer = pack_mask(TRITON, values.to(DEVICE), (0, 1))
    assert answer
    assert torch.equal(found.content.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("index", [2, 255, 256, 4999])
def test_a_third_value_is_noticed(index: int, dtype: torch.dtype) -> None:
    """In the first block before packing, later while it packs."""
    values = flags(5000).to(dtype)
    values[index] = 3
    assert TRITON.two_values(values.to(DEVICE)) is None
    one = int(bit_patterns(torch.ones(1, dtype=dtype)))
    assert not pack_mask(TRITON, values.to(DEVICE), (0, one))[1]


def test_one_differing_bit_is_a_third_value() -> None:
    for dtype in (torch.int16, torch.int64):
        for bit in (0, 8 * dtype.itemsize - 1):
            values = torch.zeros(300, dtype=dtype)
            values[299] = 1 << bit if bit < 8 * dtype.itemsize - 1 else torch.iinfo(dtype).min
            assert not pack_mask(TRITON, values.to(DEVICE), (0, 2))[1], (dtype, bit)


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS[:12] + HARD_INPUTS[18:32]))
def test_rectified_bits_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype)
    values.masked_fill_(values.isnan(), math.nan)
    found, expected = nonzero_bits(TRITON, values.to(DEVICE)), nonzero_bits(REFERENCE, values)
    assert torch.equal(found.content.cpu(), expected.content)
    assert torch.equal(
        bits(rectified(TRITON, found, values.to(DEVICE)).cpu()), bits(rectified(REFERENCE, expected, values))
    )


@pytest.mark.parametrize("planes", [4, 2, 1])
@pytest.mark.parametrize(("make", "dtype"), each(SLOPE_INPUTS))
def test_slopes_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, make: Make, dtype: torch.dtype, planes: int
) -> None:
    monkeypatch.setattr(launch, "FEW_PROGRAMS", 0)  # as for many: full ones, and one that is not
    values = make(dtype)
    values = values if values.numel() < 6000 else values.reshape(-1)[:6000]
    expected, reference_answer = encode_slopes(REFERENCE, values, planes, PAGE_BYTES)
    found, answer = encode_slopes(TRITON, values.to(DEVICE), planes, PAGE_BYTES)
    assert answer == reference_answer
    assert torch.equal(found.content.cpu(), expected.content)
    decoded = decode_slopes(TRITON, found, torch.empty(values.shape, dtype=dtype, device=DEVICE), planes - 1)
    wanted = decode_slopes(REFERENCE, expected, torch.empty(values.shape, dtype=dtype), planes - 1)
    assert torch.equal(bits(decoded.cpu()), bits(wanted))


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize(
    ("step", "elements", "few"),
    [(1, 2500, 192), (3, 2500, 192), (1, 9000, 192), (1, 9000, 0)],
    ids=["dense", "holes", "few programs", "many programs"],
)
def test_each_kernel_writes_its_elements_only(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, step: int, elements: int, few: int
) -> None:
    monkeypatch.setattr(launch, "FEW_PROGRAMS", few)
    values = normal(elements).relu().to(dtype)
    slopes, _ = encode_slopes(TRITON, values.to(DEVICE), 4, PAGE_BYTES)
    mask = (values > 0).to(dtype)
    two = REFERENCE.two_values(mask)
    assert two is not None
    masks, signs = pack_mask(TRITON, mask.to(DEVICE), two)[0], nonzero_bits(TRITON, values.to(DEVICE))
    out = Embedded((elements,), dtype, step, DEVICE)
    decode_slopes(TRITON, slopes, out.tensor, 4)
    out.check()
    TRITON.decode_mask(out.tensor, two, masks, masks.pages)
    assert torch.equal(out.tensor.cpu(), mask)
    out.check()
    out.tensor.fill_(-1)
    TRITON.rectify(out.tensor, signs, signs.pages)
    assert torch.equal(out.tensor.cpu(), mask * torch.finfo(dtype).tiny)
    out.check()
