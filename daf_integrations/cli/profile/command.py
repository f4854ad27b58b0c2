"""The command `daf profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from daf_core.errors import DAFError
from daf_integrations.cli.model_options import model_options, precision_of, precision_option, workload_of
from daf_integrations.cli.output import STANDARD_OUTPUT, json_option, output_file, progress, write_json
from daf_integrations.cli.profile.compute import STAGES, profile_step
from daf_integrations.cli.workload.build import build


@click.command()
@model_options
@precision_option
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Rows of a table.")
@json_option
@click.option("--png", metavar="FILE", callback=output_file((".png",)), help="Picture of the memory over a step.")
@click.option("--html", metavar="FILE", callback=output_file((".html", ".htm")), help="Page with tables and picture.")
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
    from daf_integrations.cli.profile.page import check_matplotlib, page, picture
    from daf_integrations.cli.profile.tables import as_dict, figures, grids, print_tables, title

    try:
        for option, file in (("--png", png), ("--html", html)):
            if file is not None:
                check_matplotlib(option)
        with progress(len(STAGES)) as begin:
            begin(STAGES[0])
            sized = build(workload)
            found = profile_step(sized, bits, begin)
    except DAFError as error:
        raise click.ClickException(str(error)) from error
    heading, tables, lines = title(workload, sized, bits), grids(found, bits, top), figures(found)
    try:
        if json_file is not None:
            write_json(json_file, as_dict(workload, sized, found, bits))
        drawn = picture(found, heading) if png is not None or html is not None else b""
        if png is not None:
            png.write_bytes(drawn)
        if html is not None:
            html.write_text(page(heading, tables, lines, drawn), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename} was not written: {error.strerror}") from error
    if json_file != STANDARD_OUTPUT:
        print_tables(tables, [heading, *lines], Console())
