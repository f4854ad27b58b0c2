"""What the benchmarks share: their options, and how they show and write what they measured.

Methods, measuring processes, tables and the description of the machine are those of ``daf bench``.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from daf_core.errors import ConfigError
from daf_integrations.cli.bench.machine import core_count, describe_machine
from daf_integrations.cli.bench.methods import METHODS, is_method, parse_methods
from daf_integrations.cli.bench.tables import Grid, markdown_table, terminal_table

MEGABYTE = 1e6
CORES = core_count()
FILES = {"json": "file for the results", "markdown": "file for the tables", "picture": "file for the picture"}


def benchmark_parser(
    module: str, description: str, *files: str, rounds: int | None = None, threads: int | None = CORES
) -> argparse.ArgumentParser:
    """Returns a parser with the options that the benchmarks share.

    Args:
        module: Name of the benchmark in this folder.
        description: What it does.
        files: Keys of ``FILES``: what it writes.
        rounds: Default of ``--rounds``; None for no option.
        threads: Default of ``--threads``; None for no option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    if rounds is not None:
        parser.add_argument("--rounds", type=whole_number(1), default=rounds, help="timed rounds")
    if threads is not None:
        parser.add_argument("--threads", type=whole_number(1, CORES), default=threads, help="threads of torch")
    for file in files:
        parser.add_argument(f"--{file}", type=Path, help=FILES[file])
    return parser


def write_results(
    options: argparse.Namespace,
    content: Mapping[str, Any],
    grids: Sequence[Grid],
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    allocator: str | None = None,
) -> None:
    """Prints tables, and writes the Markdown and the JSON file that the options name.

    Args:
        options: From a ``benchmark_parser``.
        content: What the JSON file holds in addition to ``machine``; dataclasses become objects.
        grids: The tables.
        dtype: Data type that was measured.
        device: "cpu" or "cuda".
        allocator: Allocator of main memory, if it is not that of this process.
    """
    for grid in grids:
        Console().print(terminal_table(grid))
    if getattr(options, "markdown", None):
        options.markdown.write_text("\n".join(map(markdown_table, grids)))
    if options.json:
        threads = getattr(options, "threads", None)
        machine = describe_machine(dtype=dtype, threads=threads, allocator=allocator, device=device)
        options.json.write_text(json.dumps({**content, "machine": machine}, indent=2, default=asdict) + "\n")


def megabytes(size: float, digits: int = 1) -> str:
    """Returns bytes as MB of 10^6 bytes."""
    return f"{size / MEGABYTE:.{digits}f}"


def whole_number(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Returns an argument type for whole numbers from ``smallest`` to ``largest``."""
    allowed = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a whole number, {allowed}")
        return value

    return parse


def usable_device(text: str) -> str:
    """Parses the kind of device to measure on, which has to be there."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are cpu and cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("got 'cuda', and torch sees no GPU here; pass cpu, or run it where one is")
    return text


def method_names(
    allowed: Iterable[str] = METHODS, known: Callable[[str], bool] = is_method
) -> Callable[[str], tuple[str, ...]]:
    """Returns an argument type for a comma-separated list of methods that ``plain`` is one of."""

    def parse(text: str) -> tuple[str, ...]:
        try:
            names = parse_methods(text, known, allowed)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if "plain" not in names:
            raise argparse.ArgumentTypeError(
                f"got {text!r} without 'plain', which the others are compared with; add it"
            )
        return names

    return parse
