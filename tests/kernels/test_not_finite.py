"""A group with a NaN, an infinity or an overflowing range is NaN as a whole; its neighbours know nothing of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daf_kernels.backend import Backend
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal
from tests.kernels.harness import CPU, REFERENCE, SEED, decode, encode, groups_of, layout_of

BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]
BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    row=st.sampled_from([8, 50, 64, 79, 256, 300]),
    bad=st.dictionaries(st.integers(0, 3599), st.sampled_from(BAD), max_size=4),
    dtype=st.sampled_from(FLOAT_TYPES),
    planes=st.integers(1, 4),
    seed=st.sampled_from([None, SEED]),
)
def test_groups_that_are_not_finite_decode_to_nan_and_no_others(
    backend: Backend,
    rows: int,
    row: int,
    bad: dict[int, float],
    dtype: torch.dtype,
    planes: int,
    seed: tuple[int, int, int, int] | None,
) -> None:
    """Encoding answers False exactly if there is such a group, and every other group is bit for bit as without it."""
    clean = normal(rows, row).to(dtype)
    values, layout = clean.clone(), layout_of(clean)
    hit = torch.zeros(layout.groups * layout.group, dtype=torch.bool)
    for index, value in bad.items():
        if index < values.numel():
            values.view(-1)[index] = value
            hit.view(-1, layout.group)[index // layout.group] = True
    hit = hit[: layout.elements].view(values.shape)
    memory, answer = encode(backend, values, planes, seed)
    expected, _ = encode(backend, clean, planes, seed)
    assert answer == (not hit.any())
    for left in range(planes + 1):
        decoded = decode(backend, memory, values, left)
        assert decoded[hit].isnan().all()
        assert torch.equal(decoded[~hit], decode(backend, expected, clean, left)[~hit])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_the_answer_tells_whether_a_group_is_lost(backend: Backend, make: Make, dtype: torch.dtype) -> None:
    """False means that some range is not finite in float32, whatever its values are."""
    values = make(dtype)
    ranges = [(group.max() - group.min()).float() for group in groups_of(values, layout_of(values))]
    assert encode(backend, values, 1)[1] == all(spread.isfinite() for spread in ranges)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflowing_range_is_lost_though_its_values_are_finite(backend: Backend) -> None:
    """float32 holds no such range; NaN says so, a wrong number would not."""
    values = torch.zeros(2, 256)
    values[1, 0], values[1, 1] = 3e38, -3e38
    memory, answer = encode(backend, values, 4)
    decoded = decode(backend, memory, values, 4)
    assert not answer
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[0], values[0])
