"""The command `daf profile`: its tables, picture and page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import click
from humanfriendly import format_size
from rich.console import Console
from rich.table import Table

from daf_core.config import Precision
from daf_core.precision.policy import UNIFORM
from daf_integrations.cli import output
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.options import precision_option, takes_model
from daf_integrations.cli.plan import shared_prefix
from daf_integrations.cli.profile.compute import STAGES, Profile, Row, fold, profile_step, total
from daf_integrations.cli.workload import BuiltWorkload, Workload, build

NOTE = (
    "Autograd keeps a storage once, and it counts for who saves it first: others that save it show 0. What follows "
    "from other activations is not stored, and shows 0 too. What is held are whole pages of 4 kB, and tensors that "
    "stay as they are."
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 1.5em 0; font-size: 14px; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
tr:last-child { font-weight: bold; }
.note { color: #666; }
"""


@click.command()
@takes_model
@precision_option
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of a table.")
@output.json_option
@output.file_option("--png", suffixes=(".png",), help="Picture of the memory over a step.")
@output.file_option("--html", suffixes=(".html", ".htm"), help="Page with tables and picture.")
def profile(
    workload: Workload,
    precision: Precision,
    top: int,
    json_file: Path | str | None,
    png: Path | None,
    html: Path | None,
) -> None:
    """Say which modules and operators of MODEL save how many bytes for backward, and how many DAF holds instead.

    MODEL is a name on the Hugging Face Hub, a folder with a config.json, or FILE.py:FUNCTION, where the function gets
    the rows of a batch and their length and returns (model, batch). Weights are random and rows are full.

    Each table has what autograd keeps alone, what is held with precision "exact", and what is held with the one that
    is asked for. Their sums are what DAF reports of a step. Nothing of the model is rewritten.
    """
    output.check_matplotlib("--png", png)
    output.check_matplotlib("--html", html)
    with output.progress(len(STAGES)) as begin:
        begin(STAGES[0])
        sized = build(workload)
        found = profile_step(sized, precision, begin)
    title, tables = _title(workload, sized, precision), _grids(found, precision, top)
    peaks = _peaks(found)
    image = _picture(found, title) if png is not None or html is not None else b""
    output.write(json_file, lambda: _as_dict(workload, sized, found, precision))
    output.write(png, lambda: image)
    output.write(html, lambda: _page(title, tables, peaks, image))
    if json_file != output.STANDARD_OUTPUT:
        console = Console()
        for grid in tables:
            console.print(_terminal_table(grid))
        for line in (title, peaks):
            console.print(line, markup=False, highlight=False)
        console.print(NOTE, markup=False, highlight=False, style="dim")


def _title(workload: Workload, sized: BuiltWorkload, precision: Precision) -> str:
    lora = "" if workload.lora_rank is None else f", LoRA of rank {workload.lora_rank}"
    trained = f"{sized.task or 'own loss'}{lora}, batch {workload.batch} x {workload.length}"
    chosen = " (auto, before any audit)" if precision == "auto" else ""
    where = f"{sized.dtype}, {sized.parameter.device}"
    return f"{workload.model}, {trained}, {where}, {_in_words(precision)}{chosen}"


def _peaks(found: Profile) -> str:
    plain, peak = found.plain_curve.peak, found.curve.peak
    return (
        "Peak of all tensors in a step, beside the model, its gradients and the batch: "
        f"{format_size(plain)} without DAF, {format_size(peak)} with it ({_share(peak, plain)})."
    )


def _grids(found: Profile, precision: Precision, top: int) -> list[Grid]:
    """Returns the tables, by module and by operator; the last row of each is the sum of the others."""
    prefix = shared_prefix([row.name for row in found.modules if not row.name.startswith("(")])
    modules = [replace(row, name=row.name.removeprefix(prefix)) for row in found.modules]
    heading = f"module of {prefix.removesuffix('.')}" if prefix else "module"
    return [
        _grid([heading, "count"], modules, precision, top),
        _grid(["operator", "saves"], found.operators, precision, top),
    ]


def _grid(headings: list[str], rows: Sequence[Row], precision: Precision, top: int) -> Grid:
    whole = total("all", rows)
    cells = [_cells(row, whole.raw_bytes) for row in (*fold(rows, top), whole)]
    return Grid("", [*headings, "plain", "share", "exact", _in_words(precision), "of plain"], cells)


def _cells(row: Row, whole: int) -> list[str]:
    name = f"{row.name} ({row.kind})" if row.kind else row.name
    raw, exact, held = map(format_size, (row.raw_bytes, row.exact_bytes, row.held_bytes))
    return [name, str(row.count), raw, _share(row.raw_bytes, whole), exact, held, _share(row.held_bytes, row.raw_bytes)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _in_words(precision: Precision) -> str:
    if precision == "exact":
        return "exact"
    number = UNIFORM if precision == "auto" else precision
    return f"{number} bit{'s' * (number > 1)}"


def _terminal_table(grid: Grid) -> Table:
    table = Table()
    table.add_column(grid.headings[0], overflow="fold")
    for heading in grid.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    *rows, whole = grid.rows
    for cells in rows:
        table.add_row(*cells)
    table.add_section()
    table.add_row(*whole, style="bold")
    return table


def _as_dict(workload: Workload, sized: BuiltWorkload, found: Profile, precision: Precision) -> dict[str, Any]:
    exact, held = found.exact.statistics, found.held.statistics
    curves = {"plain": found.plain_curve, "daf": found.curve}
    return {
        "model": workload.model,
        "task": sized.task,
        "batch": workload.batch,
        "length": workload.length,
        "lora_rank": workload.lora_rank,
        "device": str(sized.parameter.device),
        "dtype": sized.dtype,
        "precision": precision,
        "raw_bytes": exact.raw_bytes,
        "exact_bytes": exact.held_bytes,
        "held_bytes": held.held_bytes,
        "modules": [{"name": row.name, "class": row.kind, "count": row.count, **_sizes(row)} for row in found.modules],
        "operators": [{"name": row.name, "tensors": row.count, **_sizes(row)} for row in found.operators],
        "stored_as": {"exact": exact.stored_as, "asked": held.stored_as},
        "peak_bytes": {name: curve.peak for name, curve in curves.items()},
        "curves": {
            name: {"forward_seconds": curve.forward_seconds, "points": [list(point) for point in curve.points]}
            for name, curve in curves.items()
        },
    }


def _sizes(row: Row) -> dict[str, int]:
    return {"raw_bytes": row.raw_bytes, "exact_bytes": row.exact_bytes, "held_bytes": row.held_bytes}


def _picture(found: Profile, title: str) -> bytes:
    """Returns a PNG file with the memory of tensors over a step, without DAF and with it."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for curve, name, color in ((found.plain_curve, "without", "tab:gray"), (found.curve, "with", "tab:blue")):
            seconds = [point.seconds for point in curve.points]
            sizes = [point.size / output.MEGABYTE for point in curve.points]
            label = f"{name} DAF: {curve.peak / output.MEGABYTE:.0f} MB"
            axes.step(seconds, sizes, where="post", label=label, color=color)
            axes.axvline(curve.forward_seconds, linestyle=":", color=color)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("seconds, with every operator watched; the dotted lines end forward passes")
        axes.set_ylabel("MB of tensors")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()

    return output.drawn((9, 4.5), draw)


def _page(title: str, tables: Sequence[Grid], peaks: str, image: bytes) -> str:
    """Returns an HTML page that needs nothing beside itself."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<img alt="Memory of tensors over a step" src="data:image/png;base64,{b64encode(image).decode()}">',
        f"<p>{escape(peaks)}</p>",
        *(_html_table(grid) for grid in tables),
        f'<p class="note">{escape(NOTE)}</p>',
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    lines = ["<!DOCTYPE html>", '<html lang="en">', f"<head>{head}</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines)


def _html_table(grid: Grid) -> str:
    rows = [("th", grid.headings), *(("td", cells) for cells in grid.rows)]
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows]
    return "<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"
