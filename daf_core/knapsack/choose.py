"""The multiple-choice knapsack: one option of each item, so that costs fit in a budget and the loss is least.

Exact while few combinations can be best. A state is the cost and the loss of one option for each of the first items.
The search follows a state only if no other dominates it, and if its loss and a lower bound for the remaining items (the
linear relaxation, in which an item may mix two options) stay below the best solution known. The first solution is
greedy: along the hulls of all items, in the order of loss per cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Point = tuple[float, float]  # cost and loss of an option, or of a set of options
ROUNDING = 1e-12  # relative difference that sums of floats in different orders may have

MAX_STATES = 5_000
"""States that are followed. 48 items with 4 options of different costs and losses need some hundred. If there are more,
as with losses in proportion to costs, states of nearly the same loss count as one: each item loses at most
1 / `MAX_STATES` of the difference in loss between all states, and the result is never worse than the greedy one."""


def lower_hull(points: Sequence[Point], tolerance: float = 0.0) -> list[int]:
    """Returns the indices of the lower convex hull, from the lowest cost to the least loss.

    Costs rise and losses fall along it. Points on a line between two others stay: a walk along it has short steps. Two
    slopes count as one line up to the relative tolerance.
    """
    hull: list[int] = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if hull and point[1] >= points[hull[-1]][1]:
            continue
        while len(hull) > 1 and (
            slope(points[hull[-2]], points[hull[-1]]) > slope(points[hull[-1]], point) * (1 - tolerance)
        ):
            hull.pop()
        hull.append(index)
    return hull


def slope(before: Point, after: Point) -> float:
    """Returns the change of the loss per unit of cost between two points of different cost."""
    return (after[1] - before[1]) / (after[0] - before[0])


def undominated(costs: Floats, losses: Floats) -> Indices:
    """Returns the indices of the points with less loss than all cheaper ones, by rising cost and falling loss."""
    order = np.lexsort((losses, costs))
    least_before = np.minimum.accumulate(np.concatenate(([np.inf], losses[order])))[:-1]
    return order[losses[order] < least_before * (1 - ROUNDING)]


_hull = lru_cache(maxsize=4096)(lower_hull)  # blocks of a model have equal options, and a plan tries tens of budgets


class Solution(NamedTuple):
    """One option of each item: the sums of their losses and costs, and the index of each item's option."""

    loss: float
    cost: float
    picked: list[int]

    def is_better(self, other: Solution | None) -> bool:
        """Whether the loss is less, or the same within `ROUNDING` at a lower cost."""
        if other is None or self.loss < other.loss * (1 - ROUNDING):
            return True
        return self.loss <= other.loss * (1 + ROUNDING) and self.cost < other.cost


class Knapsack:
    """Finds the best options of some items for any budget.

    Costs and losses are finite, 0 or more. `cheapest` is the index of each item's option with the lowest cost; of equal
    costs the one with the least loss.

    Raises:
        ValueError: An item has no option.
    """

    def __init__(self, items: Sequence[tuple[Point, ...]]) -> None:
        if not all(items):
            raise ValueError("each item needs one option or more")
        self._items = items
        hulls = [_hull(item) for item in items]
        self.cheapest = [hull[0] for hull in hulls]
        self._bases = np.array([item[hull[0]] for item, hull in zip(items, hulls, strict=True)]).reshape(-1, 2)
        moves = [(number, *move) for number, hull in enumerate(hulls) for move in pairwise(hull)]
        moves.sort(key=lambda move: slope(items[move[0]][move[1]], items[move[0]][move[2]]))
        self._moves = [(number, after) for number, _, after in moves]
        self._owners = np.array([number for number, _, _ in moves], np.int64)
        changes = [np.subtract(items[number][after], items[number][before]) for number, before, after in moves]
        self._changes = np.array(changes, np.float64).reshape(-1, 2)

    def bound(self, budget: float) -> float:
        """Returns a loss that no solution is below; infinite if nothing fits."""
        return float(self._least_loss(0, np.array([budget]))[0])

    def solve(self, budget: float, limit: float = math.inf) -> Solution | None:
        """Returns the solution with the least loss within a budget, and of several the one with the lowest cost.

        The search may skip solutions with more loss than `limit`. None if nothing fits.
        """
        greedy = self._greedy(budget)
        if greedy is None:
            return None
        limit = min(limit, greedy.loss) + ROUNDING * float(self._bases[:, 1].sum())
        costs, losses = np.zeros(1), np.zeros(1)
        layers: list[tuple[Indices, Indices]] = []
        for number, item in enumerate(self._items):
            options = np.array(item)
            costs, losses = (costs[:, None] + options[:, 0]).ravel(), (losses[:, None] + options[:, 1]).ravel()
            promising = np.flatnonzero(losses + self._least_loss(number + 1, budget - costs) <= limit)
            kept = promising[undominated(costs[promising], losses[promising])]
            followed, lost = _thinned(losses[kept])
            kept, limit = kept[followed], limit + lost
            costs, losses = costs[kept], losses[kept]
            layers.append(np.divmod(kept, len(item)))
        if not losses.size:
            return greedy
        picked: list[int] = []
        state = losses.size - 1  # the least loss
        for parents, options in reversed(layers):
            picked.append(int(options[state]))
            state = int(parents[state])
        found = self._solution(picked[::-1])
        return greedy if greedy.is_better(found) else found

    def picked(self, budget: float) -> list[int]:
        """Returns the index of each item's option in the best solution, or of the cheapest options if nothing fits."""
        found = self.solve(budget)
        return self.cheapest if found is None else found.picked

    def _greedy(self, budget: float) -> Solution | None:
        picked, full = list(self.cheapest), set[int]()
        cost = float(self._bases[:, 0].sum())
        if cost > budget:
            return None
        for (number, option), added in zip(self._moves, self._changes[:, 0].tolist(), strict=True):
            if cost + added > budget:
                full.add(number)  # its other moves begin where this one ends
            elif number not in full:
                cost, picked[number] = cost + added, option
        return self._solution(picked)

    def _solution(self, picked: list[int]) -> Solution:
        points = [item[option] for item, option in zip(self._items, picked, strict=True)]
        return Solution(sum(loss for _, loss in points), sum(cost for cost, _ in points), picked)

    def _least_loss(self, first: int, budgets: Floats) -> Floats:
        """Returns the least loss of the items from `first` on in each budget, if they may mix options."""
        base_cost, base_loss = self._bases[first:].sum(axis=0)
        changes = self._changes[self._owners >= first].cumsum(axis=0)
        costs, losses = np.concatenate([[0.0], changes[:, 0]]), np.concatenate([[0.0], changes[:, 1]]) + base_loss
        return np.where(budgets < base_cost, math.inf, np.interp(budgets - base_cost, costs, losses))


def _thinned(losses: Floats) -> tuple[Indices, float]:
    """Returns which of the states, in falling order of loss, are followed, and how much loss this may add."""
    if losses.size <= MAX_STATES:
        return np.arange(losses.size), 0.0
    step = float(losses[0] - losses[-1]) / MAX_STATES
    marks = np.floor((losses - losses[-1]) / step)
    return np.flatnonzero(np.diff(marks, prepend=math.inf)), step  # the first of each mark has the lowest cost
