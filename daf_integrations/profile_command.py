"""The command `daf profile`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from daf_core.errors import DAFError
from daf_integrations.model_options import model_options, precision_of, workload_of
from daf_integrations.profiling import STAGES, Begin, profile_step
from daf_integrations.sizing import build

STANDARD_OUTPUT = "-"


def _output(suffixes: tuple[str, ...], dash: bool = False) -> Callable[..., Path | str | None]:
    """Returns a callback for an option that names a file which can be written, with one of the suffixes.

    Args:
        suffixes: Those that are allowed.
        dash: Whether "-" may stand for the standard output.
    """
    allowed = " or ".join(suffixes) + (", or - for the standard output" if dash else "")

    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Path | str | None:
        if value is None or (dash and value == STANDARD_OUTPUT):
            return value
        path = Path(value)
        if path.suffix.lower() not in suffixes:
            raise click.BadParameter(f"{value!r} has another suffix; give a file that ends in {allowed}")
        if path.is_dir():
            raise click.BadParameter(f"{value!r} is a folder; give a file that ends in {allowed}")
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no folder {str(path.parent)!r} for {value!r}; make it, or give another")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{value!r} cannot be written; give a file where you may write")
        return path

    return check


@click.command()
@model_options
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of a table.")
@click.option(
    "--json", "json_file", metavar="FILE", callback=_output((".json",), dash=True), help="All figures; - prints them."
)
@click.option("--png", metavar="FILE", callback=_output((".png",)), help="Picture of the memory over a step.")
@click.option("--html", metavar="FILE", callback=_output((".html", ".htm")), help="Page with tables and picture.")
def profile(
    precision: str, top: int, json_file: Path | str | None, png: Path | None, html: Path | None, **model: Any
) -> None:
    """Say which modules and operators of MODEL save how many bytes for backward, and how many DAF holds instead.

    MODEL is a name on the Hugging Face Hub, a folder with a config.json, or FILE.py:FUNCTION, where the function gets
    the rows of a batch and their length and returns (model, batch). Weights are random and rows are full.

    Each table has what autograd keeps alone, what is held with precision "exact", and what is held with the one that
    is asked for. Their sums are what DAF reports of a step. Nothing of the model is rewritten.
    """
    workload, bits = workload_of(**model), precision_of(precision)
    from daf_integrations.profile_page import check_matplotlib, page, picture
    from daf_integrations.profile_report import as_dict, figures, grids, print_tables, title

    try:
        for option, file in (("--png", png), ("--html", html)):
            if file is not None:
                check_matplotlib(option)
        with _progress() as begin:
            begin(STAGES[0])
            sized = build(workload)
            found = profile_step(sized, bits, begin)
    except DAFError as error:
        raise click.ClickException(str(error)) from error
    heading, tables, lines = title(workload, sized, bits), grids(found, bits, top), figures(found)
    try:
        if json_file is not None:
            _write_json(json_file, as_dict(workload, sized, found, bits))
        drawn = picture(found, heading) if png is not None or html is not None else b""
        if png is not None:
            png.write_bytes(drawn)
        if html is not None:
            html.write_text(page(heading, tables, lines, drawn), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename} was not written: {error.strerror}") from error
    if json_file != STANDARD_OUTPUT:
        print_tables(tables, [heading, *lines], Console())


@contextmanager
def _progress() -> Generator[Begin]:
    """Shows on a terminal how far the command is; yields what is to be called when a stage begins."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=len(STAGES))
        yield lambda stage: shown.update(task, description=stage, completed=STAGES.index(stage))


def _write_json(file: Path | str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2)
    if isinstance(file, Path):
        file.write_text(text + "\n")
    else:
        click.echo(text)
