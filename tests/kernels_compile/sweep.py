"""Compiles kernels for GPUs that need not be there, and shows what came out.

Run ``python -m tests.kernels_compile.sweep --target sm_90 --json kernels.json`` for all kernels, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.kernels_compile.cases import all_cases, chosen
from tests.kernels_compile.checks import complaints

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = ("sm_80", "sm_87", "sm_90", "gfx942")


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process in which Triton compiles, whatever it does in this one."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", **more}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, reports, and returns 1 where something is wrong with a kernel."""
    options = parse_arguments(arguments)
    if options.target is None:
        own = ["--chosen"] if options.chosen else []
        return max(_run_target(target, [*own, "--match", options.match], options.json) for target in TARGETS)
    results = compile_all(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    Console(width=140).print(_table(options.target, results))
    return int(any(result["complaints"] for result in results.values()))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, help="which GPU (default: all of them, one after the other)")
    parser.add_argument("--chosen", action="store_true", help="only the kernels that the tests look at")
    parser.add_argument("--match", default="", help="only kernels whose description has this text")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    return parser.parse_args(arguments)


def compile_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what was found of each case, by its description. Makes this process one of the target's."""
    from tests.kernels_compile.compiled import compile_case
    from tests.kernels_compile.fake_driver import pretend

    pretend(options.target)
    cases = [case for case in (chosen(options.target) if options.chosen else all_cases()) if options.match in str(case)]
    results = {}
    for case in track(cases, f"compiling for {options.target}", disable=not sys.stderr.isatty()):
        found = compile_case(case)
        results[str(case)] = {**found, "complaints": complaints(case, found)}
    return results


def _run_target(target: str, own: Sequence[str], file: Path | None) -> int:
    """Compiles for one target in a process of its own: what Triton has learned of a GPU stays in a process."""
    report = ["--json", str(file.with_stem(f"{file.stem}_{target}"))] if file else []
    command = [sys.executable, "-m", "tests.kernels_compile.sweep", "--target", target, *own, *report]
    return subprocess.run(command, env=environment(), cwd=ROOT, check=False).returncode


def _table(target: str, results: dict[str, dict[str, Any]]) -> Table:
    table = Table("kernel", box=SIMPLE, title=target)
    for name in ("registers", "stack", "spilled", "instructions an element"):
        table.add_column(name, justify="right")
    table.add_column("wrong")
    for name, found in results.items():
        instructions = f"{found['instructions']:.1f}" if "instructions" in found else ""
        numbers = [str(found.get(name, "")) for name in ("registers", "stack", "spilled")]
        table.add_row(name, *numbers, instructions, "; ".join(found["complaints"]))
    return table


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "0":  # read when triton is first imported, by now perhaps
        command = [sys.executable, "-m", "tests.kernels_compile.sweep", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment(), check=False).returncode)
    sys.exit(main())
