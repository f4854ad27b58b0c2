"""What `daf plan` finds out: how a step of a model is run in a memory budget, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from daf_core.config import DAFConfig, Precision
from daf_core.errors import ConfigError, PlanError
from daf_core.memory.system.available import beside_reserve, device_memory
from daf_core.plan.block_policy import BlockPolicy
from daf_core.plan.cost.baseline import forecast_plain
from daf_core.plan.cost.measure import measure
from daf_core.plan.cost.simulate import Forecast
from daf_core.plan.plan_file import NamedPlan, PlanFile
from daf_core.plan.run.runner import described
from daf_core.plan.search.planner import Plan, find_plan, held_by_part, least_budget, tried
from daf_core.rewrites.registry import OperatorRewrites
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.table import Context, unsupported_reasons
from daf_integrations.cli.workload.build import BuiltWorkload

LADDER = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.06, 0.04)
"""Budgets that are planned for if none is given, in parts of what plain training takes."""

ALIKE = 0.01
"""Relative difference in bytes up to which blocks are shown as one."""

OUTSIDE = "(outside of blocks)"


@dataclass(frozen=True)
class PlannedBlock:
    """A block in a plan, or what is outside of blocks.

    Attributes:
        name: Its qualified name in the model.
        policy: What happens to its activations.
        held_bytes: What they hold of a micro-batch, at the precision that has room.
    """

    name: str
    policy: BlockPolicy
    held_bytes: int


@dataclass(frozen=True)
class PlannedStep:
    """A plan for a budget.

    Attributes:
        budget: Bytes that a step may take beside the model, its gradients and the optimizer.
        plan: The fastest that keeps it.
        blocks: Policies, that outside of blocks first.
    """

    budget: int
    plan: Plan
    blocks: tuple[PlannedBlock, ...]


class Planning:
    """Plans for a model and a batch, from passes with a few rows of it.

    Args:
        sized: The model and the batch.
        precision: As `DAFConfig.precision`.

    Attributes:
        plain: What a step takes without DAF.
    """

    def __init__(self, sized: BuiltWorkload, precision: Precision) -> None:
        self._config, self._model = DAFConfig(precision=precision), sized.model
        self._batch = described(sized.model, sized.batch, sized.loss)
        self._size = self._batch.size(self._batch.length)
        self._unsplit = next(iter(unsupported_reasons(MICRO_BATCHES, Context(sized.model, batch=sized.batch))), None)
        limit = beside_reserve(*device_memory(next(sized.model.parameters()).device))
        rows, loss_of = self._size.rows, sized.loss_of
        self.plain: Forecast = forecast_plain(sized.model, loss_of, rows, limit)
        rewrites = OperatorRewrites(sized.model)
        if precision != "exact":
            rewrites.apply()
        try:
            self._profile = measure(sized.model, self._config, loss_of, rows, limit)
        finally:
            rewrites.undo()
        self._whole = self._unsplit or self._profile.whole

    @cached_property
    def least(self) -> int:
        """The smallest budget that a plan exists for."""
        return least_budget(self._profile, self._size, self._config, self._whole is None)

    def plan(self, budget: int) -> PlannedStep:
        """Returns the plan for a budget in bytes.

        Raises:
            PlanError: There is none.
        """
        plan = find_plan(self._profile, self._size, budget, self._config, self._whole is None)
        if plan is None:
            raise PlanError(budget, self.least, tried(self._config, len(self._profile.blocks), self._whole))
        held = held_by_part(self._profile, self._size, plan)
        names = [OUTSIDE, *self._profile.names]
        parts = zip(names, (plan.outside, *plan.blocks), held, strict=True)
        return PlannedStep(budget, plan, tuple(PlannedBlock(*part) for part in parts))

    def save(self, step: PlannedStep, path: str) -> None:
        """Writes a file that trainings of this model with the same options follow, in place of what is there.

        Raises:
            ConfigError: It cannot be written.
        """
        config = replace(self._config, memory_budget=step.budget)
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--save {path} cannot be written: {error}. Name another file") from error
        file = PlanFile(path, config, self._model)
        file.begin_batch()
        file.add_plan(self._batch.kind(self._unsplit), NamedPlan(tuple(self._profile.names), step.plan))

    def ladder(self) -> list[int]:
        """Returns budgets from what plain training takes down to the smallest that a plan exists for."""
        steps = [int(self.plain.peak_bytes * share) for share in LADDER]
        return [*(budget for budget in steps if budget > self.least), self.least]


def joined(blocks: Sequence[PlannedBlock]) -> list[tuple[str, int, PlannedBlock]]:
    """Joins neighbours that are treated alike and hold as much, up to a percent.

    Returns:
        For each run a name such as "h.0 - h.5", without what all names begin with; how many blocks it is; and the
        first of them.
    """
    shared = shared_prefix([block.name for block in blocks if block.name != OUTSIDE])
    runs: list[list[PlannedBlock]] = []
    for block in blocks:
        if runs and _alike(runs[-1][0], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    ends = [[run[0].name.removeprefix(shared), run[-1].name.removeprefix(shared)] for run in runs]
    return [(" - ".join(dict.fromkeys(names)), len(run), run[0]) for names, run in zip(ends, runs, strict=True)]


def shared_prefix(names: Sequence[str]) -> str:
    """Returns what all names begin with, but for the last part of that."""
    levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*(name.split(".") for name in names), strict=False))
    return "".join(f"{parts[0]}." for parts in list(levels)[:-1])


def _alike(one: PlannedBlock, other: PlannedBlock) -> bool:
    same = one.policy is other.policy and OUTSIDE not in (one.name, other.name)
    return same and abs(one.held_bytes - other.held_bytes) <= ALIKE * one.held_bytes
