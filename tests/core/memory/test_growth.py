"""How much the pool reserves, and what it gives back after a peak."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daf_core.memory.pages import pool as pool_module
from daf_core.memory.pages.pool import PAGE_BYTES, SLACK, WINDOW, PagePool

CPU = torch.device("cpu")
PAGE = 128


MB = 1 << 20


@pytest.mark.parametrize(
    ("step", "reserved", "grown"),
    [
        (None, 0, MB),
        (None, 8 * MB, MB),
        (None, 8 * MB + 7 * PAGE_BYTES, MB),
        (None, 8 * MB + 8 * PAGE_BYTES, MB + PAGE_BYTES),
        (None, 80 * MB, 10 * MB),
        (50 * PAGE_BYTES + 1, 0, 50 * PAGE_BYTES),
        (50 * PAGE_BYTES + 1, 1000 * PAGE_BYTES, 50 * PAGE_BYTES),
        (7, 1000 * PAGE_BYTES, PAGE_BYTES),
    ],
)
def test_step(step: int | None, reserved: int, grown: int) -> None:
    """An eighth of what is reserved and a megabyte at least, or the same each time; what is asked for at least."""
    pool = PagePool(CPU, step)
    pool.take(reserved // PAGE_BYTES, reserved)
    assert pool.reserved_bytes == reserved
    pool.take(1)
    assert pool.reserved_bytes == reserved + grown


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 20))
def test_adaptive_growth_wastes_an_eighth_at_most(counts: list[int], least: int) -> None:
    """Whatever the order of sizes, no more is reserved than an eighth over what is in use, or the smallest step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "LEAST_STEP", least * PAGE)
        pool = PagePool(CPU, page_bytes=PAGE)
        for count in counts:
            pool.take(count)
            assert 0 <= pool.reserved_bytes - pool.used_pages * PAGE <= max(pool.used_pages * PAGE / 8, least * PAGE)


def test_fixed_growth_reserves_the_papers_steps() -> None:
    """One page reserves 100 MB, rounded down to pages; the next region follows when they are full."""
    pool = PagePool(CPU, 100_000_000)
    step = 100_000_000 // PAGE_BYTES
    pool.take(1)
    assert pool.reserved_bytes == step * PAGE_BYTES
    pool.take(step - 1)
    assert pool.reserved_bytes == step * PAGE_BYTES
    pool.take(1)
    assert pool.reserved_bytes == 2 * step * PAGE_BYTES


@pytest.mark.parametrize("step", [1, 3 * PAGE, 0])
def test_a_step_that_is_too_small_still_serves_the_request(step: int) -> None:
    """What is missing is reserved, even if the step is less than that, or less than a page."""
    pool = PagePool(CPU, step, PAGE)
    assert pool.take(5).size == 5
    assert pool.reserved_bytes == 5 * PAGE


@pytest.mark.parametrize(
    ("peaks", "reserved", "kept"),
    [
        ([100], 1000, 1000),
        ([100] * (WINDOW - 1), 1000, 1000),
        ([100] * WINDOW, 1000, 100),
        ([900] + [100] * (WINDOW - 1), 1000, 1000),
        ([900] + [100] * WINDOW, 1000, 100),
        ([100] * WINDOW + [900], 1000, 1000),
        ([100] * WINDOW + [800], 1000, 800),
        ([0] * WINDOW, 1000, 0),
        ([1000] * WINDOW, int(1000 * SLACK), 1150),
        ([1000] * WINDOW, 1151, 1000),
    ],
)
def test_what_recent_peaks_are_worth(peaks: list[int], reserved: int, kept: int) -> None:
    """Nothing is given back before a whole window was seen, nor for little; then the largest peak in it counts."""
    pool = PagePool(CPU, 0, PAGE)
    pool.take(reserved)
    assert pool.reserved_bytes == reserved * PAGE
    assert [pool.finish_step(peak * PAGE) for peak in peaks][-1] == kept * PAGE


def test_a_peak_that_does_not_return_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions of one large step last until it is out of the window; those in steady use stay."""
    monkeypatch.setattr(pool_module, "LEAST_STEP", 4 * PAGE)
    pool = PagePool(CPU, page_bytes=PAGE)
    reserved = []
    for count in [10, 400, *[10] * (WINDOW + 1)]:
        pages = [pool.take(1) for _ in range(count)]
        pool.give(np.concatenate(pages))
        pool.finish_step()
        reserved.append(pool.reserved_bytes // PAGE)
    assert reserved[0] == 12
    assert set(reserved[1:-2]) == {reserved[1]}
    assert reserved[1] >= 400
    assert reserved[-2:] == [12, 12]
