"""The elastic training of one model: has each step train what its course says, and watches it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from logging import getLogger
from typing import Any

from torch import nn

from daf_core import distributed
from daf_core.config import ElasticConfig
from daf_core.elastic.block_timer import BlockTimer, StepTimes, TimedSteps
from daf_core.elastic.call_order import ForwardTracer
from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.freeze import STALE, FrozenUnits, InputGradientHooks, forget_momentum
from daf_core.elastic.importance import gains_of_update
from daf_core.elastic.schedule import Choice, ElasticStep, StepSchedule
from daf_core.elastic.units import Calls, Units, registered_calls, renumbered, units_of, warn_of_deepest
from daf_core.engine import ActivationEngine
from daf_core.errors import ElasticError
from daf_core.model.blocks import Block, layers_of
from daf_core.model.module_hooks import InstanceHook, is_training_pass
from daf_core.plan.plan_file import PlanFile
from daf_core.state_checks import as_a_whole, count
from daf_core.unsupported.elastic import ELASTIC, ELASTIC_FIRST_STEP, ELASTIC_OPTIMIZERS, ELASTIC_UNITS, FirstStep
from daf_core.unsupported.table import Context, check_supported

log = getLogger("daf")


@dataclass
class Learned:
    """What is known of one set of parameters that the user trains."""

    trained: list[nn.Parameter]
    unused: set[int]  # indices of those that no gradient reaches
    units: Units
    schedule: StepSchedule
    frozen: FrozenUnits
    idle: dict[str, int]  # steps since each unit was last trained, by its name


class ElasticTraining:
    """Has each step of a model's training train a part of it, within a share of time or memory.

    Only from the beginning of a step to its end parameters are marked as not trained: optimizers, checkpoints and
    evaluation find what the user has chosen. `outer` is the model as it is called, perhaps in a
    DistributedDataParallel. The plan file, if there is one, has the times of an earlier run. Courses other than
    `StepSchedule` are for comparison.

    Raises:
        ConfigError: The model cannot be trained elastically.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: nn.Module,
        engine: ActivationEngine,
        config: ElasticConfig,
        course: Callable[[Units, StepCosts, ElasticConfig], StepSchedule] = StepSchedule,
        plan_file: PlanFile | None = None,
    ) -> None:
        self._make_course = course
        self._model, self._outer, self._engine, self._config = model, outer, engine, config
        self._blocks = layers_of(model)
        check_supported(ELASTIC, Context(outer, blocks=len(self._blocks)))
        self._others: dict[tuple[int, ...], Learned] = {}
        self._follow(registered_calls(model), self._user_trains(), set())
        check_supported(ELASTIC_UNITS, self._learned.units)
        self._aside = self._inside = self._checked = self._begun = self._stepped = False
        self._updated: set[int] = set()
        self._choice: Choice | None = None
        self._watch: ForwardTracer | None = None
        self._clock: BlockTimer | None = None
        self._update: Callable[[], list[float]] | None = None  # tells the gains of the optimizer's step
        self._gains: list[float] | None = None
        self._timed = TimedSteps(plan_file)
        self._hooks = InputGradientHooks(model)
        self._holder = model.register_forward_pre_hook(InstanceHook(self._hold))

    def begin_step(self) -> None:
        """Begins a step, unless one has begun already; to be called while no graph of the model is alive.

        Raises:
            ConfigError: The model cannot be trained elastically any more.
        """
        if self._choice is not None or not self._follow_user():
            return
        if not self._begun:  # the user may have switched checkpoints on since
            check_supported(ELASTIC, Context(self._outer, blocks=len(self._blocks)))
            self._begun = True
        self._choice = self._learned.schedule.choose()
        self._updated, self._stepped = set(), False
        if self._choice.measured or not self._checked:
            self._watch = ForwardTracer(self._model)
        if self._choice.measured:
            self._clock = self._started_clock()

    def before_update(self, optimizers: Iterable[Any]) -> None:
        """Is to be called between backward and the step of these optimizers.

        Raises:
            ConfigError: One of them moves what has no gradient.
        """
        optimizers = list(optimizers)
        check_supported(ELASTIC_OPTIMIZERS, optimizers)
        if self._choice is None:
            return
        self._updated |= {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        on = [self._learned.units.units[number] for number in sorted(self._choice.on)]
        back = [unit for unit in on if self._learned.idle[unit.name] > STALE and not self._choice.probe]
        forget_momentum(optimizers, [parameter for unit in back for parameter in unit.parameters])
        if self._choice.probe and self._update is None:  # of several optimizers the first
            self._update = gains_of_update(on)

    def finish_step(self) -> ElasticStep | None:
        """Ends a step, after the optimizer's and before gradients are dropped.

        None where none had begun, or where other optimizers have yet to step: they end it, or the next forward pass.

        Raises:
            ElasticError: Blocks that were not trained have built a graph, or no step holds as little as is allowed.
        """
        if self._choice is None:
            return None
        self._stepped = True
        self._learned.frozen.unfreeze()
        if self._update is not None:  # gradients may be gone when the last of several optimizers has stepped
            found, before = self._update(), self._gains or []
            self._gains = [new or old for new, old in zip_longest(found, before, fillvalue=0.0)]
        waiting = [each for each in self._learned.trained if each.grad is not None and id(each) not in self._updated]
        return None if self._updated and waiting else self.finish_stepped()

    def finish_stepped(self) -> ElasticStep | None:
        """Ends a step that an optimizer has stepped in, though others have gradients left; None where none has."""
        choice = self._choice
        if choice is None or not self._stepped:
            return None
        self._choice = None
        clock, self._clock = self._clock, None
        times = None if clock is None else self._timed.add(clock.stop())
        gains, self._gains, self._update = self._gains, None, None
        self._learned.frozen.unfreeze()
        choice, times = self._look(choice, times)
        units, schedule, idle = self._learned.units, self._learned.schedule, self._learned.idle
        for number, unit in enumerate(units.units):
            # What comes back to be measured alone, with the momentum that it had, has not come back.
            back = number in choice.on and not (choice.probe and idle[unit.name] > STALE)
            idle[unit.name] = 0 if back else idle[unit.name] + 1
        due = schedule.finish(choice, times, gains)
        step = ElasticStep(len(units.blocks) - units.depth(choice.on), schedule.share(choice.on))
        if not schedule.is_planned:  # the first process decides what the next step may train
            state, due = distributed.broadcast((schedule.state(), due), self._outer)
            schedule.load(state)
        if due:
            self._plan()
        return step

    @contextmanager
    def holding(self) -> Generator[None]:
        """Keeps what is off as it is in the forward passes inside; others are none of this training.

        It may have ended with an error that nobody told of.
        """
        self._inside = True
        self._hold()
        try:
            yield
        except BaseException:  # then there is no graph, nor a step to end
            self._learned.frozen.unfreeze()
            raise
        finally:
            self._inside = False

    def _hold(self, *_: object) -> None:
        """Marks again what is off: PEFT's switches of adapters mark all as trained, and trainers install hooks anew."""
        if self._choice is not None and self._inside and not self._aside and is_training_pass():
            self._learned.frozen.apply(self._choice.on)
            self._hooks.take()

    def unfreeze(self) -> None:
        """Marks as trained what the user trains, until the next forward pass of a step.

        Not while a graph is alive: its checkpoints would be recomputed with another choice.
        """
        if not self._engine.held_bytes:
            self._learned.frozen.unfreeze()

    @contextmanager
    def apart(self) -> Generator[None]:
        """Has what runs inside be no part of the step: an audit, or what measures the model."""
        clock, watch = self._stop_watching()
        try:
            yield
        finally:
            # From here on: what the step did before takes little, or is an earlier batch that it accumulates.
            self._clock = None if clock is None else self._started_clock()
            self._watch = None if watch is None else ForwardTracer(self._model)

    @contextmanager
    def everything(self) -> Generator[None]:
        """Has everything trained inside that any step may train, for what measures the model."""
        if self._choice is None:
            yield
            return
        with self.apart():
            self._learned.frozen.apply(self._learned.schedule.most)
            self._aside = True
            try:
                yield
            finally:
                self._aside = False
                self._learned.frozen.apply(self._choice.on)

    @property
    def trains_most(self) -> bool:
        """Whether this step trains all that any step may train."""
        return self._choice is None or self._choice.on == self._learned.schedule.most

    @property
    def held_off(self) -> list[nn.Parameter]:
        """Parameters that are not trained in this step, and that the user trains."""
        return self._learned.frozen.off

    @property
    def without_graph(self) -> frozenset[str]:
        """Names of the blocks that build no graph in this step."""
        units = self._learned.units
        lowest = 0 if self._choice is None else units.depth(self._choice.on)
        return frozenset(block.name for block in units.blocks[:lowest])

    @property
    def summary(self) -> str:
        """What is trained now, in words."""
        units, schedule, blocks = self._learned.units, self._learned.schedule, len(self._learned.units.blocks)
        if not schedule.is_planned:
            return f"the best of {blocks} blocks, once it is known"
        if schedule.pair[0] == schedule.most:
            return f"{blocks - units.depth(schedule.most)} of {blocks} blocks in every step"
        parts = [f"{len(on)} of {len(units.units)} units in {blocks - units.depth(on)}" for on in schedule.pair]
        return f"{' and '.join(dict.fromkeys(parts))} of {blocks} blocks"

    def close(self) -> None:
        """Makes the model the one it was."""
        self._leave_step()
        self._hooks.restore()
        self._holder.remove()

    def state(self) -> dict[str, Any]:
        """Returns where it is, as JSON-able values; the order of calls in lists, as trainers write keys in order."""
        return {
            "calls": [*self._calls.items()],
            "trained": self._names(),
            "unused": sorted(self._learned.unused),
            "idle": dict(self._learned.idle),
            "course": self._learned.schedule.state(),
            "timed": self._timed.count,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            ElasticError, StateError: A new share cannot be kept, or it is something else; all is as before then.
        """
        self._leave_step()
        with as_a_whole(self, ("_learned", "_blocks", "_calls"), "elastic training of this model"):
            timed, calls = count(state.get("timed", 0)), {str(name): count(size) for name, size in state["calls"]}
            known = {name for name, _ in self._model.named_parameters()}
            own = {*state["trained"]} <= known and all(block.name in calls for block in self._blocks)
            if own and [*state["trained"]] != self._names():  # of this model, when it trained others
                self._timed.count = timed
                log.info("other parameters were trained when this state was saved: DAF measures anew what pays")
                return
            trained = self._learned.trained
            self._blocks = [block for block in self._blocks if block.name in calls]
            self._follow(calls, trained, {range(len(trained))[count(number)] for number in state["unused"]})
            if state["idle"].keys() != self._learned.idle.keys():
                raise ValueError("the model's units are others")
            self._learned.idle = {name: count(steps) for name, steps in state["idle"].items()}
            self._learned.schedule.load(state["course"])
        self._timed.count = timed

    def _leave_step(self) -> None:
        self._stop_watching()
        self._learned.frozen.unfreeze()
        self._choice = self._update = self._gains = None
        self._stepped = False

    def _names(self) -> list[str]:
        known = set(map(id, self._learned.trained))
        return [name for name, each in self._model.named_parameters() if id(each) in known]

    def _user_trains(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _follow_user(self) -> bool:
        """Goes on with what the user trains now, as in gradual unfreezing or with adapters that take turns.

        Says whether there is something to choose from, which may not be so where the user trains a head alone.
        """
        now, before = self._user_trains(), self._learned
        has_others = not all(map(self._has, self._blocks))
        if list(map(id, now)) == list(map(id, before.trained)) and not has_others:
            return True
        if has_others:  # some were taken out, or replaced
            self._blocks, self._calls, self._checked = layers_of(self._model), registered_calls(self._model), False
            self._others.clear()
        known = self._others.get(tuple(map(id, now)))
        if known is None:
            unused = {id(before.trained[number]) for number in before.unused}
            used = [each for each in now if id(each) not in unused]
            if not units_of(self._model, self._blocks, used, self._calls).is_choice:
                return False
            self._follow(self._calls, now, {number for number, each in enumerate(now) if id(each) in unused})
            log.info("what is trained has changed: DAF measures anew what pays")
        else:
            self._learned = known
        if not has_others:
            self._others[tuple(map(id, before.trained))] = before
        return True

    def _has(self, block: Block) -> bool:
        """Says whether a block is a part of the model, perhaps by another name: it may have been wrapped."""
        with suppress(AttributeError):
            if self._model.get_submodule(block.name) is block.module:
                return True
        return any(module is block.module for module in self._model.modules())

    def _started_clock(self) -> BlockTimer:
        return BlockTimer(self._model, self._learned.units.blocks, lambda: self._engine.held_bytes)

    def _stop_watching(self) -> tuple[BlockTimer | None, ForwardTracer | None]:
        watching, self._clock, self._watch = (self._clock, self._watch), None, None
        for each in filter(None, watching):
            each.stop()
        return watching

    def _follow(self, calls: Calls, trained: list[nn.Parameter], unused: set[int]) -> None:
        """Orders units by how modules are called, and forgets what was learned."""
        self._calls = calls
        used = [parameter for number, parameter in enumerate(trained) if number not in unused]
        units = units_of(self._model, self._blocks, used, calls)
        costs = StepCosts(units, [calls.get(block.name, 0) for block in units.blocks])
        schedule = self._make_course(units, costs, self._config)
        idle = {unit.name: 0 for unit in units.units}
        self._learned = Learned(trained, unused, units, schedule, FrozenUnits(units), idle)

    def _look(self, choice: Choice, times: StepTimes | None) -> tuple[Choice, StepTimes | None]:
        """Looks at what was watched in a step, until there was one whose lowest blocks were not trained.

        The first time units are put in the order in which they are used; the step is returned in the new order.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return choice, times
        watch.stop()
        if not any(watch.calls.values()):
            return choice, times
        in_order = any(self._calls.values())
        if not in_order:
            before, trained = self._learned.units, self._learned.trained
            always = set(map(id, units_of(self._model, self._blocks, trained, watch.calls).always))
            unused = {number for number, each in enumerate(trained) if id(each) in always and each.grad is None}
            self._blocks = watch.recorded(self._blocks, trained)
            self._follow(watch.calls, trained, unused)
            units = self._learned.units
            names = [block.name for block in units.blocks]
            check_supported(ELASTIC_FIRST_STEP, FirstStep(names, watch.calls, watch.unrecorded))
            check_supported(ELASTIC_UNITS, units)
            warn_of_deepest(units)
            choice = replace(choice, on=renumbered(choice.on, before, units))
            in_order = before.blocks == units.blocks
        if in_order:
            depth = self._learned.units.depth(choice.on)
            watch.check_graphs(self._learned.units.blocks[:depth])
            self._checked = self._checked or depth > 0
        return choice, times if in_order else None

    def _plan(self) -> None:
        """Has all processes follow the plan of the first one: they measure different times."""
        error, schedule = None, self._learned.schedule
        try:
            schedule.plan()
        except ElasticError as raised:
            error = raised
        state, error = distributed.broadcast((schedule.state(), error), self._outer)
        if error is not None:
            raise error
        schedule.load(state)
        log.info("DAF trains %s", self.summary)
