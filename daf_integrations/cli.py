"""The command `daf`."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from daf_integrations.doctor import Diagnosis, PackageState, examine

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
