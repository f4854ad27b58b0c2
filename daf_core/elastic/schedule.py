"""The course of an elastic training: what the next step trains, and when that is thought over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from daf_core.config import ElasticConfig
from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.importance import merged
from daf_core.elastic.selection import HullPoint, Selection
from daf_core.elastic.units import Units
from daf_core.errors import ElasticError
from daf_core.state_checks import amount, count, flag, number

MEASURED = 2
"""Steps whose times are taken, of those that train most at the beginning and of those after each plan, but for the
first one."""

DEFAULT_TIMES = {"adapters": 0.7, "whole": 0.45}
"""Shares of the time where none is given. With adapters, steps that train a head alone take .5 to .6."""

log = getLogger("daf")


@dataclass(frozen=True)
class Choice:
    """What a step is to do: the numbers of its units, and whether its times and (`probe`) its gains are measured."""

    on: frozenset[int]
    measured: bool
    probe: bool


@dataclass(frozen=True)
class ElasticStep:
    """What a step trained: blocks that built a graph, and its time relative to a full step, as far as that is known."""

    depth: int
    share: float


class StepSchedule:
    """Decides step by step.

    The first step trains the least there is, and so do those after it until it is known what memory activations take
    where that is limited. Then come steps that train most, until it is known what they take and gain, and then those of
    two sets in turn which gain most within the share: what a step leaves of it, those after it may use. A little is put
    aside, so that a step that trains most can be measured now and then. `target` is the mean time of a step that is
    kept, relative to a full step: the share that is asked for, or the nearest one where no step takes as little.
    """

    def __init__(self, units: Units, costs: StepCosts, config: ElasticConfig) -> None:
        self._units, self._all, self._costs = units, units.everything, costs
        limited = 1.0 if config.memory is not None else DEFAULT_TIMES["whole" if units.whole else "adapters"]
        self.target = self._asked = limited if config.time is None else config.time
        self._memory, self._refresh = config.memory, config.refresh
        self._gains: list[float] | None = None
        self._selection: Selection | None = None
        self._early: list[frozenset[int]] = []
        self._balance = 0.0
        self._settled = False
        self._since_plan = self._seen = 0

    def choose(self) -> Choice:
        """Returns what the next step is to do."""
        if self._selection is None:
            if not self._early or (self._memory is not None and not self._costs.held(0)):
                return Choice(self._first, True, False)
            return Choice(self.most, len(self._early) > 1, len(self._early) > 1)
        due = self._since_plan >= self._refresh
        # A little less than the balance: sums of shares that come out even have rounding errors.
        if self._excess <= 0 or (due and self._balance - self._excess >= -1e-9):
            return Choice(self.most, due, due)
        low, high, saved = self._turns(self._selection)
        aside = min(saved * (1 + self._since_plan), self._excess)
        affordable = high.share <= self.target + self._balance - aside + 1e-9
        return Choice(high.on if affordable else low.on, 1 <= self._seen <= MEASURED, False)

    def finish(self, choice: Choice, times: StepTimes | None, gains: Sequence[float] | None) -> bool:
        """Ends a step; says whether `plan` is to be called now.

        Times and gains, which are in the order of the units' numbers, are None where they were not measured.
        """
        if times is not None:
            self._costs.add(times, choice.on)
        if gains is not None:
            found = dict(zip(sorted(choice.on), gains, strict=True))
            self._gains = merged(self._gains, [found.get(unit, 0.0) for unit in sorted(self._all)])
        if self._selection is None:
            if times is not None or len(self._early) < 2:  # no more of those that nothing is known of
                self._early.append(choice.on)
            self._seen += choice.probe and times is not None
            return self._seen == MEASURED
        self._balance = min(self._balance + self.target - self.share(choice.on), 1.0)
        self._since_plan += 1
        self._seen += not choice.probe
        return choice.probe or (not self._settled and self._plan_seen)

    def plan(self) -> None:
        """Looks anew at what units take and gain.

        Raises:
            ElasticError: At the beginning of a training: no step holds as little as is allowed.
        """
        most, before = self._allowed, self._selection
        if self._memory is not None and before is None:
            needed = self._costs.held(self._units.depth(most)) / max(self._costs.held(0), 1)
            if needed > self._memory:
                raise ElasticError(
                    f"elastic.memory={self._memory:g} cannot be kept: a step that trains the last block alone holds "
                    f"{needed:.3f} of the activations of one that trains everything. Allow more, or leave out "
                    "elastic.memory"
                )
        found = Selection(self._units, self._costs.unit_costs(), self._gains or [1.0] * len(self._all), most)
        if before is None:
            self._balance = sum(self.target - found.share(on) for on in self._early)
        elif found.least.share > self._asked:
            found = self._out_of_reach(found, before)
        else:
            self.target = self._asked
        self._selection = found
        self._settled |= self._plan_seen or (before is not None and found is not before)
        self._since_plan = self._seen = 0

    def _out_of_reach(self, found: Selection, before: Selection) -> Selection:
        """Returns what is done where even the least step takes more than the asked share.

        Times are measured, and others in each run: they end none.
        """
        share = found.least.share
        if not self._settled and not self._plan_seen:
            return before
        if self._settled and self.target == self._asked:
            log.warning(
                "steps that train as little as possible take %.2f of the time of one that trains everything now, more "
                "than elastic.time=%g: what they train stays as it was",
                share,
                self._asked,
            )
            return before
        # The nearest share is that of steps that train the least, and now and then of one that measures the most.
        nearest = share + max(found.share(found.most) - share, 0.0) / (self._refresh + 1)
        if not self._settled:
            log.warning(
                "elastic.time=%g cannot be kept: a step takes %.2f of the time of one that trains everything even "
                "where it trains as little as possible. Steps take %.2f on average until it can; give at least that, "
                "or leave out elastic.time",
                self._asked,
                share,
                nearest,
            )
            self._balance = 0.0  # what the first steps took is not paid back
        self.target = nearest
        return found

    @property
    def _first(self) -> frozenset[int]:
        """The units of the first step: one in the last block, or all of it where bytes are limited, to see them.

        Not the head alone: a model may have one that its loss does not use.
        """
        if self._memory is None:
            return frozenset({min(self._all)})
        depths = {unit: self._units.depth({unit}) for unit in self._all}
        return frozenset(unit for unit, depth in depths.items() if depth == max(depths.values()))

    @property
    def most(self) -> frozenset[int]:
        """Numbers of the units that any step may train, as it was planned."""
        return self._allowed if self._selection is None else self._selection.most

    @property
    def _allowed(self) -> frozenset[int]:
        """Numbers of the units for which the share of memory suffices, as far as it is known."""
        if self._memory is None:
            return self._all
        whole = self._costs.held(0)
        fitting = {unit for unit in self._all if self._costs.held(self._units.depth({unit})) <= self._memory * whole}
        return frozenset(fitting) or self._first

    @property
    def is_planned(self) -> bool:
        """Whether it is known what pays; not so at the beginning."""
        return self._selection is not None

    @property
    def pair(self) -> tuple[frozenset[int], frozenset[int]]:
        """Numbers of the units that steps train now, in turn: fewer, and more where time was left."""
        if self._selection is None or self._excess <= 0:
            return self.most, self.most
        low, high, _ = self._turns(self._selection)
        return low.on, high.on

    def share(self, on: frozenset[int]) -> float:
        """Returns the time of a step that trains these units, relative to one that trains everything."""
        return self._costs.share(on) if self._selection is None else self._selection.share(on)

    @property
    def _excess(self) -> float:
        """What a step that trains most takes more than the mean one."""
        return self.share(self.most) - self.target

    def _turns(self, selection: Selection) -> tuple[HullPoint, HullPoint, float]:
        """Returns what steps train in turn, and what each of them puts aside for one that trains most.

        Nothing where that is one of both, and comes often enough; else half of what there is at most, so that others
        than the least are trained.
        """
        low, high = selection.neighbours(self.target)
        if high.on == self.most and (self.target - low.share) * self._refresh >= high.share - low.share:
            return low, high, 0.0
        saved = min(self._excess / self._refresh, max(self.target - selection.least.share, 0.0) / 2)
        return *selection.neighbours(self.target - saved), saved

    @property
    def _plan_seen(self) -> bool:
        """Whether steps were measured since the last plan."""
        return self._seen > MEASURED

    def state(self) -> dict[str, Any]:
        """Returns where it is, as JSON-able values."""
        return {
            "gains": self._gains,
            "selection": None if self._selection is None else self._selection.state(),
            "early": [sorted(on) for on in self._early],
            "balance": self._balance,
            "since_plan": self._since_plan,
            "settled": self._settled,
            "target": self.target,
            "shares": [self._asked, self._memory],
            "seen": self._seen,
            "costs": self._costs.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned, with a plan of its own where the shares were others; see `plan`.

        Raises one of `DAMAGED` if it is something else.
        """
        gains, selection = state["gains"], state["selection"]
        self._costs.load(state["costs"])
        if gains is not None and len(gains) != len(self._all):
            raise ValueError(f"there are {len(self._all)} units")
        self._gains = None if gains is None else [amount(gain) for gain in gains]
        self._selection = None if selection is None else Selection.from_state(self._units, selection)
        self._early = [frozenset(map(count, on)) for on in state["early"]]
        if not all(on <= self._all for on in self._early):
            raise ValueError(f"there are {len(self._all)} units")
        self._balance = number(state["balance"])
        self._since_plan, self._seen = count(state["since_plan"]), count(state["seen"])
        self._settled = flag(state["settled"])
        if state["shares"] == [self._asked, self._memory]:
            self.target = float(state["target"])
        elif selection is not None:
            self._selection, self._settled, self._seen = None, False, 0
            self.plan()
