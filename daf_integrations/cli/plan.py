"""`daf plan`: how a step of a model is run in a memory budget, and what that takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
from click.core import ParameterSource
from humanfriendly import format_size
from rich.console import Console
from rich.table import Table

from daf_core.config import DAFConfig, Precision, parse_size
from daf_core.errors import ConfigError, PlanError, enough
from daf_core.memory.system.available import beside_reserve, device_memory
from daf_core.plan.cost.baseline import forecast_plain
from daf_core.plan.cost.measure import measure
from daf_core.plan.plan_file import NamedPlan, PlanFile
from daf_core.plan.policies import BlockPolicy
from daf_core.plan.run.runner import described
from daf_core.plan.run.step_planner import digest_of, trained_in
from daf_core.plan.search.planner import Plan, find_plan, held_by_part, least_budget, tried
from daf_core.rewrites.registry import OperatorRewrites
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.models import PLANS
from daf_core.unsupported.table import Context, check_supported, unsupported_reasons
from daf_integrations.cli.fit import Device, show_fit
from daf_integrations.cli.options import precision_option, takes_model
from daf_integrations.cli.workload import BuiltWorkload, Workload, build, names_function

LADDER = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.06, 0.04)
"""Budgets that are planned for if none is given, in parts of what plain training takes."""

ALIKE = 0.01  # relative difference in bytes up to which blocks are shown as one

OUTSIDE = "(outside of blocks)"

NOTE = (
    "Weights are random: neither time nor memory depends on their values. Memory is that of a step beside the model, "
    "its gradients and the optimizer."
)


class PlannedBlock(NamedTuple):
    """A block by its qualified name, or `OUTSIDE`; its activations hold these bytes of a micro-batch."""

    name: str
    policy: BlockPolicy
    held_bytes: int


class PlannedStep(NamedTuple):
    """The fastest plan for a budget in bytes, and what it makes of each block, that outside of blocks first."""

    budget: int
    plan: Plan
    blocks: list[PlannedBlock]

    @property
    def bits(self) -> str:
        """The precision that has room; "-" where nothing is packed."""
        packs = any(block.policy.packs for block in self.blocks)
        return str(self.plan.bits) if packs and self.plan.bits is not None else "-"


class Planning:
    """Plans for a model and a batch, from passes with a few rows of it; `plain` is what a step takes without DAF."""

    def __init__(self, sized: BuiltWorkload, precision: Precision) -> None:
        check_supported(PLANS, Context(sized.model))
        self._config, self._model = DAFConfig(precision=precision), sized.model
        self._batch = described(sized.model, sized.batch, sized.loss)
        self._size = self._batch.size(self._batch.length)
        self._unsplit = next(iter(unsupported_reasons(MICRO_BATCHES, Context(sized.model, batch=sized.batch))), None)
        limit = beside_reserve(*device_memory(sized.parameter.device))
        rows, loss_of = self._size.rows, sized.loss_of
        self.plain = forecast_plain(sized.model, loss_of, rows, limit)
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
            raise PlanError(budget, self.least, tried(self._config, self._profile, self._whole))
        names, policies = (OUTSIDE, *self._profile.names), (plan.outside, *plan.blocks)
        held = held_by_part(self._profile, self._size, plan)
        return PlannedStep(budget, plan, list(map(PlannedBlock, names, policies, held)))

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
        kind = self._batch.kind(self._unsplit, digest_of(trained_in(self._model)))
        file.add_plan(kind, NamedPlan(tuple(self._profile.names), step.plan))

    def ladder(self) -> list[int]:
        """Returns budgets from what plain training takes down to the smallest that a plan exists for."""
        steps = [int(self.plain.peak_bytes * share) for share in LADDER]
        return [*(budget for budget in steps if budget > self.least), self.least]


def joined(blocks: Sequence[PlannedBlock]) -> list[tuple[str, int, PlannedBlock]]:
    """Joins neighbours that are treated alike and hold as much, up to a percent.

    Returns a name such as "h.0 - h.5", without what all names begin with; how many blocks it is; and the first of them.
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


def _size(option: str, value: str) -> int:
    """Returns a number of bytes such as 400MB."""
    try:
        return cast("int", parse_size(option, value))
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _sizes(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[int]:
    return [_size("--budget", value) for value in values]


def _device(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Device | None:
    """Returns the device that 24GB or cpu:24GB stands for."""
    if value is None:
        return None
    return Device(_size("--device", value.removeprefix("cpu:")), not value.startswith("cpu:"))


@click.command()
@takes_model
@precision_option
@click.option(
    "--budget", "budgets", callback=_sizes, multiple=True, help="Memory of a step, such as 600MB; repeatable."
)
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to a file for the option plan_file.")
@click.option(
    "--device", callback=_device, help="Memory of a GPU, such as 24GB, or cpu:24GB: say what fits, without weights."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plans as one JSON object.")
def plan(
    workload: Workload,
    budgets: list[int],
    precision: Precision,
    save: str | None,
    device: Device | None,
    as_json: bool,
) -> None:
    """Say how a training step of MODEL keeps a memory budget, and what that costs.

    MODEL is a name on the Hugging Face Hub, a folder with a config.json, or FILE.py:FUNCTION, where the function gets
    the rows of a batch and their length and returns (model, batch). Weights are random and rows are full: neither time
    nor memory depends on values. A budget is for what a step takes beside the model, its gradients and
    the optimizer. Without one, plans are made for budgets from what plain training takes down to the least.

    With --device nothing is run: from the configuration alone follows what weights, gradients, optimizer and
    activations take there, and the longest row that fits, without DAF and with it.

    Exits with 1 if there is no plan for a budget, or nothing fits on the device.
    """
    if device is not None:
        if budgets or save is not None or names_function(workload.model):
            raise click.UsageError(
                "--device is for Hugging Face models, and without --budget and --save, as nothing is run; pass it alone"
            )
        if click.get_current_context().get_parameter_source("precision") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--device shows 8 and 4 bits and the least budget; leave out --precision")
        show_fit(workload, device, as_json)
        return
    if save is not None and len(budgets) != 1:
        raise click.UsageError("--save takes the plan for one budget; pass --budget once")
    if save is not None and not Path(save).absolute().parent.is_dir():
        raise click.UsageError(f"--save {save}: there is no such folder; make it, or name another")
    sized = build(workload)
    planning = Planning(sized, precision)
    planned = [planning.plan(budget) for budget in budgets or planning.ladder()]
    if save is not None:
        planning.save(planned[0], save)
    if as_json:
        click.echo(json.dumps(_as_dict(sized, planning, planned), indent=2))
    else:
        _print(sized, planning, planned, Console())


def _as_dict(sized: BuiltWorkload, planning: Planning, planned: Sequence[PlannedStep]) -> dict[str, Any]:
    return {
        "task": sized.task,
        "device": str(sized.parameter.device),
        "dtype": sized.dtype,
        "plain": {"peak_bytes": planning.plain.peak_bytes, "seconds": planning.plain.seconds},
        "least_budget_bytes": planning.least,
        "plans": [_step_as_dict(step) for step in planned],
    }


def _step_as_dict(step: PlannedStep) -> dict[str, Any]:
    outside, *blocks = [
        {"name": block.name, "treatment": block.policy.words, "held_bytes": block.held_bytes} for block in step.blocks
    ]
    return {
        "budget_bytes": step.budget,
        "micro_batches": step.plan.parts,
        "bits": step.plan.bits,
        "peak_bytes": step.plan.forecast.peak_bytes,
        "seconds": step.plan.forecast.seconds,
        "activation_budget_bytes": step.plan.activation_budget,
        "outside": outside,
        "blocks": blocks,
    }


def _print(sized: BuiltWorkload, planning: Planning, planned: Sequence[PlannedStep], console: Console) -> None:
    """Prints one plan with its blocks, or several with a row for each."""
    if len(planned) == 1:
        console.print(_block_table(planned[0]))
        console.print(_figures(planned[0], planning))
    else:
        console.print(_plan_table(planned, planning))
    console.print(f"Smallest budget that can be met: {enough(planning.least)}", highlight=False)
    where = f"{sized.task or 'own loss'}, {sized.dtype}, {sized.parameter.device}"
    console.print(f"{where}. {NOTE}", markup=False, highlight=False, style="dim")


def _block_table(step: PlannedStep) -> Table:
    table = Table("blocks", "number", "treatment", "held by each")
    for name, count, block in joined(step.blocks):
        table.add_row(name, str(count), block.policy.words, format_size(block.held_bytes))
    return table


def _figures(step: PlannedStep, planning: Planning) -> Table:
    table = Table("", "this plan", "plain training")
    found, plain = step.plan.forecast, planning.plain
    table.add_row("memory budget", format_size(step.budget), "-")
    table.add_row("micro-batches", str(step.plan.parts), "1")
    table.add_row("bits that have room", step.bits, "-")
    table.add_row("predicted peak", format_size(found.peak_bytes), format_size(plain.peak_bytes))
    table.add_row("predicted time", f"{found.seconds:.3g} s", f"{plain.seconds:.3g} s")
    return table


def _plan_table(planned: Sequence[PlannedStep], planning: Planning) -> Table:
    headings = ("budget", "parts", "blocks", "bits", "peak", "time", "of plain")
    table = Table(*headings, caption="peak and time are predicted")
    plain = planning.plain
    table.add_row("plain", "1", "-", "-", format_size(plain.peak_bytes), f"{plain.seconds:.3g} s", "1.00")
    for step in planned:
        peak, seconds = step.plan.forecast.peak_bytes, step.plan.forecast.seconds
        table.add_row(
            *(format_size(step.budget), str(step.plan.parts), step.plan.counts, step.bits),
            *(format_size(peak), f"{seconds:.3g} s", f"{seconds / plain.seconds:.2f}"),
        )
    return table
