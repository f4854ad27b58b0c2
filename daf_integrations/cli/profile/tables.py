"""How `daf profile` shows what it found, as tables and as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from humanfriendly import format_size
from rich.console import Console
from rich.table import Table

from daf_core.config import Precision
from daf_core.precision.policy import UNIFORM
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.plan.compute import shared_prefix
from daf_integrations.cli.profile.compute import Profile, Row, fold, total
from daf_integrations.cli.workload.build import BuiltWorkload, Workload

NOTE = (
    "Autograd keeps a storage once, and it counts for who saves it first: others that save it show 0. What follows "
    "from other activations is not stored, and shows 0 too. What is held are whole pages of 4 kB, and tensors that "
    "stay as they are."
)


def grids(profile: Profile, precision: Precision, top: int) -> list[Grid]:
    """Returns the tables, by module and by operator; the last row of each is the sum of the others."""
    prefix = shared_prefix([row.name for row in profile.modules if not row.name.startswith("(")])
    modules = [replace(row, name=row.name.removeprefix(prefix)) for row in profile.modules]
    heading = f"module of {prefix.removesuffix('.')}" if prefix else "module"
    return [
        _grid([heading, "count"], modules, precision, top),
        _grid(["operator", "saves"], profile.operators, precision, top),
    ]


def figures(profile: Profile) -> list[str]:
    """Returns what there is to say of the whole step."""
    plain, peak = profile.plain_curve.peak, profile.curve.peak
    return [
        "Peak of all tensors in a step, beside the model, its gradients and the batch: "
        f"{format_size(plain)} without DAF, {format_size(peak)} with it ({_share(peak, plain)})."
    ]


def title(workload: Workload, sized: BuiltWorkload, precision: Precision) -> str:
    """Returns what was run."""
    parameter = next(sized.model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    lora = "" if workload.lora_rank is None else f", LoRA of rank {workload.lora_rank}"
    trained = f"{sized.task or 'own loss'}{lora}, batch {workload.batch} x {workload.length}"
    chosen = " (auto, before any audit)" if precision == "auto" else ""
    return f"{workload.model}, {trained}, {dtype}, {parameter.device}, {bits(precision)}{chosen}"


def bits(precision: Precision) -> str:
    """Returns a precision in words."""
    if precision == "exact":
        return "exact"
    number = UNIFORM if precision == "auto" else precision
    return f"{number} bit{'s' * (number > 1)}"


def as_dict(workload: Workload, sized: BuiltWorkload, profile: Profile, precision: Precision) -> dict[str, Any]:
    """Returns all rows and both curves, as JSON-able values."""
    parameter = next(sized.model.parameters())
    return {
        "model": workload.model,
        "task": sized.task,
        "batch": workload.batch,
        "length": workload.length,
        "lora_rank": workload.lora_rank,
        "device": str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "precision": precision,
        "raw_bytes": profile.exact.statistics.raw_bytes,
        "exact_bytes": profile.exact.statistics.held_bytes,
        "held_bytes": profile.held.statistics.held_bytes,
        "modules": [
            {"name": row.name, "class": row.kind, "count": row.count, **_sizes(row)} for row in profile.modules
        ],
        "operators": [{"name": row.name, "tensors": row.count, **_sizes(row)} for row in profile.operators],
        "stored_as": {"exact": profile.exact.statistics.stored_as, "asked": profile.held.statistics.stored_as},
        "peak_bytes": {"plain": profile.plain_curve.peak, "daf": profile.curve.peak},
        "curves": {
            name: {"forward_seconds": curve.forward_seconds, "points": [list(point) for point in curve.points]}
            for name, curve in (("plain", profile.plain_curve), ("daf", profile.curve))
        },
    }


def print_tables(tables: Sequence[Grid], lines: Sequence[str], console: Console) -> None:
    """Prints tables, with lines below them."""
    for grid in tables:
        console.print(_table(grid))
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print(NOTE, markup=False, highlight=False, style="dim")


def _grid(headings: list[str], rows: Sequence[Row], precision: Precision, top: int) -> Grid:
    whole = total("all", rows)
    cells = [_cells(row, whole.raw_bytes) for row in (*fold(rows, top), whole)]
    return Grid("", [*headings, "plain", "share", "exact", bits(precision), "of plain"], cells)


def _cells(row: Row, whole: int) -> list[str]:
    name = f"{row.name} ({row.kind})" if row.kind else row.name
    raw, exact, held = map(format_size, (row.raw_bytes, row.exact_bytes, row.held_bytes))
    return [name, str(row.count), raw, _share(row.raw_bytes, whole), exact, held, _share(row.held_bytes, row.raw_bytes)]


def _table(grid: Grid) -> Table:
    table = Table()
    table.add_column(grid.headings[0], overflow="fold")
    for heading in grid.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in grid.rows[:-1]:
        table.add_row(*cells)
    table.add_section()
    table.add_row(*grid.rows[-1], style="bold")
    return table


def _sizes(row: Row) -> dict[str, int]:
    return {"raw_bytes": row.raw_bytes, "exact_bytes": row.exact_bytes, "held_bytes": row.held_bytes}


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
