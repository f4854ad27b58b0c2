"""Steps whose times and bytes are made up, so that it is known what is to be found out about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from daf_core.config import ElasticConfig
from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.schedule import Choice, StepSchedule
from daf_core.elastic.units import Units


class World:
    """What steps of a model with these units take; blocks take by how much more or less than others `uneven` says."""

    def __init__(self, units: Units, seed: int = 0, elements: int = 100, uneven: float = 0.3) -> None:
        random, count = np.random.default_rng(seed), len(units.blocks)
        self.units, self.elements = units, elements
        self.plain = random.uniform(1 - uneven, 1 + uneven, count)
        self.with_graph = self.plain * 1.1
        self.backward = random.uniform(2 - uneven, 2 + uneven, count)
        self.outside, self.rest = 1.0, 0.5
        self.held = [int(size) for size in random.uniform(1000 * (1 - uneven), 1000 * (1 + uneven), count)]
        self.held_outside = 500

    def depth(self, on: Collection[int]) -> int:
        return min((self.units.units[number].stage for number in on), default=len(self.units.blocks))

    def times(self, on: Collection[int], scale: float = 1.0) -> StepTimes:
        """Returns what a step takes on a batch of so many times as much."""
        depth, count = self.depth(on), len(self.units.blocks)
        graphs = [number >= depth for number in range(count)]
        own = np.ones(count)
        for number, unit in enumerate(self.units.units):
            own[unit.stage] -= unit.share if number not in on else 0.0
        forward = np.where(graphs, self.with_graph, self.plain) * scale
        trained = [*(self.units.units[number].elements for number in on), *(p.numel() for p in self.units.always)]
        everything = [*(unit.elements for unit in self.units.units), *(p.numel() for p in self.units.always)]
        return StepTimes(
            int(self.elements * scale),
            [*map(float, forward)],
            graphs,
            [*map(float, np.where(graphs, own * self.backward, 0.0) * scale)],
            self.outside * scale,
            self.rest * scale * sum(trained) / sum(everything),
            [int(size * scale) if graph else 0 for size, graph in zip(self.held, graphs, strict=True)],
            int(self.held_outside * scale),
            int(self.elements * scale),
        )

    def share(self, on: Collection[int]) -> float:
        return self._seconds(on) / self._seconds(range(len(self.units.units)))

    def held_share(self, on: Collection[int]) -> float:
        return self._bytes(self.depth(on)) / self._bytes(0)

    def _bytes(self, depth: int) -> int:
        return self.held_outside + sum(self.held[depth:])

    def _seconds(self, on: Collection[int]) -> float:
        times = self.times(on)
        return sum(times.forward) + sum(times.backward) + times.outside + times.rest


class Simulation:
    """A course in such a world.

    Attributes:
        done: What each step has trained.
    """

    def __init__(self, world: World, gains: Sequence[float] | None = None, **config: float) -> None:
        self.world, self.config = world, ElasticConfig(**config)
        self.gains = [1.0] * len(world.units.units) if gains is None else gains
        self.costs = StepCosts(world.units, [1] * len(world.units.blocks))
        self.course = StepSchedule(world.units, self.costs, self.config)
        self.done: list[Choice] = []
        self.plans = 0

    def step(self, gains: Sequence[float] | None = None, forgotten: bool = False, scale: float = 1.0) -> Choice:
        choice = self.course.choose()
        self.done.append(choice)
        times = self.world.times(choice.on, scale) if choice.measured and not forgotten else None
        gains = self.gains if gains is None else gains
        if self.course.finish(choice, times, [gains[unit] for unit in sorted(choice.on)] if choice.probe else None):
            self.plans += 1
            self.course.plan()
        return choice

    def steps(self, count: int) -> Simulation:
        for _ in range(count):
            self.step()
        return self

    def mean_share(self, choices: Iterable[Choice]) -> float:
        """Returns the mean of what steps were predicted to take."""
        shares = [self.costs.share(choice.on) for choice in choices]
        return sum(shares) / len(shares)
