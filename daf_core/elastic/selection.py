"""The sets of units that gain most within a share of the time of a full step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from daf_core.elastic.cost_model import UnitCosts
from daf_core.elastic.units import Units
from daf_core.knapsack.choose import lower_hull
from daf_core.state_checks import amount, count, number

SAME_RATE = 1e-9
"""Relative difference in gain per time that rounding makes between equal blocks: all of their sets stay."""


class HullPoint(NamedTuple):
    """A point on the upper concave hull of gain over time: a step's share of a full step's time, its gain and units."""

    share: float
    gain: float
    on: frozenset[int]


class Selection:
    """Picks what steps train, among the units of `most`.

    Steps that alternate between two sets gain, to first order, the mean of both. Within a share of time the two
    neighbours of that share on the concave hull over all sets therefore gain most: sets of about the same depth if
    deeper units gain less, and the least and the most if deeper units gain more. `hull` begins with the least share.
    """

    def __init__(self, units: Units, costs: UnitCosts, gains: Sequence[float], most: frozenset[int]) -> None:
        self.most = most
        self._costs, self._gains = costs, list(gains)
        self.share = costs.share
        # Units before the first block are trained with everything: a part of embeddings alone would reach as deep.
        inside = [each for each in sorted(most) if not (units.units[each].outside and units.units[each].stage == 0)]
        by_rate = sorted(inside, key=lambda unit: -gains[unit] / max(costs.own_cost[unit], 1e-12))
        # With the deepest unit given, costs are sums: the hull takes the units above it by falling gain per time.
        sets = [list(units.least(most)), list(most)]
        sizes = [(on, len(on)) for on in sets]
        points = [(costs.share(on), -self._gain(on)) for on in sets]
        for deepest in inside:
            on = [deepest, *(unit for unit in by_rate if unit < deepest)]
            start = costs.fixed_cost + costs.depth_cost[deepest]
            shares = accumulate((costs.own_cost[unit] for unit in on), initial=start)
            gained = accumulate((-gains[unit] for unit in on), initial=0.0)
            points += [*zip(shares, gained, strict=True)][1:]
            sizes += [(on, size) for size in range(1, len(on) + 1)]
        found = [frozenset(on[:size]) for on, size in (sizes[index] for index in lower_hull(points, SAME_RATE))]
        found.append(most)  # units that seem to gain nothing are trained in the time that is left
        self.hull = [HullPoint(costs.share(on), self._gain(on), on) for on in dict.fromkeys(found)]
        self.least = self.hull[0]  # the set that takes the least time

    def neighbours(self, share: float) -> tuple[HullPoint, HullPoint]:
        """Returns the last point that takes at most this share, or the least, and the point after it."""
        before = [point for point in self.hull if point.share <= share]
        following = self.hull[len(before) :]
        low = before[-1] if before else self.least
        return low, following[0] if before and following else low

    def state(self) -> dict[str, Any]:
        """Returns it as JSON-able values."""
        return {"prices": [*self._costs], "gains": self._gains, "most": sorted(self.most)}

    @classmethod
    def from_state(cls, units: Units, state: Mapping[str, Any]) -> Selection:
        """Returns what `state` was made from; raises one of `DAMAGED` if that was something else."""
        own, depth, fixed = state["prices"]
        costs = UnitCosts([*map(number, own)], [*map(number, depth)], number(fixed))
        gains, most = [*map(amount, state["gains"])], frozenset(map(count, state["most"]))
        lengths = {len(units.units), len(costs.own_cost), len(costs.depth_cost), len(gains)}
        if len(lengths) > 1 or not most <= units.everything:
            raise ValueError(f"there are {len(units.units)} units")
        return cls(units, costs, gains, most)

    def _gain(self, on: Collection[int]) -> float:
        return math.fsum(self._gains[unit] for unit in on)
