"""`daf run`: a program starts with an allocator of main memory that gives freed memory back to the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from functools import partial
from pathlib import Path

import click

from daf_integrations.cli.doctor import allocator_advice, installed_mimalloc, installed_tcmalloc, loaded_allocator

PRELOAD = "LD_PRELOAD"
AUTO, GLIBC = "auto", "glibc"

PURGE_DELAY = "MIMALLOC_PURGE_DELAY"
"""Of mimalloc: the milliseconds until it gives freed memory back. Its own default, a second, is the time of a step.
With 1 instead of 20 the peak is the same, and a step takes a tenth longer."""

LIBRARIES: dict[str, Callable[[], str | None]] = {
    "tcmalloc": installed_tcmalloc,
    "mimalloc": installed_mimalloc,
    "jemalloc": partial(find_library, "jemalloc"),
}
"""What finds the library of each allocator; "auto" takes the first of the first two that is installed."""


def library_of(allocator: str) -> str | None:
    """Returns the library of an allocator; None for the system's own.

    Args:
        allocator: A name in `LIBRARIES`, "auto", "glibc", or the path of a library.

    Raises:
        click.BadParameter: It is not installed.
    """
    if allocator == AUTO:
        stays = is_preloaded() or not sys.platform.startswith("linux")
        return None if stays else installed_tcmalloc() or installed_mimalloc()
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
    """Returns the variables of this process, with those that have a program start with a library, if there is one."""
    if library is None:
        return dict(os.environ)
    return {**options_of(library), **os.environ, PRELOAD: f"{library} {os.environ.get(PRELOAD, '')}".strip()}


def options_of(library: str) -> dict[str, str]:
    """Returns the variables with which the allocator of a library gives memory back soon."""
    return {PURGE_DELAY: "20"} if "mimalloc" in Path(library).name else {}


def is_preloaded() -> bool:
    """Says whether programs that this process starts have another allocator than the system's already."""
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
    if library is None and allocator == AUTO and loaded_allocator() == GLIBC and not is_preloaded():
        click.echo(f"DAF found no other allocator. {allocator_advice()}", err=True)
    command = [sys.executable, *(["-m"] if as_module else []), program, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, preloading(library))
