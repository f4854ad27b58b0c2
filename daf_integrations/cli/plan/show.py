"""How `daf plan` shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from humanfriendly import format_size
from rich.console import Console
from rich.table import Table

from daf_integrations.cli.plan.compute import PlannedStep, Planning, joined
from daf_integrations.cli.workload.build import BuiltWorkload

NOTE = (
    "Weights are random: neither time nor memory depends on their values. Memory is that of a step beside the model, "
    "its gradients and the optimizer."
)


def as_dict(sized: BuiltWorkload, planning: Planning, planned: Sequence[PlannedStep]) -> dict[str, Any]:
    """Returns plans, and what plain training takes, as JSON-able values."""
    return {
        "task": sized.task,
        "device": str(_parameter(sized).device),
        "dtype": str(_parameter(sized).dtype).removeprefix("torch."),
        "plain": {"peak_bytes": planning.plain.peak_bytes, "seconds": planning.plain.seconds},
        "least_budget_bytes": planning.least,
        "plans": [_step_as_dict(step) for step in planned],
    }


def print_plans(sized: BuiltWorkload, planning: Planning, planned: Sequence[PlannedStep], console: Console) -> None:
    """Prints one plan with its blocks, or several with a row for each."""
    if len(planned) == 1:
        console.print(_block_table(planned[0]))
        console.print(_figures(planned[0], planning))
    else:
        console.print(_plan_table(planned, planning))
    parameter = _parameter(sized)
    where = f"{sized.task or 'own loss'}, {str(parameter.dtype).removeprefix('torch.')}, {parameter.device}"
    console.print(f"Smallest budget that can be met: {format_size(planning.least)}", highlight=False)
    console.print(f"{where}. {NOTE}", markup=False, highlight=False, style="dim")


def _parameter(sized: BuiltWorkload) -> Any:
    return next(sized.model.parameters())


def _step_as_dict(step: PlannedStep) -> dict[str, Any]:
    plan = step.plan
    outside, *blocks = [
        {"name": block.name, "treatment": block.policy.words, "held_bytes": block.held_bytes} for block in step.blocks
    ]
    return {
        "budget_bytes": step.budget,
        "micro_batches": plan.parts,
        "bits": plan.bits,
        "peak_bytes": plan.forecast.peak_bytes,
        "seconds": plan.forecast.seconds,
        "activation_budget_bytes": plan.activation_budget,
        "outside": outside,
        "blocks": blocks,
    }


def _block_table(step: PlannedStep) -> Table:
    table = Table("blocks", "number", "treatment", "held by each")
    for name, count, block in joined(step.blocks):
        table.add_row(name, str(count), block.policy.words, format_size(block.held_bytes))
    return table


def _figures(step: PlannedStep, planning: Planning) -> Table:
    table = Table("", "this plan", "plain training")
    plan, plain = step.plan, planning.plain
    table.add_row("memory budget", format_size(step.budget), "-")
    table.add_row("micro-batches", str(plan.parts), "1")
    table.add_row("bits that have room", _bits(step), "-")
    table.add_row("predicted peak", format_size(plan.forecast.peak_bytes), format_size(plain.peak_bytes))
    table.add_row("predicted time", f"{plan.forecast.seconds:.3g} s", f"{plain.seconds:.3g} s")
    return table


def _plan_table(planned: Sequence[PlannedStep], planning: Planning) -> Table:
    table = Table(
        "budget", "parts", "blocks", "bits", "peak", "time", "of plain", caption="peak and time are predicted"
    )
    plain = planning.plain
    table.add_row("plain", "1", "-", "-", format_size(plain.peak_bytes), f"{plain.seconds:.3g} s", "1.00")
    for step in planned:
        plan = step.plan
        peak, seconds = plan.forecast.peak_bytes, plan.forecast.seconds
        table.add_row(
            *(format_size(step.budget), str(plan.parts), plan.counts, _bits(step)),
            *(format_size(peak), f"{seconds:.3g} s", f"{seconds / plain.seconds:.2f}"),
        )
    return table


def _bits(step: PlannedStep) -> str:
    packs = any(block.policy.packs for block in step.blocks)
    return str(step.plan.bits) if packs and step.plan.bits is not None else "-"
