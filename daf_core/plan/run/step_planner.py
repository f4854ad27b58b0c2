"""Plans each training step, with less memory after a shortage, and with more as memory is freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from logging import getLogger
from typing import Protocol
from zlib import crc32

from humanfriendly import format_size
from torch import Tensor, nn

from daf_core.autograd.torch_private import tensors_of
from daf_core.config import DAFConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import PlanError
from daf_core.memory.system.available import HEAD_ROOM, TIGHTER, AutoBudget
from daf_core.model.blocks import Block, blocks_of
from daf_core.model.caches import watch_callers
from daf_core.model.treatments import Treatments
from daf_core.plan.cost.measure import measure
from daf_core.plan.cost.profile import Profile
from daf_core.plan.plan_file import NamedPlan, PlanFile, StepKind
from daf_core.plan.policies import AppliedPolicies
from daf_core.plan.search.planner import BatchSize, Plan, find_plan, least_budget, tried

BUCKETS = 4  # plans serve all batches whose rows are as long up to a factor of 2 ** (1 / BUCKETS)

MEASURED = 8
"""Choices of trained parameters that are measured of their own, as of parts of a model that are trained in turn. Steps
with others, as with layers that are chosen at random, follow plans for all that has been trained so far."""

log = getLogger("daf")


@dataclass(frozen=True)
class Batch:
    """The batch of a step: its rows, elements of a row, and what returns the loss of the first N rows."""

    rows: int
    length: int
    loss_of: Callable[[int], Tensor]

    @property
    def bucket(self) -> int:
        """Number of the range of lengths that it is in."""
        return math.ceil(BUCKETS * math.log2(max(self.length, 1)))

    def size(self, length: int) -> BatchSize:
        """Returns how large batches of this range are at most, in rows of a profile of rows of this length."""
        return BatchSize(self.rows, 2 ** (self.bucket / BUCKETS) / length)

    def kind(self, whole: str | None, trained: str, without_graph: Collection[str] = ()) -> StepKind:
        """Returns what its step has in common with others that the same plan serves; for `trained` see `digest_of`."""
        return StepKind(self.rows, self.bucket, whole is None, tuple(sorted(without_graph)), trained)


def trained_in(model: nn.Module, held_off: Collection[nn.Parameter] = ()) -> bytes:
    """Returns 1 for each parameter that the user trains, 0 for others; `held_off` are those that others freeze."""
    off = {id(each) for each in held_off}
    return bytes(each.requires_grad or id(each) in off for each in tensors_of(model)[0])


def digest_of(trained: bytes) -> str:
    """Returns a short name of what `trained_in` gives, the same in each run."""
    return f"{crc32(trained):08x}"


@dataclass(frozen=True)
class _Measured:
    """A profile, and the rows that it was measured with: the number of their range of lengths, and their elements."""

    profile: Profile
    bucket: int
    length: int


class PartialTraining(Protocol):
    """Trains a part of a model in each step, as elastic training does."""

    @property
    def without_graph(self) -> Collection[str]:
        """Names of the blocks that build no graph in this step."""
        ...

    @property
    def held_off(self) -> Collection[nn.Parameter]:
        """Parameters that it does not train in this step, and the user does."""
        ...

    def everything(self) -> AbstractContextManager[None]:
        """Inside, everything is trained."""
        ...


class StepPlanner:
    """Gives each step of a model a plan that keeps a memory budget.

    `relieve` gives back memory that allocators only keep for later, `elastic` says which blocks build no graph in a
    step, and `plan_file` has plans to follow, and takes those that are made.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: ActivationEngine,
        config: DAFConfig,
        relieve: Callable[[], None] | None = None,
        elastic: PartialTraining | None = None,
        plan_file: PlanFile | None = None,
    ) -> None:
        self._model, self._engine, self._config = model, engine, config
        self._elastic, self._file = elastic, plan_file
        self.applied = AppliedPolicies()  # the policies that blocks follow
        self.plan: Plan | None = None  # of the last step
        most = config.memory_budget if isinstance(config.memory_budget, int) else None
        self._available = AutoBudget(next(model.parameters()).device, most, relieve)
        self._room = self._copied = self._missing = 0
        self._limit: int | None = None
        self._measured: _Measured | None = None
        self._trained = ""  # a digest of which parameters the user trains, as of this measurement
        self._all_so_far = False  # whether it is of all that have been trained so far
        self._choices: set[bytes] = set()  # of which parameters are measured of their own
        self._ever = b""  # which have been trained so far
        self._others: dict[str, _Measured] = {}  # measurements of other choices, the latest last
        self._plans: dict[StepKind, NamedPlan] = {}
        self._last: tuple[Batch, str | None] | None = None
        self._callers = watch_callers(model, {block.module for block in blocks_of(model)})

    @property
    def summary(self) -> str | None:
        """The plan of the last step, in words; None before the first."""
        return None if self.plan is None else _in_words(self.plan)

    @property
    def whole(self) -> str | None:
        """Why no batch of this model is split, as a step that was measured shows; None where some may be."""
        latest = self._measured or next(reversed(self._others.values()), None)
        return None if latest is None else latest.profile.whole

    def prepare(self, batch: Batch, whole: str | None = None) -> Plan:
        """Returns the plan for a step, and has the model follow it; `whole` says why the batch cannot be split.

        Raises:
            PlanError: There is none.
        """
        self._last = batch, whole
        self._look_what_is_trained()
        kind = self._kind(batch, whole)
        found = None if self._file is None else self._file.plan(kind)
        if found is None:
            found = self._made(batch, whole)
            if self._file is not None:
                self._file.add_plan(kind, found)
        self._apply(found)
        return found.plan

    def begin_batch(self) -> None:
        """Begins a batch, which may be prepared for several times."""
        if self._file is not None:
            self._file.begin_batch()

    def tighten(self, reason: str) -> bool:
        """Allows less than the last plan was expected to take, for a logged reason; returns whether a plan is left."""
        if self.plan is None or self._last is None:
            return False
        if self._file is not None and self._file.give_up(self._kind(*self._last)):
            self._available.lower(int(self.plan.forecast.peak_bytes * TIGHTER))
            self._limit = None  # the next attempt measures
            log.warning("the plan in %s does not hold, so that DAF makes another: %s", self._file.path, reason)
            return True
        if self._limit is None or self._measured is None:
            return False
        before, after = self._limit, int(min(self._limit, self.plan.forecast.peak_bytes) * TIGHTER)
        self._set_limit(after)
        try:
            self._find(self._measured, *self._last)
        except PlanError:
            self._set_limit(before)
            return False
        self._available.lower(after)
        log.warning("DAF plans for %s instead of %s: %s", format_size(after), format_size(before), reason)
        return True

    def finish_step(self) -> None:
        """Ends a step: some steps later DAF tries again what memory has run out for."""
        if self._available.finish_step():
            self._limit = None

    def close(self) -> None:
        """Undoes all changes of the model and the engine."""
        self._callers.close()
        self._stop_treating()
        self._engine.set_memory_budget(self._config.memory_budget)

    def _follow_available_memory(self) -> None:
        """Asks how much a step may take now, and drops all plans if that is much more than before."""
        trained = [each for each in self._model.parameters() if each.requires_grad or each.grad is not None]
        # No part of what is planned: gradients that the step will add to memory, and the snapshot's copies of others.
        missing = self._missing = sum(each.nbytes for each in trained if each.grad is None)
        self._copied = sum(each.grad.nbytes for each in trained if each.grad is not None)
        self._room = self._available.update(self._engine.resident_bytes - missing, self._copied)
        if self._limit is None or self._room > HEAD_ROOM * self._limit:
            self._set_limit(self._room)

    def _look_what_is_trained(self) -> None:
        """Takes the measurements of the parameters that the user trains now, who may freeze some and unfreeze them."""
        trained = trained_in(self._model, () if self._elastic is None else self._elastic.held_off)
        if len(trained) != len(self._ever):  # other parameters than before
            self._choices, self._ever = set(), trained
        self._ever = bytes(map(max, trained, self._ever))
        if trained not in self._choices and len(self._choices) < MEASURED:
            self._choices.add(trained)
        all_so_far = trained not in self._choices
        digest = f"{digest_of(self._ever)} of many" if all_so_far else digest_of(trained)
        if digest == self._trained:
            return
        if self._measured is not None:
            self._others.pop(self._trained, None)
            self._others[self._trained] = self._measured
            if len(self._others) > MEASURED:
                del self._others[next(iter(self._others))]
        self._trained, self._all_so_far, self._measured = digest, all_so_far, self._others.get(digest)

    def _kind(self, batch: Batch, whole: str | None) -> StepKind:
        return batch.kind(whole, self._trained, () if self._elastic is None else self._elastic.without_graph)

    def _made(self, batch: Batch, whole: str | None) -> NamedPlan:
        self._follow_available_memory()
        named = self._planned(batch, whole)
        if named.plan.forecast.peak_bytes > self._room:
            self._set_limit(self._room)
            named = self._planned(batch, whole)
        return named

    def _planned(self, batch: Batch, whole: str | None) -> NamedPlan:
        """Returns the plan for a batch; before it gives up, it tries again what memory has run out for."""
        kind = self._kind(batch, whole)
        if kind not in self._plans:
            measured = self._measured_for(batch)
            try:
                plan = self._find(measured, batch, whole)
            except PlanError:
                if not self._available.remove_ceiling():
                    raise
                self._limit = None
                self._follow_available_memory()
                plan = self._find(measured, batch, whole)
            self._plans[kind] = NamedPlan(tuple(measured.profile.names), plan)
            log.info("DAF plans %s", _in_words(plan))
        return self._plans[kind]

    def _stop_treating(self) -> None:
        self.applied.follow({})
        self._engine.treat(Treatments())
        self.plan = None

    def _set_limit(self, limit: int) -> None:
        self._limit = limit
        self._plans.clear()

    def _measured_for(self, batch: Batch) -> _Measured:
        """Returns a measurement that serves a batch: a new one if its rows are longer than all before.

        Others are trained than before where there is none.
        """
        if self._measured is None or batch.bucket > self._measured.bucket:
            self._stop_treating()
            everything = nullcontext() if self._elastic is None else self._elastic.everything()
            with everything, self._training_all() if self._all_so_far else nullcontext():
                profile = measure(self._model, self._config, batch.loss_of, batch.rows, self._room)
            self._measured = _Measured(profile, batch.bucket, batch.length)
            self._plans = {kind: plan for kind, plan in self._plans.items() if kind.trained != self._trained}
        return self._measured

    @contextmanager
    def _training_all(self) -> Generator[None]:
        """Has all parameters trained inside that have been so far."""
        pairs = zip(tensors_of(self._model)[0], self._ever, strict=True)
        frozen = [each for each, trained in pairs if trained and not each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _find(self, measured: _Measured, batch: Batch, whole: str | None) -> Plan:
        assert self._limit is not None
        profile = measured.profile
        if self._elastic is not None:
            profile = profile.with_off(self._elastic.without_graph)
        whole = whole or profile.whole
        size = batch.size(measured.length)
        plan = find_plan(profile, size, self._limit, self._config, whole is None)
        if plan is not None:
            return plan
        least = least_budget(profile, size, self._config, whole is None)
        attempts = tried(self._config, profile, whole)
        raise PlanError(self._limit + self._copied, least + self._copied, attempts, self._missing)

    def _apply(self, named: NamedPlan) -> None:
        names, plan = named
        self._engine.treat(plan.treatments(names))  # also as before: a step that is run again has taken it back
        if plan is self.plan:
            return
        self.plan = None  # in case that what follows fails
        blocks = [Block(name, self._model.get_submodule(name)) for name in names]
        self.applied.follow(dict(zip(blocks, plan.blocks, strict=True)))
        self._engine.set_memory_budget(plan.activation_budget, plan.forecast.kept_bytes)
        self.plan = plan


def _in_words(plan: Plan) -> str:
    parts = f"{plan.parts} micro-batches" if plan.parts > 1 else "the whole batch"
    seconds, peak = plan.forecast.seconds, format_size(plan.forecast.peak_bytes)
    return f"{parts}; blocks: {plan.counts}; {peak} at most, {seconds:.3g} s"
