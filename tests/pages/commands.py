"""Whether a command that a page tells its readers to type is one: its program, its options, the files it names."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import cast

import click
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement

from daf_integrations.cli.main import main
from tests.pages.blocks import ROOT

_CONTEXT = click.Context(main)
DAF = {name: cast("click.Command", main.get_command(_CONTEXT, name)) for name in main.list_commands(_CONTEXT)}
"""The commands of `daf` by their names."""

READERS_OWN = {"train.py", "daf.yaml"}
"""Files that pages speak of as those of the reader."""

ENVIRONMENT_OF_ITS_OWN = ".venv/bin/activate"


class NoCommandError(AssertionError):
    """A page tells its readers to type something that does not work."""


def check(text: str) -> None:
    """Checks every command of a block; nothing is run but what parses arguments.

    Raises:
        NoCommandError: One of them does not work, or nothing is known of its program.
    """
    for command in commands_of(text):
        program = Path(command[0]).name if command[0].startswith(".venv/bin/") else command[0]
        known = PROGRAMS.get(program, _check_file if "/" in program else None)
        if known is None:
            raise NoCommandError(f"{shlex.join(command)}: add a check for {program!r} to PROGRAMS")
        known(command[1:] if program in PROGRAMS else command)


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a block, without comments, variables before them and what joins them."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("&&", "|", ";"):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)


def _check_daf(arguments: Sequence[str]) -> None:
    command = DAF.get(arguments[0])
    if command is None:
        raise NoCommandError(f"daf has the commands {', '.join(DAF)}, and not {arguments[0]}")
    with suppress(click.exceptions.Exit), redirect_stdout(io.StringIO()):  # of options that show something and exit
        command.make_context(arguments[0], list(arguments[1:])).close()


def _check_make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        variable, is_variable, _ = word.partition("=")
        wanted = rf"^{variable}\s*\?=" if is_variable else rf"^{re.escape(word)}:"
        if not re.search(wanted, makefile, re.MULTILINE):
            raise NoCommandError(f"the Makefile has no {word}")


def _check_python(arguments: Sequence[str]) -> None:
    if arguments[0] != "-m":
        _check_script(Path(arguments[0]), arguments[1:])
    elif arguments[1].partition(".")[0] in ("benchmarks", "tests"):
        _check_script(Path(*arguments[1].split(".")).with_suffix(".py"), arguments[2:])
    elif importlib.util.find_spec(arguments[1]) is None:
        raise NoCommandError(f"there is no module {arguments[1]}")


def _check_script(script: Path, arguments: Sequence[str]) -> None:
    """Runs a script up to where it has parsed its arguments."""
    if str(script) in READERS_OWN:
        return
    _check_file([str(script)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(ArgumentParser, "parse_args", _parse_and_leave)
        patch.syspath_prepend(ROOT / script.parent)
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except ParsedError:
            return
        except SystemExit as error:
            raise NoCommandError(f"{script} does not take {shlex.join(arguments)}") from error
    raise NoCommandError(f"{script} parses no arguments")


class ParsedError(Exception):
    """The arguments are good."""


def _parse_and_leave(parser: ArgumentParser, arguments: Sequence[str] | None = None) -> Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # some commands are for a machine that has a GPU
        _, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    raise ParsedError


def _check_accelerate(arguments: Sequence[str]) -> None:
    if arguments[0] != "launch":
        raise NoCommandError(f"add a check for accelerate {arguments[0]}")
    options = launch_command_parser().parse_args(arguments[1:])
    if options.config_file:
        _check_file([options.config_file])
    if options.module:
        _check_python(["-m", options.training_script])
    else:
        _check_script(Path(options.training_script), options.training_script_args)


def _check_pip(arguments: Sequence[str]) -> None:
    editable = re.fullmatch(r"\.\[([a-z,]+)\]", arguments[-1])
    if arguments[0] != "install":
        raise NoCommandError(f"add a check for pip {arguments[0]}")
    if editable is None:
        Requirement(arguments[-1])
        return
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    if not set(editable[1].split(",")) <= extras:
        raise NoCommandError(f"pyproject.toml has the extras {', '.join(sorted(extras))}, and not {editable[1]}")


def _check_source(arguments: Sequence[str]) -> None:
    if list(arguments) != [ENVIRONMENT_OF_ITS_OWN]:
        raise NoCommandError(f"nothing makes {shlex.join(arguments)}")


def _check_file(command: Sequence[str]) -> None:
    path = ROOT / command[0]
    if command[0] in READERS_OWN:
        return
    if not path.is_file():
        raise NoCommandError(f"there is no file {command[0]}")
    if path.suffix in ("", ".sh") and not os.access(path, os.X_OK):
        raise NoCommandError(f"{command[0]} cannot be run")


def _check_nothing(_arguments: Sequence[str]) -> None:
    """For programs that are neither DAF's nor its tools'."""


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "daf": _check_daf,
    "make": _check_make,
    "python": _check_python,
    "accelerate": _check_accelerate,
    "pip": _check_pip,
    ".": _check_source,
    "jq": _check_nothing,
}
