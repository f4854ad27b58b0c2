"""The command `daf`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from daf_core.config import parse_size
from daf_core.errors import ConfigError, DAFError
from daf_integrations.cli.allocator import run
from daf_integrations.cli.bench.command import bench
from daf_integrations.cli.doctor import Diagnosis, PackageState, examine
from daf_integrations.cli.model_options import model_options, precision_of, precision_option, workload_of
from daf_integrations.cli.profile.command import profile
from daf_integrations.cli.workload.build import build

_COLORS = {"ok": "green", "missing": "yellow", "too old": "red"}


@click.group()
@click.version_option(package_name="daf-training", message="%(version)s")
def main() -> None:
    """DAF stores the activations that autograd saves for backward in a few bits."""


main.add_command(bench)
main.add_command(profile)
main.add_command(run)


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


def _check_saving(path: str, budgets: list[int]) -> None:
    if len(budgets) != 1:
        raise click.UsageError("--save takes the plan for one budget; pass --budget once")
    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"--save {path}: there is no such folder; make it, or name another")


@main.command()
@model_options
@precision_option
@click.option(
    "--budget", "budgets", callback=_sizes, multiple=True, help="Memory of a step, such as 600MB; repeatable."
)
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to a file for the option plan_file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plans as one JSON object.")
def plan(budgets: list[int], precision: str, save: str | None, as_json: bool, **model: Any) -> None:
    """Say how a training step of MODEL keeps a memory budget, and what that costs.

    MODEL is a name on the Hugging Face Hub, a folder with a config.json, or FILE.py:FUNCTION, where the function gets
    the rows of a batch and their length and returns (model, batch). Weights are random and rows are full: neither time
    nor memory depends on values. A budget is for what a step takes beside the model, its gradients and
    the optimizer. Without one, plans are made for budgets from what plain training takes down to the least.

    Exits with 1 if there is no plan for a budget.
    """
    if save is not None:
        _check_saving(save, budgets)
    workload = workload_of(**model)
    from daf_integrations.cli.plan.compute import Planning
    from daf_integrations.cli.plan.show import as_dict, print_plans  # takes long to load

    try:
        sized = build(workload)
        planning = Planning(sized, precision_of(precision))
        planned = [planning.plan(budget) for budget in budgets or planning.ladder()]
        if save is not None:
            planning.save(planned[0], save)
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
