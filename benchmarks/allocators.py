"""Measures what memory allocators make of the same training: peak resident size, and processor time.

Run ``python -m benchmarks.allocators --json allocators.json``. Every setting is a process of its own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.options import method_names, whole_number
from benchmarks.zoo import models
from daf_integrations.bench.machine import core_count, describe_machine
from daf_integrations.bench.worker import Measurement, Task
from daf_integrations.doctor import installed_tcmalloc
from daf_integrations.sizing import Workload

MEGABYTE = 1e6
GLIBC = (
    {},
    {"MALLOC_ARENA_MAX": "1"},
    {"MALLOC_TRIM_THRESHOLD_": "131072"},
    {"MALLOC_MMAP_THRESHOLD_": "65536"},
)
"""Variables that glibc's allocator reads. Where a threshold is set, it does not raise thresholds by itself."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a method took under an allocator: the peak above the loaded model, and processor time from start to end."""

    setting: str
    method: str
    raw_bytes: int
    peak_rss_bytes: int
    cpu_seconds: float


def settings() -> dict[str, dict[str, str]]:
    """Returns the variables of each setting, by its name; tcmalloc's where it is installed."""
    named = {" ".join(["glibc", *(f"{name}={value}" for name, value in each.items())]): each for each in GLIBC}
    tcmalloc = installed_tcmalloc()
    return named if tcmalloc is None else named | {"tcmalloc": {"LD_PRELOAD": tcmalloc}}


def measure(setting: str, variables: dict[str, str], task: Task) -> Result:
    """Runs a task in a process with these variables, and no others that allocators read."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    environment = others | variables | {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the worker imports what this process would
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measurement.json"
        command = [sys.executable, "-m", "daf_integrations.bench.worker", json.dumps(asdict(task)), str(file)]
        before = _children_seconds()
        subprocess.run(command, env=environment, check=True)
        seconds = _children_seconds() - before
        measured = Measurement(**json.loads(file.read_text()))
    return Result(
        setting=setting,
        method=task.method,
        raw_bytes=measured.raw_bytes,
        peak_rss_bytes=measured.peak_rss_bytes,
        cpu_seconds=seconds,
    )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def result_table(results: Sequence[Result]) -> Table:
    """Returns the figures; sizes in MB of 10^6 bytes."""
    table = Table("allocator", "method", "saved MB", "peak RSS MB", "CPU s")
    for each in results:
        sizes = (f"{size / MEGABYTE:.1f}" for size in (each.raw_bytes, each.peak_rss_bytes))
        table.add_row(each.setting, each.method, *sizes, f"{each.cpu_seconds:.1f}")
    return table


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a run; a wrong one ends the process with a message that says what is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocators", description="Compares memory allocators.")
    cores = core_count()
    parser.add_argument("--model", choices=tuple(models.MODELS), default="roberta-base", help="tiny is for smoke tests")
    parser.add_argument("--batch", type=whole_number(1), default=8, help="rows of a batch")
    parser.add_argument("--seq", type=whole_number(2), default=64, help="tokens of a row")
    parser.add_argument("--methods", type=method_names(), default="plain,daf-4bit", help="separated by commas")
    parser.add_argument("--steps", type=whole_number(1), default=5, help="steps of each process, after two to warm up")
    parser.add_argument("--threads", type=whole_number(1, cores), default=cores, help="threads of torch")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every method under every setting, prints a table and writes the file asked for."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    runs = [(name, variables, method) for method in options.methods for name, variables in settings().items()]
    results = [
        measure(name, variables, _task(options, method))
        for name, variables, method in track(runs, "allocators", console=Console(stderr=True))
    ]
    Console().print(result_table(results))
    if options.json:
        machine = describe_machine(threads=options.threads, allocator="each of them", dtype="fp32")
        report = {"results": [asdict(result) for result in results], "machine": asdict(machine)}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


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
