"""Measures what memory allocators make of the same training: peak resident size, and time of a step.

Run ``python -m benchmarks.allocators --json allocators.json``. Every setting is a process of its own.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.harness import benchmark_parser, megabytes, method_names, whole_number, write_results
from benchmarks.zoo import models
from daf_integrations.cli.allocator import LIBRARIES, PRELOAD, PURGE_DELAY, options_of
from daf_integrations.cli.bench.rounds import rotated, run_process
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.bench.worker import Measurement, Task
from daf_integrations.cli.doctor import MMAP_THRESHOLD, SMALL_BLOCK
from daf_integrations.cli.workload import Workload

GLIBC = (
    {},
    {"MALLOC_ARENA_MAX": "1"},
    {"MALLOC_TRIM_THRESHOLD_": "131072"},
    {MMAP_THRESHOLD: str(SMALL_BLOCK)},
)
"""Variables that glibc's allocator reads. Where a threshold is set, it does not raise thresholds by itself."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a method took under an allocator: medians of rounds.

    ``held_bytes`` are those of saved activations as they wait for backward. ``peak_rss_bytes`` is above the loaded
    model. ``step_ratio`` is to the same method under the first setting within a round.
    """

    setting: str
    method: str
    raw_bytes: int
    held_bytes: int
    peak_rss_bytes: int
    step_seconds: float
    step_ratio: float


def settings() -> dict[str, dict[str, str]]:
    """Returns the variables of each setting, by its name; those of other allocators where these are installed."""
    named = {" ".join(["glibc", *(f"{name}={value}" for name, value in each.items())]): each for each in GLIBC}
    found = {name: library() for name, library in LIBRARIES.items()}
    return named | {name: {PRELOAD: library, **options_of(library)} for name, library in found.items() if library}


def variables_of(setting: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this process with those of a setting, and no others that allocators read."""
    others = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", PRELOAD, PURGE_DELAY))
    }
    return {**others, **setting, "HF_HUB_OFFLINE": "1"}


def summarize(method: str, measured: Mapping[str, Sequence[Measurement]]) -> list[Result]:
    """Returns the figures of a method.

    Args:
        method: Its name.
        measured: What each round measured under each setting, by the setting's name.
    """
    first = [each.step_seconds for each in next(iter(measured.values()))]
    return [
        Result(
            setting=setting,
            method=method,
            raw_bytes=round(statistics.median(each.raw_bytes for each in rounds)),
            held_bytes=round(statistics.median(each.held_bytes for each in rounds)),
            peak_rss_bytes=round(statistics.median(each.peak_rss_bytes for each in rounds)),
            step_seconds=statistics.median(each.step_seconds for each in rounds),
            step_ratio=paired_ratio([each.step_seconds for each in rounds], first),
        )
        for setting, rounds in measured.items()
    ]


def result_grid(results: Sequence[Result]) -> Grid:
    """Returns the figures; sizes in MB of 10^6 bytes."""
    rows = [
        (
            *(each.setting, each.method),
            *(megabytes(size) for size in (each.raw_bytes, each.held_bytes, each.peak_rss_bytes)),
            *(f"{each.step_seconds:.3f}", f"{each.step_ratio:.2f}"),
        )
        for each in results
    ]
    headings = ("allocator", "method", "saved MB", "held MB", "peak RSS MB", "step s", "of the first")
    return Grid("the same training with each allocator", headings, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every method under every setting, prints a table and writes the file asked for."""
    parser = benchmark_parser("allocators", "Compares memory allocators.", "json", rounds=3)
    parser.add_argument("--model", choices=tuple(models.MODELS), default="roberta-base", help="tiny is for smoke tests")
    parser.add_argument("--batch", type=whole_number(1), default=8, help="rows of a batch")
    parser.add_argument("--seq", type=whole_number(2), default=128, help="tokens of a row")
    parser.add_argument("--methods", type=method_names(), default="plain,daf-4bit", help="separated by commas")
    parser.add_argument(
        "--allocators", default=",".join(settings()), help="separated by commas; default: all, glibc first"
    )
    parser.add_argument("--steps", type=whole_number(1), default=5, help="steps of each process, after two to warm up")
    options = parser.parse_args(arguments)
    names = options.allocators.split(",")
    if unknown := [name for name in names if name not in settings()]:
        parser.error(f"--allocators: {', '.join(unknown)} is not installed; allowed are {', '.join(settings())}")
    named = {name: settings()[name] for name in names}
    measured = {method: {name: list[Measurement]() for name in named} for method in options.methods}
    runs = [
        (name, each) for turn in range(options.rounds) for each in options.methods for name in rotated([*named], turn)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, method in track(runs, "allocators", console=Console(stderr=True)):
            task, variables = asdict(_task(options, method)), variables_of(named[name])
            found = run_process("daf_integrations.cli.bench.worker", task, f"{method}, {name}", Path(folder), variables)
            measured[method][name].append(Measurement(**found))
    results = [result for method in options.methods for result in summarize(method, measured[method])]
    write_results(options, {"results": results}, [result_grid(results)], allocator="each of them")


def _task(options: argparse.Namespace, method: str) -> Task:
    made = f"{models.__file__}:{options.model.replace('-', '_')}"
    return Task(
        method=method,
        workload=asdict(Workload(model=made, batch=options.batch, length=options.seq)),
        dtype="fp32",
        steps=options.steps,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
