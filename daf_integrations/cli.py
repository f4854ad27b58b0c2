"""The command `daf`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, cast, get_args

import click
from rich.console import Console
from rich.table import Table

from daf_core.config import Precision, parse_size
from daf_core.errors import ConfigError, DAFError
from daf_integrations.doctor import Diagnosis, PackageState, examine

if TYPE_CHECKING:
    from daf_integrations.sizing import Task

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "token-classification")
DEFAULT_RANK = 8

PRECISIONS = [str(value) for value in get_args(Precision)]

_COLORS = {"ok": "green", "missing": "yellow", "too old": "red"}


@click.group()
def main() -> None:
    """DAF stores the activations that autograd saves for backward in a few bits."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def doctor(as_json: bool) -> None:
    """Say whether this machine is ready for DAF, and what to type if it is not.

    Exits with 1 if something keeps DAF from working.
    """
    diagnosis = examine()
    if as_json:
        click.echo(json.dumps(_as_dict(diagnosis), indent=2))
    else:
        _print(diagnosis, Console())
    sys.exit(1 if diagnosis.problems else 0)


def _sizes(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[int]:
    """Returns numbers of bytes such as 400MB."""
    try:
        return [cast("int", parse_size("--budget", value)) for value in values]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


@main.command()
@click.argument("model")
@click.option(
    "--budget", "budgets", callback=_sizes, multiple=True, help="Memory of a step, such as 600MB; repeatable."
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of a batch.")
@click.option("--length", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of a row.")
@click.option("--task", type=click.Choice(TASKS), help="Default: what models of this kind are mostly trained for.")
@click.option("--lora", "rank", type=click.IntRange(min=1), help="Rank of LoRA adapters.  [default: 8]")
@click.option("--full", is_flag=True, help="Train all parameters, without LoRA.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="auto", show_default=True, help="Bits of an element."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plans as one JSON object.")
def plan(
    model: str,
    budgets: list[int],
    batch: int,
    length: int,
    task: Task | None,
    rank: int | None,
    full: bool,
    precision: str,
    as_json: bool,
) -> None:
    """Say how a training step of MODEL keeps a memory budget, and what that costs.

    MODEL is a name on the Hugging Face Hub, or a folder with a config.json. Weights are random and rows are full:
    neither time nor memory depends on values. A budget is for what a step takes beside the model, its gradients and
    the optimizer. Without one, plans are made for budgets from what plain training takes down to the least.

    Exits with 1 if there is no plan for a budget.
    """
    if full and rank is not None:
        raise click.UsageError("--lora and --full exclude each other; pass one of them")
    from daf_integrations.plan_report import as_dict, print_plans  # torch and transformers take seconds to load
    from daf_integrations.planning import Planning
    from daf_integrations.sizing import Workload, build

    lora_rank = None if full else rank or DEFAULT_RANK
    try:
        sized = build(Workload(model=model, batch=batch, length=length, task=task, lora_rank=lora_rank))
        planning = Planning(sized, cast("Precision", int(precision) if precision.isdigit() else precision))
        planned = [planning.plan(budget) for budget in budgets or planning.ladder()]
    except DAFError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(as_dict(sized, planning, planned), indent=2))
    else:
        print_plans(sized, planning, planned, Console())


def _as_dict(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "python": diagnosis.python,
        "packages": {state.package.name: state.version for state in diagnosis.packages},
        "devices": diagnosis.torch.devices,
        "cores": diagnosis.cores,
        "torch_threads": diagnosis.torch.threads,
        "allocator": diagnosis.allocator,
        "problems": diagnosis.problems,
        "advice": diagnosis.advice,
    }


def _print(diagnosis: Diagnosis, console: Console) -> None:
    console.print(_package_table(diagnosis.packages))
    console.print(_machine_table(diagnosis))
    for title, lines in (("Problems", diagnosis.problems), ("Advice", diagnosis.advice)):
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    if not diagnosis.problems:
        console.print("\nDAF is ready.", style="green")


def _package_table(packages: tuple[PackageState, ...]) -> Table:
    table = Table("package", "version", "needed", "status", "for")
    for state in packages:
        status = f"[{_COLORS[state.status]}]{state.status}[/]"
        table.add_row(
            state.package.name, state.version or "-", f">={state.package.floor}", status, state.package.purpose
        )
    return table


def _machine_table(diagnosis: Diagnosis) -> Table:
    table = Table("machine", "")
    table.add_row("python", diagnosis.python)
    table.add_row("devices", "\n".join(diagnosis.torch.devices) or "unknown")
    table.add_row("cores", str(diagnosis.cores))
    table.add_row("torch threads", str(diagnosis.torch.threads or "unknown"))
    table.add_row("allocator", diagnosis.allocator)
    return table
