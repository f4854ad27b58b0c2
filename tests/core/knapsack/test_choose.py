"""The multiple-choice knapsack against all combinations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf_core.knapsack import choose
from daf_core.knapsack.choose import Knapsack, Solution

Items = list[tuple[tuple[float, float], ...]]

# Eighths of integers: their sums are exact, and many are equal.
NUMBERS = st.integers(0, 60).map(lambda number: number / 8)
ITEMS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4).map(tuple), max_size=5)


def best(items: Items, budget: float) -> tuple[float, float] | None:
    """Returns the least loss and the lowest cost for it, of all combinations that fit."""
    sums = ([sum(each) for each in zip((0, 0), *points, strict=True)] for points in itertools.product(*items))
    return min(((loss, cost) for cost, loss in sums if cost <= budget), default=None)


def checked(items: Items, budget: float, found: Solution) -> tuple[float, float]:
    """Returns loss and cost of a solution that is what it says."""
    picked = [item[option] for item, option in zip(items, found.picked, strict=True)]
    assert (found.cost, found.loss) == (sum(cost for cost, _ in picked), sum(loss for _, loss in picked))
    assert found.cost <= budget
    return found.loss, found.cost


@given(ITEMS, st.integers(-1, 160).map(lambda number: number / 8))
def test_equal_to_the_best_combination(items: Items, budget: float) -> None:
    knapsack, expected = Knapsack(items), best(items, budget)
    found = knapsack.solve(budget)
    assert (None if found is None else checked(items, budget, found)) == expected
    if expected is None:
        assert knapsack.bound(budget) == math.inf
    else:
        assert knapsack.bound(budget) <= expected[0] + 1e-9
        assert knapsack.solve(budget, expected[0]) == found  # a limit that the best solution keeps


@given(ITEMS)
def test_cheapest_options(items: Items) -> None:
    assert [item[option] for item, option in zip(items, Knapsack(items).cheapest, strict=True)] == [*map(min, items)]


def proportional(count: int, seed: int) -> tuple[Items, float]:
    """Losses in proportion to costs: nearly every combination is a state that could be best."""
    costs = np.random.default_rng(seed).integers(1, 10**6, count).tolist()
    return [((0.0, float(cost)), (float(cost), 0.0)) for cost in costs], sum(costs) / 2


@pytest.mark.parametrize("seed", range(5))
def test_few_states_lose_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the documented loss for each item, and no more states than are allowed."""
    items, budget = proportional(14, seed)
    exact, greedy, sizes = Knapsack(items).solve(budget), Knapsack(items)._greedy(budget), list[int]()
    thinned, states = choose._thinned, 100

    def counted(losses: np.ndarray) -> tuple[np.ndarray, float]:
        kept, lost = thinned(losses)
        sizes.append(kept.size)
        return kept, lost

    monkeypatch.setattr(choose, "MAX_STATES", states)
    monkeypatch.setattr(choose, "_thinned", counted)
    found = Knapsack(items).solve(budget)
    assert exact is not None
    assert found is not None
    assert greedy is not None
    checked(items, budget, found)
    assert states / 2 < max(sizes) <= states + 1
    assert exact.loss <= found.loss <= min(greedy.loss, exact.loss + len(items) / states * 2 * budget)


def test_an_item_without_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match="each item needs one option or more"):
        Knapsack([((1, 1),), ()])
