"""What commands write and draw, and how far they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from daf_core.errors import ProfileError

MEGABYTE = 1e6
STANDARD_OUTPUT = "-"


def file_option(*names: str, suffixes: tuple[str, ...], help: str, dash: bool = False) -> Callable[..., Any]:
    """Gives a command an option that names a file which can be written, or "-" for the standard output."""
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

    return click.option(*names, metavar="FILE", callback=check, help=help)


json_option = file_option("--json", "json_file", suffixes=(".json",), dash=True, help="Figures; - prints them.")


def write(file: Path | str | None, content: Callable[[], str | bytes | dict[str, Any]]) -> None:
    """Writes an image, a text or values for JSON to a file, or prints them for "-", where an option has named one.

    Raises:
        click.ClickException: The file cannot be written.
    """
    if file is None:
        return
    found = content()
    text = json.dumps(found, indent=2) if isinstance(found, dict) else found
    try:
        if isinstance(file, str):
            click.echo(text)
        elif isinstance(text, bytes):
            file.write_bytes(text)
        else:
            file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename} was not written: {error.strerror}") from error


def check_matplotlib(option: str, file: Path | None) -> None:
    """Makes sure that a picture can be drawn, where an option asks for one.

    Raises:
        ProfileError: matplotlib is missing.
    """
    if file is None:
        return
    try:
        import_module("matplotlib")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ProfileError(f"{option} needs matplotlib, which is not installed: pip install matplotlib") from error


def drawn(size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """Returns a PNG file with what a function draws on a figure of matplotlib; the size is in inches."""
    figure = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    draw(figure)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=144)
    return content.getvalue()


@contextmanager
def progress(total: int, *columns: ProgressColumn) -> Generator[Callable[[str], None]]:
    """Shows on a terminal how far a command is; yields what is to be called with its name when a stage begins."""
    console = Console(stderr=True)
    shown_columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *columns
    with Progress(*shown_columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=total, completed=-1)  # until the first begins
        yield lambda name: shown.update(task, description=name, advance=1)
