"""Compares ways to keep activations in whole training steps: time, memory and gradients.

Run ``python -m benchmarks.training --model roberta-base --json roberta.json``. Every measurement is a process
of its own; a round runs every method once, each round starting with another method, and ratios are taken
within rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import core_count, describe_machine, tcmalloc_library
from benchmarks.models import MODELS
from benchmarks.options import method_names, probability, usable_device, whole_number
from benchmarks.summary import (
    GpuMethodResult,
    MethodResult,
    compare_gradients,
    compare_lora_gradients,
    load_gradients,
    summarize,
)
from benchmarks.tables import Grid, markdown_table
from benchmarks.worker import GpuMeasurement, Measurement, Task

DEFAULT_METHODS = "plain,checkpoint,daf-exact,daf-8bit,daf-4bit,daf-2bit"
SMALLEST_IMAGE = 32
MEGABYTE = 1e6


class WorkerError(RuntimeError):
    """A measuring process ended with an error."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a run; a wrong one ends the process with a message that says what is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description="Times whole training steps.")
    cores = core_count()
    parser.add_argument("--model", choices=tuple(MODELS), default="roberta-base", help="tiny is for smoke tests")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=whole_number(1), default=8, help="rows of a batch")
    parser.add_argument("--seq", type=whole_number(2), default=128, help="tokens of a row")
    parser.add_argument("--image", type=whole_number(SMALLEST_IMAGE), default=224, help="height and width, resnet18")
    parser.add_argument("--methods", type=method_names(), default=DEFAULT_METHODS, help="separated by commas")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over fp32 weights")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="processes of each method")
    parser.add_argument("--steps", type=whole_number(1), default=5, help="timed steps of each process")
    parser.add_argument("--threads", type=whole_number(1, cores), default=cores, help="threads of torch")
    parser.add_argument("--lora-dropout", type=probability, default=0.1)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    longest = MODELS[options.model].longest_seq
    if longest and options.seq > longest:
        parser.error(f"argument --seq: got {options.seq}; {options.model} takes 2 to {longest}; pass a smaller one")
    return options


def rotated(methods: Sequence[str], turn: int) -> list[str]:
    """Returns the methods in the order of a round, so that none always runs first."""
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def run_worker(task: Task, folder: Path) -> Measurement:
    """Measures one task in a process of its own, under tcmalloc where there is one.

    Args:
        task: What to run.
        folder: Where the process may leave its result.

    Raises:
        WorkerError: If the process fails; the message ends with what it printed.
    """
    figures = run_process("benchmarks.worker", asdict(task), task.method, folder)
    kind = GpuMeasurement if task.device == "cuda" else Measurement
    return kind(**figures)


def run_process(module: str, task: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Has a module measure a task in a process of its own, under tcmalloc where there is one.

    Args:
        module: Takes the JSON of the task, and the file that it writes the JSON of its figures to.
        task: What to run; "threads" are those of torch.
        name: Of the task, for messages.
        folder: Where the process may leave its result.

    Raises:
        WorkerError: If the process fails; the message ends with what it printed.
    """
    result = folder / "measurement.json"
    process = subprocess.run(
        [sys.executable, "-m", module, json.dumps(task), str(result)],
        env=_worker_environment(task["threads"]),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise WorkerError(
            f"the process for {name!r} ended with code {process.returncode}; "
            f"correct what it says and run again:\n{process.stderr[-2000:]}"
        )
    return json.loads(result.read_text())


def run_rounds(options: argparse.Namespace, folder: Path) -> dict[str, list[Measurement]]:
    """Runs every method in every round; leaves the gradients of the first round in ``folder``."""
    measured: dict[str, list[Measurement]] = {method: [] for method in options.methods}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=options.rounds * len(options.methods))
        for turn in range(options.rounds):
            for method in rotated(options.methods, turn):
                progress.update(bar, description=f"round {turn + 1}: {method}")
                gradients = _gradient_file(folder, method) if turn == 0 else None
                measured[method].append(run_worker(_task(options, method, gradients), folder))
                progress.advance(bar)
    return measured


def compare(options: argparse.Namespace) -> tuple[list[MethodResult], str]:
    """Measures all methods and returns their figures and the name of the allocator they ran under."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = run_rounds(options, folder)
        gradients = {method: load_gradients(_gradient_file(folder, method)) for method in options.methods}
    results = [
        summarize(
            method,
            rounds,
            measured["plain"],
            compare_gradients(gradients[method], gradients["plain"]),
            compare_lora_gradients(gradients[method], gradients["plain"]),
        )
        for method, rounds in measured.items()
    ]
    return results, measured["plain"][0].allocator


def result_grid(title: str, results: Sequence[MethodResult]) -> Grid:
    """Returns the figures as cells; sizes in MB of 10^6 bytes, of a GPU's own memory where it ran on one."""
    on_gpu = any(isinstance(result, GpuMethodResult) for result in results)
    sizes = ("loaded MB", "peak MB") if on_gpu else ("code MB", "peak RSS MB")
    headings = ("method", "saved MB", "held MB", *sizes, "step s", "ratio", "gradient error", "LoRA error")
    return Grid(title, headings, [*map(_row, results)])


def result_table(title: str, results: Sequence[MethodResult]) -> Table:
    """Returns the figures as a table for a terminal."""
    grid = result_grid(title, results)
    table = Table(title=grid.title, box=SIMPLE, collapse_padding=True)
    table.add_column(grid.headings[0], no_wrap=True)
    for heading in grid.headings[1:]:
        table.add_column(heading, justify="right", min_width=len("gradient") if "error" in heading else None)
    for row in grid.rows:
        table.add_row(*row)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes its JSON file.

    The file has ``methods``, a list of ``MethodResult``; ``machine``; and ``settings``, the options.
    """
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    results, allocator = compare(options)
    machine = describe_machine(threads=options.threads, allocator=allocator, dtype=options.dtype, device=options.device)
    Console().print(result_table(_title(options), results))
    if options.markdown:
        options.markdown.write_text(markdown_table(result_grid(_title(options), results)))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "markdown")}
        report = {
            "methods": [asdict(result) for result in results],
            "machine": asdict(machine),
            "settings": settings,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _task(options: argparse.Namespace, method: str, gradients: Path | None) -> Task:
    return Task(
        method=method,
        model=options.model,
        batch=options.batch,
        seq=options.seq,
        image=options.image,
        dtype=options.dtype,
        steps=options.steps,
        threads=options.threads,
        lora_dropout=options.lora_dropout,
        gradients=str(gradients) if gradients else "",
        device=options.device,
    )


def _gradient_file(folder: Path, method: str) -> Path:
    return folder / f"{method}.pt"


def _worker_environment(threads: int) -> dict[str, str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the worker imports what this process would
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    tcmalloc = tcmalloc_library()
    if tcmalloc:
        environment["LD_PRELOAD"] = " ".join(filter(None, [tcmalloc, os.environ.get("LD_PRELOAD")]))
    return environment


def _row(result: MethodResult) -> list[str]:
    sizes = [result.setup_rss_bytes, result.peak_rss_bytes]
    if isinstance(result, GpuMethodResult):
        sizes = [result.loaded_device_bytes, result.peak_device_bytes]
    return [
        result.method,
        *(f"{size / MEGABYTE:.1f}" for size in (result.raw_bytes, result.held_bytes, *sizes)),
        f"{result.step_seconds:.3f}",
        f"{result.step_ratio:.3f}",
        *map(_error_text, (result.gradient_error, result.lora_gradient_error)),
    ]


def _error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _title(options: argparse.Namespace) -> str:
    size = f"{options.batch} x {options.seq}"
    if MODELS[options.model].task == "image":
        size = f"{options.batch} x {options.image} x {options.image}"
    where = f"{options.threads} threads" if options.device == "cpu" else options.device
    return f"{options.model}, {size}, {options.dtype}, {where}"


if __name__ == "__main__":
    main()
