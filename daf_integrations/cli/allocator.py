"""The allocator of main memory that a program starts with: one that gives freed memory back to the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import NoReturn

import click

from daf_integrations.cli.doctor import allocator_advice, installed_mimalloc, installed_tcmalloc, loaded_allocator

PRELOAD = "LD_PRELOAD"
AUTO, GLIBC = "auto", "glibc"


def installed_jemalloc() -> str | None:
    """Returns what to preload for jemalloc: a name that the loader finds; None where it is not installed."""
    return find_library("jemalloc")


LIBRARIES: dict[str, Callable[[], str | None]] = {
    "tcmalloc": installed_tcmalloc,
    "mimalloc": installed_mimalloc,
    "jemalloc": installed_jemalloc,
}
"""What finds the library of each allocator; "auto" takes the first of the first two that is installed."""


def installed_library() -> str | None:
    """Returns the library that programs should start with; None where none is installed."""
    return installed_tcmalloc() or installed_mimalloc()


def library_of(allocator: str) -> str | None:
    """Returns the library of an allocator; None for the system's own.

    Args:
        allocator: A name in `LIBRARIES`, "auto", "glibc", or the path of a library.

    Raises:
        click.BadParameter: It is not installed.
    """
    if allocator == AUTO:
        return None if _is_preloaded() or not sys.platform.startswith("linux") else installed_library()
    if allocator == GLIBC:
        return None
    if allocator not in LIBRARIES:
        if Path(allocator).is_file():
            return str(Path(allocator).resolve())
        names = ", ".join((AUTO, *LIBRARIES, GLIBC))
        raise click.BadParameter(f"{allocator!r} is neither a file nor one of {names}")
    library = LIBRARIES[allocator]()
    if library is None:
        raise click.BadParameter(f"{allocator} is not installed. {allocator_advice()}")
    return library


def preloading(library: str | None) -> dict[str, str]:
    """Returns the variables of this process, with those that have a program start with an allocator.

    Args:
        library: The allocator's library; None for none.
    """
    if library is None:
        return dict(os.environ)
    return {**os.environ, PRELOAD: f"{library} {os.environ.get(PRELOAD, '')}".strip()}


def _is_preloaded() -> bool:
    return "malloc" in os.environ.get(PRELOAD, "")


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--allocator NAME] [-m]",
)
@click.option(
    "--allocator",
    default=AUTO,
    show_default=True,
    metavar="NAME",
    help="tcmalloc, mimalloc, jemalloc, glibc, the path of a library, or auto for tcmalloc or mimalloc.",
)
@click.option("-m", "as_module", is_flag=True, help="PROGRAM is the name of a module, as for python -m.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(allocator: str, as_module: bool, program: str, arguments: Sequence[str]) -> None:
    """Run PROGRAM, a Python file, with an allocator that gives freed memory back.

    The allocator of glibc keeps what a training step frees, so that little of what DAF saves shows in the size of the
    process. The extra [allocator] installs mimalloc.
    """
    library = library_of(allocator)
    if library is None and allocator == AUTO and loaded_allocator() == GLIBC and not _is_preloaded():
        click.echo(f"DAF found no other allocator. {allocator_advice()}", err=True)
    _replace_process([sys.executable, *(["-m"] if as_module else []), program, *arguments], preloading(library))


def _replace_process(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), environment)
