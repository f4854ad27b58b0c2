"""Trains in less and less memory: what DAF plans for each budget, and what a step then really takes.

Run ``python -m benchmarks.budgets --json docs/results/step-budgets.json``. Budgets are in percent of what a plain step
takes beside the model, its gradients and the batch; "checkpointing" is the peak of activation checkpointing of all
blocks, and "least" the smallest budget that a plan exists for. Every row is a process of its own, with plain steps run
in turn.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.budget_worker import BudgetMeasurement, BudgetTask
from benchmarks.harness import benchmark_parser, megabytes, write_results
from daf_integrations.cli.bench.rounds import run_process
from daf_integrations.cli.bench.tables import Grid

SHAPES = {"gpt2": (2, 512), "roberta-base": (8, 128), "tiny": (8, 64)}
"""Rows of a batch and tokens of a row."""

DEFAULT_BUDGETS = "100,70,50,35,25,15,10,6,4,checkpointing,least"
WORDS = ("checkpointing", "least")
LETTERS = {"KEEP": "K", "COMPRESS": "C", "RECOMPUTE": "R", "RECOMPUTE_COMPRESSED": "r"}
HEADINGS = (
    *("budget", "MB", "parts", "outside, blocks", "bits", "predicted MB", "peak MB", "peak RSS MB"),
    *("predicted s", "step s", "ratio", "gradient error", "LoRA error"),
)


def budget_names(text: str) -> tuple[str, ...]:
    """Parses percentages and words, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in WORDS and _percent(name) is None:
            raise argparse.ArgumentTypeError(
                f"got {name!r}; allowed are percentages above 0 and up to 100, and {' and '.join(WORDS)}, "
                "separated by commas"
            )
    return names


def run_model(options: argparse.Namespace, model: str, folder: Path) -> dict[str, BudgetMeasurement]:
    """Measures plain steps, checkpointing, and each budget."""
    measured: dict[str, BudgetMeasurement] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name in progress.track(["plain", "checkpoint", *options.budgets], description=model):
            measured[name] = _run(_task(options, model, name, measured), folder)
    return measured


def budget_grid(title: str, measured: dict[str, BudgetMeasurement]) -> Grid:
    """Returns the figures as cells; sizes in MB of 10^6 bytes."""
    return Grid(title, HEADINGS, [_row(name, result) for name, result in measured.items()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes its JSON file.

    The file has ``models``, by name the list of rows; ``machine``; and ``settings``, the options.
    """
    parser = benchmark_parser("budgets", "Trains in less and less memory.", "json", "markdown", rounds=5)
    parser.add_argument("--model", choices=tuple(SHAPES), action="append", help="repeatable; tiny is for smoke tests")
    parser.add_argument("--budgets", type=budget_names, default=DEFAULT_BUDGETS, help="percentages and words")
    options = parser.parse_args(arguments)
    options.model = options.model or ["gpt2", "roberta-base"]
    with tempfile.TemporaryDirectory() as folder:
        measured = {model: run_model(options, model, Path(folder)) for model in options.model}
    grids: list[Grid] = []
    for model, results in measured.items():
        rows, length = SHAPES[model]
        grids.append(budget_grid(f"{model}, {rows} x {length}, fp32, {options.threads} threads", results))
    models = {
        model: [{"row": name, **asdict(result)} for name, result in rows.items()] for model, rows in measured.items()
    }
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "markdown")}
    allocator = measured[options.model[0]]["plain"].allocator
    write_results(options, {"models": models, "settings": settings}, grids, allocator=allocator)


def _percent(name: str) -> float | None:
    try:
        value = float(name)
    except ValueError:
        return None
    return value if 0 < value <= 100 else None


def _task(options: argparse.Namespace, model: str, name: str, measured: dict[str, BudgetMeasurement]) -> BudgetTask:
    budget = 0
    if name == "checkpointing":
        budget = measured["checkpoint"].peak_bytes
    elif percent := _percent(name):
        budget = int(measured["plain"].peak_bytes * percent / 100)
    rows, length = SHAPES[model]
    return BudgetTask(
        method=name if name in ("plain", "checkpoint") else "daf",
        model=model,
        batch=rows,
        seq=length,
        rounds=options.rounds,
        threads=options.threads,
        budget=budget,
    )


def _run(task: BudgetTask, folder: Path) -> BudgetMeasurement:
    figures = run_process("benchmarks.budget_worker", asdict(task), f"{task.method} {task.budget}", folder)
    return BudgetMeasurement(**figures)


def _row(name: str, result: BudgetMeasurement) -> list[str]:
    counts = Counter(LETTERS[treatment] for treatment in result.blocks)
    blocks = " ".join(f"{counts[letter]}{letter}" for letter in LETTERS.values() if counts[letter])
    plan = f"{LETTERS[result.outside]}, {blocks}" if result.outside else "-"
    return [
        f"{name}%" if _percent(name) else name,
        *(_megabytes(result.budget_bytes), str(result.parts), plan, str(result.bits or "-")),
        *(_megabytes(size) for size in (result.predicted_bytes, result.peak_bytes, result.peak_rss_bytes)),
        "-" if result.predicted_seconds is None else f"{result.predicted_seconds:.3f}",
        *(f"{result.step_seconds:.3f}", f"{result.step_ratio:.2f}", f"{result.gradient_error:.2g}"),
        f"{result.lora_gradient_error:.2g}",
    ]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else megabytes(size)


if __name__ == "__main__":
    main()
