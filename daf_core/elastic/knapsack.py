"""The units that are worth most within a budget, where a unit that lies deeper has the gradient pass all above it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

TICKS = 1000
"""Parts that a budget is counted in. Costs are rounded up to them, so that no selection exceeds the budget."""


class PrefixKnapsack:
    """Picks the units that are worth most within a budget: exact for costs in whole ticks, and for all budgets at once.

    A selection costs what its units cost by themselves, and the price of reaching the deepest of them. Units are
    ordered from the model's output to its input, so that with the deepest unit given the rest is a knapsack of those
    before it.

    Args:
        values: What each unit is worth, 0 or more, from the output to the input.
        costs: What each takes by itself.
        reaching: What it takes to reach each, from the output on; it may not fall.
        most: The largest budget that will be asked for.

    Raises:
        ValueError: Numbers are negative, not as many, or reaching falls.
    """

    def __init__(self, values: Sequence[float], costs: Sequence[float], reaching: Sequence[float], most: float) -> None:
        if not len(values) == len(costs) == len(reaching):
            raise ValueError(f"got {len(values)} values, {len(costs)} costs and {len(reaching)} prices of reaching")
        if min([*values, *costs, *reaching, most], default=0) < 0 or any(np.diff(reaching) < 0):
            raise ValueError("values, costs and the budget may not be negative, and reaching may not fall")
        self._values = list(values)
        self._tick = most / TICKS or 1.0
        self._costs = [self._ticks(cost) for cost in costs]
        self._reaching = [self._ticks(price) for price in reaching]
        self._best = np.zeros((len(values) + 1, TICKS + 1))  # of the first units, within so many ticks
        self._taken = np.zeros((len(values), TICKS + 1), bool)
        for unit, (value, cost) in enumerate(zip(values, self._costs, strict=True)):
            before, after = self._best[unit], self._best[unit + 1]
            after[:] = before
            if cost <= TICKS:
                with_unit = before[: TICKS + 1 - cost] + value
                self._taken[unit, cost:] = with_unit > before[cost:]
                after[cost:] = np.maximum(with_unit, before[cost:])

    def pick(self, budget: float) -> frozenset[int]:
        """Returns the numbers of the units that are worth most within a budget; none where none fits.

        Args:
            budget: Up to `most`.
        """
        allowed = min(math.floor(budget / self._tick + 1e-9), TICKS)
        found, deepest, room = 0.0, None, 0
        for unit, value in enumerate(self._values):
            left = allowed - self._reaching[unit] - self._costs[unit]
            if left >= 0 and self._best[unit, left] + value > found:
                found, deepest, room = self._best[unit, left] + value, unit, left
        if deepest is None:
            return frozenset()
        picked = {deepest}
        for unit in reversed(range(deepest)):
            if self._taken[unit, room]:
                picked.add(unit)
                room -= self._costs[unit]
        return frozenset(picked)

    def _ticks(self, cost: float) -> int:
        return math.ceil(cost / self._tick - 1e-9)
