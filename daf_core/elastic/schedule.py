"""Which steps train everything and which a part, so that their mean keeps a share of time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from daf_core.elastic.costs import StepCosts
from daf_core.elastic.knapsack import PrefixKnapsack

BUDGETS = 20
"""Budgets between the least that a step takes and the share, for each of which the best part is looked at."""

RETURNS = 0.5
"""A unit that is trained in a share q of the steps is taken to gain q ** `RETURNS` of what it gains in every step: what
waits for its turn gains more in it. With 1, parts that never change would look as good as alternation, and they train
worse."""


@dataclass(frozen=True)
class Mixture:
    """Steps of two kinds.

    Attributes:
        part: Numbers of the units that all steps train.
        part_share: What a step with these takes, relative to one that trains everything.
        most: Numbers of the units that the other steps train.
        most_share: What such a step takes.
        target: The mean that is to be kept.
    """

    part: frozenset[int]
    part_share: float
    most: frozenset[int]
    most_share: float
    target: float

    @property
    def frequency(self) -> float:
        """The share of steps that train most."""
        if self.most_share <= self.target or self.most_share <= self.part_share:
            return 1.0
        return max((self.target - self.part_share) / (self.most_share - self.part_share), 0.0)

    def share_of(self, on: frozenset[int]) -> float:
        """Returns what one of the steps takes, by the units that it trains."""
        return self.part_share if on == self.part and on != self.most else self.most_share

    def worth(self, gains: Sequence[float]) -> float:
        """Returns what a step gains on average.

        Args:
            gains: What each unit gains where it is trained in every step.
        """
        seldom = self.frequency**RETURNS
        return math.fsum(gains[unit] * (1.0 if unit in self.part else seldom) for unit in self.most)


def best_mixture(
    costs: StepCosts, gains: Sequence[float], most: frozenset[int], target: float, refresh: int
) -> Mixture | None:
    """Returns the mixture that gains most; None where even the least step takes more than the target.

    Where possible it is one of those with a step that trains most every `refresh` steps: gains are measured in these.

    Args:
        costs: What steps take.
        gains: What each unit gains.
        most: The units that may be trained.
        target: The mean share of time.
        refresh: Steps after which gains are to be measured anew.
    """
    most_share = costs.share(most)
    mixtures = [
        Mixture(part, costs.share(part), most, most_share, target) for part in _parts(costs, gains, most, target)
    ]
    fitting = [mixture for mixture in mixtures if mixture.part_share <= target]
    often = [mixture for mixture in fitting if mixture.frequency * refresh >= 1]
    return max(often or fitting, key=lambda mixture: mixture.worth(gains), default=None)


def _parts(costs: StepCosts, gains: Sequence[float], most: frozenset[int], target: float) -> Iterator[frozenset[int]]:
    """Yields what a part may be: for each of some budgets, what is worth most."""
    own, reaching, base = costs.prices()
    # What comes before the first block is trained with everything: a part of embeddings alone would reach as deep.
    units = costs.units.units
    numbers = [number for number in sorted(most) if not (units[number].outside and units[number].stage == 0)]
    room = target - base
    yield costs.units.least(most)
    if room <= 0:
        return
    values, costs_of_units, prices = ([each[number] for number in numbers] for each in (gains, own, reaching))
    knapsack = PrefixKnapsack(values, costs_of_units, prices, room)
    seen: set[frozenset[int]] = set()
    for step in range(1, BUDGETS + 1):
        picked = frozenset(numbers[index] for index in knapsack.pick(room * step / BUDGETS))
        if picked and picked not in seen:
            seen.add(picked)
            yield picked
