"""Training parts of a model within a share of the time: what DAF chooses, and what it is compared with."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.methods import StoredBytes
from daf_core import ActivationEngine, DAFConfig, ElasticConfig
from daf_core.elastic.clock import StepTimes
from daf_core.elastic.costs import StepCosts
from daf_core.elastic.course import Choice, Course
from daf_core.elastic.training import ElasticTraining
from daf_core.elastic.units import Units


class RandomCourse(Course):
    """Has each step train units that are drawn at random, as many as its share of the time is enough for."""

    def __init__(self, units: Units, costs: StepCosts, config: ElasticConfig) -> None:
        super().__init__(units, costs, config)
        self._numbers = random.Random(0)

    def choose(self) -> Choice:
        choice = super().choose()
        if self.mixture is None:
            return choice
        left = self.target + self._balance
        on: frozenset[int] = frozenset()
        for unit in self._numbers.sample(sorted(self._all), len(self._all)):
            if self._costs.share(on | {unit}) <= left:
                on |= {unit}
        return Choice(on, choice.measured, False)

    def share(self, on: frozenset[int]) -> float:
        return self._costs.share(on)


class TopHalfCourse(Course):
    """Has each step train the blocks of the upper half."""

    def __init__(self, units: Units, costs: StepCosts, config: ElasticConfig) -> None:
        super().__init__(units, costs, config)
        half = len(units.blocks) / 2
        self._half = frozenset(number for number, unit in enumerate(units.units) if unit.stage >= half)

    def choose(self) -> Choice:
        return Choice(self._half, True, False)

    def finish(self, choice: Choice, times: StepTimes | None, gains: object) -> bool:
        if times is not None:
            self._costs.add(times, choice.on)
        return False


COURSES = {"elastic": Course, "random": RandomCourse, "top-half": TopHalfCourse}


class ElasticMethod:
    """Trains parts of a model in each step, with activations stored exactly.

    Args:
        model: The model.
        kind: One of `COURSES`.
        share: The mean time of a step, relative to one that trains everything.
    """

    def __init__(self, model: nn.Module, kind: str, share: float) -> None:
        self._engine = ActivationEngine(model, DAFConfig(precision="exact"))
        config = ElasticConfig(time=share)
        self._elastic = ElasticTraining(model, model, self._engine, config, COURSES[kind])
        self._shares: list[float] = []
        self._depths: list[int] = []

    def audit(self, batch: dict[str, Tensor], loss_function: Callable[[dict[str, Tensor]], Tensor]) -> None:
        return

    def compress(self) -> AbstractContextManager[object]:
        self._elastic.begin_step()
        return self._engine.compress()

    def update(self, optimizer: Optimizer) -> None:
        self._elastic.before_update([optimizer])
        optimizer.step()
        step = self._elastic.finish_step()
        assert step is not None
        self._shares.append(step.share)
        self._depths.append(step.depth)

    def finish_step(self) -> None:
        self._engine.finish_step()

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        raise NotImplementedError("steps differ in what they hold; benchmarks.elastic measures them")

    def figures(self) -> dict[str, float]:
        steps = len(self._shares)
        return {"daf/elastic_share": sum(self._shares) / steps, "daf/elastic_depth": sum(self._depths) / steps}

    def close(self) -> None:
        self._elastic.close()
        self._engine.close()
