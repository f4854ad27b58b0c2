"""The range that ranks an activation: every backend measures the same groups and gets the same number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from daf_kernels.layout import SAMPLED_GROUPS, PlaneLayout, plane_layout, sampled_groups
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal
from tests.kernels.harness import CPU, PAGE_BYTES, REFERENCE, groups_of, layout_of

BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]


def plain_range(values: Tensor, layout: PlaneLayout) -> float:
    """The same in as few words as possible: float32 ranges, everything else in double precision."""
    count, step, _ = sampled_groups(layout)
    groups = list(groups_of(values, layout))[: count * step : step]
    squares = sum(float((group.max().float() - group.min().float()).double() ** 2) for group in groups)
    variance = sum(float(group.var(correction=0)) for group in groups)
    return squares / variance if variance else 0.0


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_backends_agree(make: Make, dtype: torch.dtype) -> None:
    """On every hard input, in any memory order: a number of 0 or more, or one that is not finite in both."""
    values = make(dtype)
    layout = layout_of(values)
    found, expected = CPU.relative_range(values, layout), REFERENCE.relative_range(values, layout)
    assert math.isfinite(found) == math.isfinite(expected)
    assert found == pytest.approx(expected, rel=1e-9) or not math.isfinite(expected)
    assert found >= 0 or math.isnan(found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(3,), (5, 128), (16, 128), (17, 128), (100, 128), (100, 64), (40, 300), (9, 7), (5000,)], ids=str
)
def test_range_is_what_it_says(shape: tuple[int, ...], dtype: torch.dtype, backend: object) -> None:
    """Fewer groups than are sampled, as many, more; a last group that is short; groups of many rows."""
    values = normal(*shape).to(dtype)
    layout = layout_of(values)
    assert backend.relative_range(values, layout) == pytest.approx(plain_range(values, layout), rel=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strided", [lambda x: x.T.contiguous().T, lambda x: torch.stack([x, -x], 2)[:, :, 0]])
def test_strides_do_not_matter(strided: object, backend: object) -> None:
    """Elements are taken in row-major order wherever they lie."""
    values = normal(100, 128)
    other, layout = strided(values), layout_of(values)
    assert not other.is_contiguous()
    assert backend.relative_range(other, layout) == backend.relative_range(values, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.7, -3e4, 1e-40])
@pytest.mark.parametrize("count", [1, 2, 100, 5000])
def test_constants_have_no_range(count: int, value: float, backend: object) -> None:
    """Dropping their planes costs nothing."""
    values = torch.full((count,), value)
    assert backend.relative_range(values, layout_of(values)) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_not_finite_groups_have_no_finite_range(
    value: float, dtype: torch.dtype, strided: bool, backend: object
) -> None:
    """One such value in one sampled group is enough; in a group that is not sampled nobody sees it."""
    values = normal(128, 2 * SAMPLED_GROUPS).T.to(dtype) if strided else normal(2 * SAMPLED_GROUPS, 128).to(dtype)
    layout = layout_of(values)
    assert sampled_groups(layout) == (SAMPLED_GROUPS, 2, 128)
    values[5, 7] = value
    assert math.isfinite(backend.relative_range(values, layout))
    values[6, 7] = value
    assert not math.isfinite(backend.relative_range(values, layout))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_and_place_do_not_matter(backend: object) -> None:
    """The number is relative; evenly spread values have 12, heavier tails more."""
    values = normal(64, 256)
    layout, even = layout_of(values), torch.linspace(-1, 1, 256).expand(64, 256).contiguous()
    plain = backend.relative_range(values, layout)
    assert backend.relative_range(values * 1024, layout) == pytest.approx(plain, rel=1e-6)
    assert backend.relative_range(values + 1, layout) == pytest.approx(plain, rel=1e-3)
    assert backend.relative_range(even, layout) == pytest.approx(12, rel=0.02)
    assert 25 < plain < 50 < backend.relative_range(values**3, layout)


@given(elements=st.integers(1, 20000), row=st.integers(1, 1000))
def test_sampled_groups_are_whole_and_inside(elements: int, row: int) -> None:
    """As many as there are up to the limit, none beyond the end, spread over most of the activation."""
    layout = plane_layout(elements, row, PAGE_BYTES)
    count, step, size = sampled_groups(layout)
    whole = layout.elements // layout.group
    assert 1 <= count == min(SAMPLED_GROUPS, max(whole, 1))
    assert ((count - 1) * step) * layout.group + size <= layout.elements
    assert (count * step) * 2 > whole
