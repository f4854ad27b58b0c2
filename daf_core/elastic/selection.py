"""What is worth most within a share of the time, at prices as they are known when plans are made."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from daf_core.elastic.cost_model import Prices
from daf_core.elastic.knapsack import PrefixKnapsack
from daf_core.elastic.units import Units
from daf_core.state_checks import amount, count, number

BUDGETS = 100
"""Budgets up to that of everything, for each of which the best set is looked at."""


class HullPoint(NamedTuple):
    """A set of units that no mean of others is worth more than, in as much time.

    Attributes:
        share: The time of a step that trains it, relative to one that trains everything.
        worth: What such a step gains.
        on: Numbers of the units.
    """

    share: float
    worth: float
    on: frozenset[int]


class Selection:
    """Picks what steps train.

    Steps of two sets in turn gain, to first order, the mean of what they gain. So within a share of time those of the
    two corners next to it gain most, of the concave hull over all sets: sets of about the same depth where what lies
    deeper gains less, and the least and the most where that gains more.

    Args:
        units: What may be trained or not.
        prices: What it takes.
        gains: What each unit gains.
        most: Numbers of the units that any step may train.

    Attributes:
        most: The same.
        corners: By what they take.
    """

    def __init__(self, units: Units, prices: Prices, gains: Sequence[float], most: frozenset[int]) -> None:
        self.most = most
        self._all, self._prices, self._gains = units.everything, prices, list(gains)
        # What comes before the first block is trained with everything: a part of embeddings alone would reach as deep.
        inside = [each for each in sorted(most) if not (units.units[each].outside and units.units[each].stage == 0)]
        room = max(self.share(most) - prices.base, 0.0)
        values, own, reaching = ([each[unit] for unit in inside] for each in (gains, prices.own, prices.reaching))
        knapsack = PrefixKnapsack(values, own, reaching, room)
        picked = (knapsack.pick(room * step / BUDGETS) for step in range(1, BUDGETS + 1))
        sets = {units.least(most), most, *(frozenset(inside[index] for index in each) for each in picked if each)}
        self.corners = _hull(HullPoint(self.share(on), math.fsum(gains[unit] for unit in on), on) for on in sets)

    def share(self, on: Collection[int]) -> float:
        """Returns the time of a step that trains these units, relative to one that trains everything."""
        if on == self._all:
            return 1.0  # and not the sum's rounding errors
        prices = self._prices
        reaching = max((prices.reaching[unit] for unit in on), default=0.0)
        return prices.base + reaching + math.fsum(prices.own[unit] for unit in on)

    @property
    def least(self) -> HullPoint:
        """What takes the least time."""
        return self.corners[0]

    def around(self, room: float) -> tuple[HullPoint, HullPoint]:
        """Returns the last corner that takes so much time at most, or the least, and the one after it."""
        before = [corner for corner in self.corners if corner.share <= room]
        following = self.corners[len(before) :]
        low = before[-1] if before else self.least
        return low, following[0] if before and following else low

    def state(self) -> dict[str, Any]:
        """Returns it as JSON-able values."""
        return {"prices": [*self._prices], "gains": self._gains, "most": sorted(self.most)}

    @classmethod
    def from_state(cls, units: Units, state: Mapping[str, Any]) -> Selection:
        """Returns what `state` was made from.

        Raises:
            KeyError, TypeError, ValueError: It was made from something else.
        """
        own, reaching, base = state["prices"]
        prices = Prices([*map(number, own)], [*map(number, reaching)], number(base))
        gains, most = [*map(amount, state["gains"])], frozenset(map(count, state["most"]))
        length = len(units.units)
        if any(len(each) != length for each in (prices.own, prices.reaching, gains)) or not most <= units.everything:
            raise ValueError(f"there are {length} units")
        return cls(units, prices, gains, most)


def _hull(points: Iterable[HullPoint]) -> list[HullPoint]:
    """Returns the upper hull, from what takes least to what takes most; those on a line between others stay."""
    hull: list[HullPoint] = []
    ordered = sorted(points, key=lambda each: (each.share, -each.worth))
    for point in ordered:
        if hull and point.worth <= hull[-1].worth:
            continue
        while len(hull) > 1 and _rise(hull[-2], hull[-1]) < _rise(hull[-1], point) * (1 - 1e-9):
            hull.pop()
        hull.append(point)
    # What seems to gain nothing is trained in the time that is left.
    return hull if ordered[-1].share <= hull[-1].share else [*hull, ordered[-1]]


def _rise(low: HullPoint, high: HullPoint) -> float:
    return (high.worth - low.worth) / max(high.share - low.share, 1e-12)
