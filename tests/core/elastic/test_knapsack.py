"""Units that are worth most within a budget: compared with all selections there are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from daf_core.elastic.knapsack import TICKS, PrefixKnapsack

CASES = 500


class Brute:
    """Every selection of a few units, with its worth and its cost."""

    def __init__(self, values: np.ndarray, costs: np.ndarray, reaching: np.ndarray) -> None:
        count = len(values)
        chosen = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        self.values = chosen @ values
        self.costs = chosen @ costs + (chosen * reaching).max(1, initial=0)

    def best(self, budget: float) -> float:
        return self.values[self.costs <= budget].max()


def whole(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns values, costs and prices in whole ticks; several are zero or alike."""
    count = int(random.integers(1, 9))
    highest = int(random.choice([4, 120, 500]))
    costs, steps = random.integers(0, highest, (2, count))
    return random.integers(0, 9, count), costs, np.cumsum(steps * random.integers(0, 2, count))


def total(picked: frozenset[int], costs: np.ndarray, reaching: np.ndarray) -> float:
    return sum(costs[unit] for unit in picked) + max((reaching[unit] for unit in picked), default=0)


def test_equal_to_all_selections_where_costs_are_whole_ticks() -> None:
    random = np.random.default_rng(0)
    for case in range(CASES):
        values, costs, reaching = whole(random)
        knapsack, brute = PrefixKnapsack(values, costs, reaching, TICKS), Brute(values, costs, reaching)
        budgets = range(TICKS + 1) if case % 50 == 0 else random.integers(0, TICKS + 1, 12)
        for budget in map(int, budgets):
            picked = knapsack.pick(budget)
            assert sum(values[unit] for unit in picked) == brute.best(budget)
            assert total(picked, costs, reaching) <= budget


def test_real_costs_never_exceed_the_budget_and_lose_no_more_than_rounding_up() -> None:
    random = np.random.default_rng(1)
    for _ in range(CASES):
        count = int(random.integers(1, 9))
        values, costs, steps = random.random((3, count)) * [[1], [0.3], [0.2]]
        reaching, most = np.cumsum(steps), random.uniform(0.2, 1.5)
        knapsack, tick = PrefixKnapsack(values, costs, reaching, most), most / TICKS
        rounded = Brute(values, *(np.ceil(each / tick) for each in (costs, reaching)))
        for budget in random.random(8) * most:
            picked = knapsack.pick(budget)
            assert total(picked, costs, reaching) <= budget * (1 + 1e-9)
            assert sum(values[unit] for unit in picked) >= rounded.best(math.floor(budget / tick)) - 1e-12


def test_what_is_worth_nothing_or_does_not_fit_is_left_out() -> None:
    assert PrefixKnapsack([0, 3], [0, 1], [0, 1], 2).pick(2) == {1}
    assert PrefixKnapsack([0], [0], [0], 2).pick(2) == frozenset()
    assert PrefixKnapsack([3], [1], [1], 2).pick(1.9) == frozenset()
    assert PrefixKnapsack([3], [0], [0], 0).pick(0) == {0}
    assert PrefixKnapsack([3], [0.5], [0], 0).pick(0) == frozenset()
    assert PrefixKnapsack([], [], [], 1).pick(1) == frozenset()


def test_a_budget_beyond_the_largest_is_the_largest() -> None:
    assert PrefixKnapsack([1, 1], [1, 1], [0, 0], 1).pick(2) in ({0}, {1})


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (([1.0], [1.0, 2.0], [0.0], 1.0), "1 values, 2 costs and 1 prices"),
        (([1.0, 1.0], [1.0, 1.0], [1.0, 0.5], 1.0), "reaching may not fall"),
        (([-1.0], [1.0], [0.0], 1.0), "may not be negative"),
        (([1.0], [-1.0], [0.0], 1.0), "may not be negative"),
        (([1.0], [1.0], [-1.0], 1.0), "may not be negative"),
        (([1.0], [1.0], [0.0], -1.0), "may not be negative"),
    ],
)
def test_wrong_numbers(numbers: tuple[list[float], list[float], list[float], float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrefixKnapsack(*numbers)
