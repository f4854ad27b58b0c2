"""Runs tests of trainers without DAF and with it, and says which fail with it alone.

Run ``python -m tests.peers --accelerate FOLDER``, where FOLDER is a checkout of the version that is installed. Nothing
is fetched: tests that need data or models of the Hub, or packages that are missing, do not pass without DAF either, and
are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.daf_in_trainers import RESULTS, SWITCH
from tests.peers.suites import EXPLAINED, SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]
SEVERITY = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Result:
    """How a test ended.

    Attributes:
        outcome: One of `SEVERITY`.
        error: The last line of the error, if there was one.
    """

    outcome: str
    error: str = ""


Results = dict[str, Result]


def main(arguments: Sequence[str] | None = None, explained: Mapping[str, str] = EXPLAINED) -> int:
    """Compares, prints, and returns 1 where a test fails with DAF alone and nobody has said why; 2 if none ran."""
    options = parse_arguments(arguments)
    found, compared = list[str](), 0
    for peer, suite in SUITES.items():
        checkout: Path | None = getattr(options, peer)
        if checkout is None:
            continue
        plain = run(peer, suite, checkout, options, None)
        passed = sum(result.outcome == "passed" for result in plain.values())
        compared += passed
        for precision in options.precision if passed else ():
            compressed = run(peer, suite, checkout, options, precision)
            found += [f"{peer}:{precision} {line}" for line in differences(plain, compressed)]
    unexplained = [line for line in found if not report(line, explained)]
    print(f"{compared} tests pass without DAF; {len(found)} differences with it, {len(unexplained)} without a reason")
    return 1 if unexplained else 0 if compared else 2


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer, suite in SUITES.items():
        tests = ", ".join(suite.paths)
        parser.add_argument(f"--{peer}", type=_folder, metavar="FOLDER", help=f"its checkout; {tests} of it run")
    parser.add_argument("--precision", nargs="+", choices=("exact", "auto"), default=["exact", "auto"])
    parser.add_argument("--paths", nargs="+", help="only these tests, in place of those that train")
    parser.add_argument("-k", dest="only", default="", help="only tests that this expression of pytest's is true of")
    parser.add_argument("--seconds", type=float, help="most time for a run; tests after it count as not run")
    options = parser.parse_args(arguments)
    if not any(getattr(options, peer) for peer in SUITES):
        parser.error(f"name the checkout of a peer: {', '.join(f'--{peer} FOLDER' for peer in SUITES)}")
    return options


def run(peer: str, suite: Suite, checkout: Path, options: argparse.Namespace, precision: str | None) -> Results:
    """Runs tests of a peer in a process of their own, with DAF at a precision, or without it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "results"), Path(folder, "log")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "daf_in_trainers", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "-o", "addopts="]  # theirs name plugins that may be missing
        command += [*(options.paths or suite.paths), *(["-k", options.only] if options.only else [])]
        with log.open("w") as output:
            try:
                subprocess.run(
                    command,
                    cwd=checkout / suite.folder,
                    env=_environment(file, checkout / suite.folder, precision and f"{peer}:{precision}"),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=options.seconds,
                )
            except subprocess.TimeoutExpired:
                output.write("\nthe time was over")
        results = results_in(file)
        counts = Counter(result.outcome for result in results.values())
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in SEVERITY)
        print(f"{peer} {precision or 'without DAF'}: {said}, {time.perf_counter() - started:.0f} s", flush=True)
        if not counts["passed"]:
            print(log.read_text()[-2000:])
    return results


def results_in(file: Path) -> Results:
    """Returns how tests ended, by name: with the worst of what was noted of each."""
    found: Results = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        noted = json.loads(line)
        result, before = Result(noted["outcome"], noted["error"]), found.get(noted["test"])
        if before is None or SEVERITY.index(result.outcome) > SEVERITY.index(before.outcome):
            found[noted["test"]] = result
    return found


def differences(plain: Results, compressed: Results) -> list[str]:
    """Returns a line for each test that passes without DAF and not with it."""
    missing = Result("failed", "did not run: the process ended before")
    pairs = [(test, compressed.get(test, missing)) for test, result in plain.items() if result.outcome == "passed"]
    return [f"{test}: {result.error or result.outcome}" for test, result in pairs if result.outcome != "passed"]


def report(line: str, explained: Mapping[str, str]) -> bool:
    """Prints a difference; says whether it is explained."""
    reason = next((reason for pattern, reason in explained.items() if re.search(pattern, line)), None)
    print(f"{line[:400]}\n    {reason or 'NOT EXPLAINED'}")
    return reason is not None


def _environment(results: Path, folder: Path, switch: str | None) -> dict[str, str]:
    paths = [folder, ROOT, ROOT / "kernels", Path(__file__).parent]
    found = {name: value for name, value in os.environ.items() if name not in (SWITCH, "PYTEST_ADDOPTS")}
    found["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    found |= {RESULTS: str(results), "HF_HUB_OFFLINE": "1"}
    return found if switch is None else {**found, SWITCH: switch}


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder; name a checkout with its tests")
    return path


if __name__ == "__main__":
    sys.exit(main())
