"""Files that commands write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
