"""Files that commands write, and how far they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

STANDARD_OUTPUT = "-"


def output_file(suffixes: tuple[str, ...], dash: bool = False) -> Callable[..., Path | str | None]:
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


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=output_file((".json",), dash=True), help="Figures; - prints them."
)
"""Gives a command the file that `write_json` writes."""


def write_json(file: Path | str, content: dict[str, Any]) -> None:
    """Writes JSON to a file, or prints it.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps(content, indent=2)
    if isinstance(file, Path):
        file.write_text(text + "\n")
    else:
        click.echo(text)


@contextmanager
def progress(total: int, *columns: ProgressColumn) -> Generator[Callable[[str], None]]:
    """Shows on a terminal how far a command is; yields what is to be called with its name when a stage begins.

    Args:
        total: How many stages there are.
        columns: What is shown beside name, bar and time.
    """
    console = Console(stderr=True)
    shown_columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *columns
    with Progress(*shown_columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task, begun = shown.add_task("", total=total), 0

        def begin(name: str) -> None:
            nonlocal begun
            shown.update(task, description=name, completed=begun)
            begun += 1

        yield begin
