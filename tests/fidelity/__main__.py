"""Measures gradients and shows which are outside of the bounds.

Run ``python -m tests.fidelity operators --parts 8 --part 0``; ``--only`` takes a regular expression of names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.fidelity.measure import Bits, Case, Result, Skip, compiled, measure

SWEEPS = ("operators", "modules", "losses", "attention", "architectures", "trained")


@dataclass
class Report:
    """What was found.

    Attributes:
        results: Of each case and precision.
        skipped: The reasons of those that tell nothing.
    """

    results: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def outside(self) -> list[Result]:
        """What is outside of the bounds."""
        return [each for each in self.results if each.complaint]

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON-able values."""
        found = [{**asdict(each), "complaint": each.complaint} for each in self.results]
        return {"results": found, "skipped": self.skipped}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, reports, and returns 1 where something is outside of the bounds."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's samples meet every deprecation
    console, started = Console(width=140), time.perf_counter()
    cases = chosen_cases(options)
    report = sweep(map(compiled, cases) if options.compile else cases, ("exact", *options.bits))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1))
    console.print(table(f"{options.sweep} outside of the bounds", worst(report.outside)))
    console.print(summary(report), f"{time.perf_counter() - started:.0f} s", sep=", ")
    return int(bool(report.outside))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--bits", type=int, nargs="+", choices=(8, 4, 2), default=[8, 4], help="8 and 4 by default")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="only names that this is found in")
    parser.add_argument("--parts", type=int, default=1, help="of how many parts")
    parser.add_argument("--part", type=int, default=0, help="only this one is measured, from 0 on")
    parser.add_argument("--compile", action="store_true", help="compile each case first")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    return parser.parse_args(arguments)


def chosen_cases(options: argparse.Namespace) -> Iterable[Case]:
    """Returns the cases that the command line asks for: of operators a share of them, otherwise of cases."""
    module = importlib.import_module(f"tests.fidelity.{options.sweep}")
    if options.sweep == "operators":
        names = [name for name in module.groups() if options.only.search(name)]
        mine = set(names[options.part :: options.parts])
        return module.cases(mine.__contains__)
    cases = [case for case in module.cases() if options.only.search(case.name)]
    return cases[options.part :: options.parts]


def sweep(cases: Iterable[Case], precisions: Sequence[Bits]) -> Report:
    """Measures cases."""
    report = Report()
    for case in track(cases, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        try:
            report.results += measure(case, precisions)
        except Skip as skip:
            report.skipped[case.name] = str(skip)
    return report


def worst(results: Iterable[Result]) -> list[Result]:
    """Returns the worst result of each group at each precision."""
    found: dict[tuple[str, Bits], Result] = {}
    for each in results:
        key = (each.group or each.name, each.bits)
        if key not in found or _badness(each) > _badness(found[key]):
            found[key] = each
    return sorted(found.values(), key=_badness, reverse=True)


def _badness(result: Result) -> tuple[bool, bool, float]:
    return bool(result.raised), result.bits == "exact", result.error


def table(title: str, results: Iterable[Result]) -> Table:
    """Returns a table of results."""
    shown = Table("case", box=SIMPLE, title=title)
    for name in ("bits", "first pass", "second pass"):
        shown.add_column(name, justify="right")
    shown.add_column("what is wrong")
    for each in results:
        errors = [f"{error:.3g}" for error in each.errors] or ["", ""]
        shown.add_row(each.name, str(each.bits), *errors, each.complaint)
    return shown


def summary(report: Report) -> str:
    """Returns how many were measured, and how many are outside of the bounds."""
    groups = {each.group or each.name for each in report.results}
    coded = {each.group or each.name for each in report.results if each.coded}
    outside = {each.group or each.name for each in report.outside}
    counts = f"{len(report.results)} results of {len(groups)}, {len(coded)} coded, {len(outside)} outside"
    return f"{counts}, {len(report.skipped)} cases skipped"


if __name__ == "__main__":
    sys.exit(main())
