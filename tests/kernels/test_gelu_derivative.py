"""Codes of GELU's derivative: every backend writes the same bytes, and they decode to inputs with that derivative."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf_kernels import PRECISIONS, plane_layout
from daf_kernels.backend import Backend, bits_of_number
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.layout import PLANE_WIDTHS
from daf_kernels.reference import gelu_derivative as slopes
from daf_kernels.reference.gelu_derivative import LIMIT, STEPS, codes_of, derivative, inputs_of_codes
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, HardInput, Make, each, normal
from tests.kernels.harness import (
    CPU,
    REFERENCE,
    Embedded,
    bit_patterns,
    bits,
    decode_slopes,
    encode_slopes,
)

BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]
PLANES = pytest.mark.parametrize("planes", range(5), ids="planes{}".format)
EXTREME = 1.5
"""Between here and -EXTREME the derivative takes all of its values."""


def _special(dtype: torch.dtype) -> Tensor:
    info, infinity = torch.finfo(dtype), math.inf
    least = info.tiny * info.eps
    ends = [math.nextafter(LIMIT, 0), LIMIT, LIMIT * (1 + 2**-10), LIMIT * (1 - 2**-11), 3.99, math.sqrt(2), 9.0]
    one_sign = torch.tensor([0.0, least, info.tiny, *ends, info.max, infinity, math.nan], dtype=dtype)
    return torch.cat([one_sign, one_sign.neg()]).repeat(11)


SLOPE_INPUTS = (
    *HARD_INPUTS,
    HardInput("both signs of what is special", _special),
    HardInput("all of the derivative", lambda dtype: torch.linspace(-6, 6, 12001).to(dtype)),
    HardInput("one block", lambda dtype: normal(256).to(dtype)),
    HardInput("one more than a block", lambda dtype: normal(257).to(dtype)),
    HardInput("one more than a tile", lambda dtype: normal(4097).to(dtype)),
)


@PLANES
@pytest.mark.parametrize(("make", "dtype"), each(SLOPE_INPUTS))
def test_bytes_are_those_of_the_reference(make: Make, dtype: torch.dtype, planes: int) -> None:
    """Planes and answer agree, and so does every decoding of what is left, bit for bit."""
    values = make(dtype)
    expected, reference_answer = encode_slopes(REFERENCE, values, planes)
    found, answer = encode_slopes(CPU, values, planes)
    assert answer == reference_answer == bool(values.isfinite().all())
    assert torch.equal(found.content, expected.content)
    for left in range(planes + 1):
        outs = [decode_slopes(backend, found, torch.full_like(values, 77), left) for backend in (CPU, REFERENCE)]
        assert torch.equal(bits(outs[0]), bits(outs[1]))


@settings(max_examples=60)
@given(
    count=st.integers(1, 3000),
    planes=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    shift=st.integers(0, 31),
    dtype=st.sampled_from(FLOAT_TYPES),
)
def test_any_bits(count: int, planes: int, seed: int, shift: int, dtype: torch.dtype) -> None:
    """Elements of random bits, NaNs of any payload and infinities among them."""
    source = np.random.default_rng(seed)
    pattern = np.float32(1).view(np.uint32) ^ (source.integers(0, 2**32, count, dtype=np.uint32) >> np.uint32(shift))
    values = torch.from_numpy(pattern.view(np.float32)).to(dtype)
    expected, reference_answer = encode_slopes(REFERENCE, values, planes)
    found, answer = encode_slopes(CPU, values, planes)
    assert answer == reference_answer
    assert torch.equal(found.content, expected.content)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("index", [0, 255, 256, 4999])
@pytest.mark.parametrize("planes", [0, 4])
def test_what_is_not_finite_is_reported(
    backend: Backend, value: float, dtype: torch.dtype, index: int, planes: int
) -> None:
    """Wherever it lies, and without planes, too: codes do not show it."""
    values = normal(5000).to(dtype)
    assert encode_slopes(backend, values, planes)[1]
    values[index] = value
    assert not encode_slopes(backend, values, planes)[1]


@PLANES
@pytest.mark.parametrize("backend", BACKENDS)
def test_header_page_is_left_alone(backend: Backend, planes: int) -> None:
    """Codes stand for themselves: the page that stays when all planes are gone holds nothing."""
    values = normal(3001)
    layout = plane_layout(3001, 0, 512)
    assert (layout.groups, layout.header_pages) == (0, 1)
    memory, _ = encode_slopes(backend, values, planes, fill=0x5A)
    assert (memory.content[0] == 0x5A).all()
    written = [decode_slopes(backend, memory, torch.empty(3001), left) for left in range(planes + 1)]
    clean = encode_slopes(backend, values, planes)[0]
    assert all(
        torch.equal(found, decode_slopes(backend, clean, torch.empty(3001), left)) for left, found in enumerate(written)
    )


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("count", [1, 255, 257, 5003])
def test_nothing_beside_the_result_is_written(count: int, step: int, dtype: torch.dtype) -> None:
    """Whether it ends in a block or has holes."""
    memory, _ = encode_slopes(CPU, normal(count).to(dtype), 4)
    out = Embedded((count,), dtype, step)
    decode_slopes(CPU, memory, out.tensor, 4)
    out.check()
    dense = decode_slopes(REFERENCE, memory, torch.empty(count, dtype=dtype), 4)
    assert torch.equal(bit_patterns(out.tensor), bit_patterns(dense))


@pytest.mark.parametrize("page_bytes", [128, 256, 4096, 65536])
def test_bytes_do_not_depend_on_the_page_size(page_bytes: int) -> None:
    """What is decoded is the same for each."""
    values = normal(12007)
    found, expected = (encode_slopes(backend, values, 4, page_bytes)[0] for backend in (CPU, REFERENCE))
    assert torch.equal(found.content, expected.content)
    usual, _ = encode_slopes(CPU, values, 4)
    for planes in range(5):
        decoded = [decode_slopes(CPU, memory, torch.empty(12007), planes) for memory in (found, usual)]
        assert torch.equal(*decoded)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, holes: bool, dtype: torch.dtype) -> None:
    """A tensor that is split over threads, and staged in pieces, gives the bytes of one that is not."""
    values = normal(70003, 2).to(dtype)
    values = values[:, 0] if holes else values[:, 0].contiguous()
    alone, _ = encode_slopes(CPU, values, 3)
    monkeypatch.setattr(cpu, "SPLIT", 512)
    monkeypatch.setattr(cpu, "STAGE", 8192)
    split = CpuBackend(threads=3)
    together, answer = encode_slopes(split, values, 3)
    assert answer
    assert torch.equal(together.content, alone.content)
    out = decode_slopes(split, together, torch.empty_strided(values.shape, values.stride(), dtype=dtype), 2)
    assert torch.equal(out, decode_slopes(CPU, alone, torch.empty_like(out), 2))
    values[70002] = math.nan
    assert not encode_slopes(split, values, 3)[1]


def _polynomial(x: Tensor) -> Tensor:
    """The derivative that codes are made of, in float64."""
    s = x.clamp(-LIMIT, LIMIT) / LIMIT
    return 0.5 + s * sum(coefficient * s ** (2 * k) for k, coefficient in enumerate(slopes.ODD))


@pytest.mark.parametrize(("beyond", "bound"), [(0.0, 2.7e-4), (4.0, 5e-4)])
def test_polynomial_is_close_to_the_derivative(beyond: float, bound: float) -> None:
    """A twentieth of a step of 8 bits up to the limit, where the derivative has not quite arrived at 0 and 1."""
    x = torch.linspace(beyond, beyond + LIMIT, 100_001, dtype=torch.float64)
    for signed in (x, -x):
        assert (_polynomial(signed) - derivative(signed)).abs().max() <= bound


def test_derivative_is_that_of_gelu() -> None:
    """As autograd takes it."""
    x = torch.linspace(-8, 8, 10_001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    torch.testing.assert_close(derivative(x.detach()), expected, rtol=0, atol=1e-12)


def test_codes_are_steps_of_the_derivative() -> None:
    """Rounded down, none out of a byte; an error of the polynomial moves a few to the next."""
    x = torch.linspace(-9, 9, 200_001)
    codes = codes_of(x)
    exact = (derivative(x.double()) - slopes.LEAST) * STEPS
    assert 0 <= int(codes.min()) < int(codes.max()) <= 255
    assert (codes - exact + 0.5).abs().max() <= 0.5 + 5e-4 * STEPS
    assert (codes == exact.floor()).double().mean() > 0.9


@PLANES
def test_inputs_of_codes_are_on_one_branch_in_order(planes: int) -> None:
    """Between -sqrt(2) and sqrt(2) the derivative rises, and so do the inputs; codes that are cut have no others."""
    width = 256 >> sum(PLANE_WIDTHS[:planes])
    row = torch.from_numpy(inputs_of_codes()[planes]).double()
    assert row.abs().max() <= math.sqrt(2) * (1 + 2**-24)
    assert (row[::width].diff() >= 0).all()
    if width < 128:
        assert (derivative(row[::width]).diff() > 0).sum() >= 0.9 * len(row[::width]) - 2
    assert not torch.isin(torch.arange(256), torch.arange(0, 256, width)).logical_not().logical_and(row != 0).any()


@pytest.mark.parametrize("left", range(5), ids="planes{}".format)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_planes_decode_as_if_no_more_had_been_encoded(backend: Backend, left: int) -> None:
    """Planes may be dropped at any time."""
    values = normal(5003) * 2
    cut = decode_slopes(backend, encode_slopes(backend, values, 4)[0], torch.empty(5003), left)
    assert torch.equal(cut, decode_slopes(backend, encode_slopes(backend, values, left)[0], torch.empty(5003), left))


ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("planes", [1, 2, 3, 4], ids="planes{}".format)
@pytest.mark.parametrize(("make", "dtype"), each(SLOPE_INPUTS))
def test_decoded_derivative_is_within_a_step(make: Make, dtype: torch.dtype, planes: int) -> None:
    """Of every finite element, but for what the polynomial and the type of the result add."""
    values = make(dtype)
    found = decode_slopes(CPU, encode_slopes(CPU, values, planes)[0], torch.empty_like(values), planes)
    error = (derivative(found.double()) - derivative(values.double())).abs()[values.isfinite()]
    step = (256 >> PRECISIONS[planes - 1]) / STEPS
    assert not error.numel() or error.max() <= step + 5e-4 + ROUNDING[dtype] * EXTREME
    assert found.abs().max() <= EXTREME


@pytest.mark.parametrize(("planes", "expected"), [(1, 0.44), (2, 0.21), (3, 0.054), (4, 0.0034)])
def test_error_of_usual_inputs(planes: int, expected: float) -> None:
    """Normal ones with the moments of a trained network's have the error that the module states for these, or less."""
    values = normal(200_000) - 0.75
    found = decode_slopes(CPU, encode_slopes(CPU, values, planes)[0], torch.empty_like(values), planes)
    exact = derivative(values.double())
    difference = derivative(found.double()) - exact
    assert float(difference.norm() / exact.norm()) < 1.1 * expected
    assert abs(float(difference.mean())) < 5e-4 + 1e-2 * (planes < 2), "a mean over what is cut to a code"


@pytest.mark.parametrize("mean", [-1.5, 0.0, 1.0])
@pytest.mark.parametrize("at", [lambda x: x, lambda x: 0.3 * x, lambda x: 3 * x])
def test_error_falls_with_every_plane(at: Callable[[Tensor], Tensor], mean: float) -> None:
    """Also of inputs that codes were not made for."""
    values = at(normal(20_000)) + mean
    memory, exact = encode_slopes(CPU, values, 4)[0], derivative(values)
    errors = [
        float((derivative(decode_slopes(CPU, memory, torch.empty_like(values), left)) - exact).norm())
        for left in (0, 2, 3, 4)
    ]
    assert errors == sorted(errors, reverse=True)


def test_tables_do_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        table = inputs_of_codes.__wrapped__()
        assert bits_of_number(1.0, torch.float32) == 0x3F800000
    assert np.array_equal(table, inputs_of_codes())
