"""Training parts of a model within a share of the time: what DAF chooses, and what it is compared with."""

import random
import re
from functools import partial
from unittest import mock

from torch import nn

from daf_core import ElasticConfig
from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.schedule import Choice, StepSchedule
from daf_core.elastic.training import ElasticTraining
from daf_core.elastic.units import Units
from daf_integrations.cli.bench.methods import Method, is_method, open_method
from daf_integrations.session import session


class RandomSchedule(StepSchedule):
    """Has each step train units in random order, each for which there is time left.

    An adapter by itself takes next to none: with adapters this is as deep as time is left for.
    """

    def __init__(self, units: Units, costs: StepCosts, config: ElasticConfig) -> None:
        super().__init__(units, costs, config)
        self._numbers = random.Random(0)

    def choose(self) -> Choice:
        choice = super().choose()
        if not self.is_planned:
            return choice
        on: frozenset[int] = frozenset()
        for unit in self._numbers.sample(sorted(self._all), len(self._all)):
            if self.share(on | {unit}) <= self.target + self._balance:
                on |= {unit}
        return Choice(on or self._units.least(self.most), choice.measured and not choice.probe, False)


class TopHalfCourse(StepSchedule):
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


COURSES = {"random": RandomSchedule, "top-half": TopHalfCourse}
"""What others than DAF train in a share of the time, by name: ``random@0.7`` draws units at random."""

_SHARED = re.compile(r"(?P<kind>elastic|random|top-half)@(?P<share>0?\.\d+)")


def is_trained(name: str) -> bool:
    """Says whether `open_trained` knows the name."""
    return is_method(name) or _SHARED.fullmatch(name) is not None


def time_share(name: str) -> float:
    """Returns the part of a plain step's time that a method's steps are to take."""
    shared = _SHARED.fullmatch(name)
    return 1.0 if shared is None else float(shared["share"])


def open_trained(name: str, model: nn.Module) -> Method:
    """Returns the named method, at work on the model: one of `daf bench`, or one of `COURSES` with a share."""
    shared = _SHARED.fullmatch(name)
    if shared is None or shared["kind"] not in COURSES:
        return open_method(name, model)
    training = partial(ElasticTraining, course=COURSES[shared["kind"]])
    with mock.patch.object(session, "ElasticTraining", training):
        return open_method(f"elastic@{shared['share']}", model)
