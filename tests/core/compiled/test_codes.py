"""Codes in torch's operators: the numerics of the reference, whatever the shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from daf_core.compiled.codes import Bits, Code, Like, Logarithms, Planes, Sides, Slopes
from daf_core.compiled.groups import shape_of
from daf_kernels.layout import group_size, plane_layout
from daf_kernels.reference import codec
from daf_kernels.reference.gelu_derivative import derivative

SHAPES = {
    "rows": lambda: torch.randn(64, 768),
    "heads": lambda: torch.randn(8, 128, 12, 64).transpose(1, 2),
    "transposed": lambda: torch.randn(96, 128, 64).transpose(1, 2),
    "few rows": lambda: torch.randn(3, 4096),
    "no divisor": lambda: torch.randn(5, 7, 131),
    "bfloat16": lambda: torch.randn(16, 32, 128, dtype=torch.bfloat16),
}


def stored_and_back(code: Code, values: Tensor) -> tuple[Tensor, int]:
    """Returns what comes back, and the bytes that were stored."""
    shape = shape_of(values)
    stored = code.encode(values, shape)
    return code.decode(stored, Like(values.shape, values.dtype, shape)), sum(each.nbytes for each in stored)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_planes_have_the_error_of_the_reference(name: str, bits: int) -> None:
    values = SHAPES[name]()
    found, held = stored_and_back(Planes(bits), values)
    flat = values.permute(shape_of(values).order).contiguous().reshape(-1)
    layout = plane_layout(flat.numel(), values.permute(shape_of(values).order).shape[-1], 256)
    planes = [1, 2, 4, 8].index(bits) + 1
    expected = codec.decode(codec.encode(flat, layout, planes), layout, planes, values.dtype)
    assert found.shape == values.shape
    assert found.dtype == values.dtype
    assert error(found, values) == pytest.approx(error(expected, flat), rel=0.2 if name == "no divisor" else 0.05)
    assert held < values.numel() * (bits / 8 + 0.08) + 2048


@pytest.mark.parametrize("keys", [32, 40, 64])
def test_short_rows_may_keep_their_own_means(keys: int) -> None:
    """So decoded probabilities sum to 1."""
    values = (3 * torch.randn(2, 4, 16, keys)).softmax(-1)
    for own_rows, bound in ((True, 1e-5), (False, 1.0)):
        shape = shape_of(values, own_rows)
        found = Planes(4).decode(Planes(4).encode(values, shape), Like(values.shape, values.dtype, shape))
        off = float((found.sum(-1) - 1).abs().max())
        assert bound / 100 < off < bound
    for other in (torch.randn(64, 16), torch.randn(64, 36), torch.randn(64, 96)):  # too short, no whole bytes, alone
        assert shape_of(other, own_rows=True) == shape_of(other)


def test_moments_of_a_group_are_kept() -> None:
    values = torch.randn(32, 256).exp() + 3
    found, _ = stored_and_back(Planes(2), values)
    assert group_size(256) == 256
    assert torch.allclose(found.mean(1), values.mean(1), rtol=1e-5)
    assert torch.allclose(found.std(1), values.std(1), rtol=5e-3)


def test_what_is_not_finite_is_not_hidden() -> None:
    values = torch.randn(32, 256)
    values[3, 5], values[9, 1] = torch.inf, torch.nan
    found, _ = stored_and_back(Planes(4), values)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [3, 9]
    others = [row for row in range(len(values)) if row not in (3, 9)]  # some of which share bytes with them
    assert error(found[others], values[others]) < 0.15


def test_a_group_of_one_value_comes_back() -> None:
    values = torch.full((32, 256), 0.3)
    assert torch.equal(stored_and_back(Planes(4), values)[0], values)


def test_signs_are_exact_where_they_matter() -> None:
    values = torch.randn(64, 768).relu()
    found, _ = stored_and_back(Planes(4, signs=True), values)
    assert torch.equal(found > 0, values > 0)
    assert error(found, values) < error(stored_and_back(Planes(4), values)[0], values)


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_exact(name: str) -> None:
    values = SHAPES[name]() > 0.3
    found, held = stored_and_back(Bits(), values)
    assert torch.equal(found, values)
    assert held < values.numel() / 8 + 64


@pytest.mark.parametrize("closed", [False, True])
def test_sides_are_exact_on_the_bound(closed: bool) -> None:
    values = torch.randint(-2, 3, (64, 768)).float()
    found, _ = stored_and_back(Sides(1.0, closed), values)
    assert torch.equal(found > 1, values > 1) if not closed else torch.equal(found >= 1, values >= 1)


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_logarithms_keep_the_largest_and_the_sum(scale: float) -> None:
    values = torch.randn(64, 256) * scale
    found, _ = stored_and_back(Logarithms(4), values)
    assert torch.equal(found.amax(1), values.amax(1))
    assert torch.allclose(found.logsumexp(1), values.logsumexp(1), atol=0.02)
    assert error(found.softmax(1), values.softmax(1)) < 0.15


def test_logarithms_of_masked_words_stay_small() -> None:
    values = torch.randn(64, 256)
    values[:, 100:] = -torch.inf
    values[7] = -torch.inf
    found, _ = stored_and_back(Logarithms(4), values)
    assert found[0].softmax(0)[100:].sum() < 1e-4
    assert found[7].isinf().all()


def test_machine_code_works_with_the_numbers_that_it_stores() -> None:
    """Inductor takes casts out: what decodes 8 bits was off by a fourth of a step, and what rows share by more."""
    values = torch.randn(64, 256) + 10 * torch.randn(256)
    shape = shape_of(values)
    codes = Planes(8), Planes(8, common=True), Logarithms(8)
    encode = torch.compile(lambda given: [code.encode(given, shape) for code in codes], backend="inductor")
    for code, stored in zip(codes, encode(values), strict=True):
        like = Like(values.shape, values.dtype, shape)
        found, expected = code.decode(stored, like), code.decode(code.encode(values, shape), like)
        assert (found - expected).norm() < 0.2 * (expected - values).norm()


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.006), (4, 0.08), (2, 0.35)])
def test_slopes_have_no_header(bits: int, bound: float) -> None:
    slopes = derivative(torch.randn(64, 768))
    found, held = stored_and_back(Slopes(bits), slopes)
    assert error(found, slopes) < bound
    assert held == slopes.numel() * bits // 8
