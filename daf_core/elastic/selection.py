"""What is worth most within a share of the time, at prices as they are known when plans are made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from daf_core.elastic.costs import Prices
from daf_core.elastic.knapsack import PrefixKnapsack
from daf_core.elastic.units import Units


class Selection:
    """Picks what steps train.

    Args:
        units: What may be trained or not.
        prices: What it takes.
        gains: What each unit gains.
        most: Numbers of the units that any step may train.

    Attributes:
        most: The same.
    """

    def __init__(self, units: Units, prices: Prices, gains: Sequence[float], most: frozenset[int]) -> None:
        self.most = most
        self._prices, self._gains = prices, list(gains)
        self._least = units.least(most)
        # What comes before the first block is trained with everything: a part of embeddings alone would reach as deep.
        self._numbers = [
            number for number in sorted(most) if not (units.units[number].outside and units.units[number].stage == 0)
        ]
        values, own, reaching = (
            [each[number] for number in self._numbers] for each in (self._gains, prices.own, prices.reaching)
        )
        self._knapsack = PrefixKnapsack(values, own, reaching, max(self.share(most) - prices.base, 0.0))

    def share(self, on: Collection[int]) -> float:
        """Returns the time of a step that trains these units, relative to one that trains everything."""
        prices = self._prices
        reaching = max((prices.reaching[unit] for unit in on), default=0.0)
        return prices.base + reaching + math.fsum(prices.own[unit] for unit in on)

    def best(self, room: float) -> frozenset[int]:
        """Returns what is worth most of what takes so much time at most, and the least there is where nothing does."""
        if self.share(self.most) <= room:
            return self.most
        picked = self._knapsack.pick(room - self._prices.base)
        return frozenset(self._numbers[index] for index in picked) or self._least

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
        prices = Prices([*map(float, own)], [*map(float, reaching)], float(base))
        gains, most = [*map(float, state["gains"])], frozenset(map(int, state["most"]))
        count = len(units.units)
        if any(len(each) != count for each in (prices.own, prices.reaching, gains)) or not most <= units.everything:
            raise ValueError(f"there are {count} units")
        return cls(units, prices, gains, most)
