"""Compares the accuracy that methods reach when they train, seed by seed.

A pre-trained encoder on sentences, with a folder of images ResNet-18 from random weights, or a task of
``benchmarks.tasks``.

Run ``python -m benchmarks.accuracy --methods plain,daf-4bit --seeds 5 --json mrpc.json --markdown mrpc.md``.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from transformers.utils import logging

from benchmarks.assignment import Training, load_training
from benchmarks.elastic_methods import COURSES, is_trained
from benchmarks.harness import benchmark_parser, method_names, usable_device, whole_number
from benchmarks.rows import SourceError
from benchmarks.scores import TEXT_METRICS
from benchmarks.tasks import TASKS
from daf_integrations.cli.bench.machine import describe_machine
from daf_integrations.cli.bench.methods import METHODS as BENCH_METHODS

METHODS = (*BENCH_METHODS, *(f"{kind}@0.7" for kind in COURSES))
DEFAULT_DATA = Path("../shared/data/glue/mrpc")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The accuracy that one method reached with one seed, on each split that it was evaluated on.

    ``figures`` is what the method logged: bytes, time and the error of the gradient.
    """

    method: str
    seed: int
    accuracy: dict[str, float]
    seconds: float
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Accuracies of one method on one split over the seeds, and their differences from ``plain``.

    Deviations are those of a sample; with one seed they are zero.
    """

    method: str
    split: str
    seeds: list[int]
    accuracies: list[float]
    mean: float
    deviation: float
    mean_difference: float
    difference_deviation: float


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a run; a wrong one ends the process with a message that says what is allowed."""
    parser = benchmark_parser("accuracy", "Compares accuracies seed by seed.", "json", "markdown")
    parser.add_argument("--task", choices=TASKS, help="what is trained; left out, the data say it")
    where = "folder with texts or images; with --task also a file or a name of the Hub, in place of the task's own data"
    parser.add_argument("--data", "--dataset", help=where)
    parser.add_argument("--evaluation", type=Path, help="file with the rows to evaluate on, where --dataset is a file")
    parser.add_argument("--model", help="name of the Hub, folder, minilm or small-gpt2, in place of the task's own")
    parser.add_argument("--tokenizer", help="name of the Hub or folder, in place of the model's own")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--methods", type=method_names(METHODS, is_trained), default="plain,daf-4bit", help="separated by commas"
    )
    parser.add_argument("--seeds", type=whole_number(1), default=5, help="how many")
    parser.add_argument("--first-seed", type=whole_number(0), default=0, help="they count from here")
    parser.add_argument("--epochs", type=whole_number(1), help="how often the rows are seen")
    parser.add_argument("--train-rows", type=whole_number(1), help="train on the first rows only")
    parser.add_argument("--evaluation-rows", type=whole_number(1), help="evaluate on the first rows only")
    options = parser.parse_args(arguments)
    if options.task is None:
        _check_untasked(parser, options)
    return options


def _check_untasked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.data = options.data or str(DEFAULT_DATA)
    if not Path(options.data).is_dir():
        parser.error(f"argument --data: got {options.data!r}, which is no folder; pass the one with the data")
    needing = [name for name in ("evaluation", "model", "tokenizer", "evaluation_rows") if getattr(options, name)]
    if needing:
        parser.error(f"got --{needing[0].replace('_', '-')} without --task; allowed are {', '.join(TASKS)}; name one")


def run_all(options: argparse.Namespace, train: Training, steps: int) -> list[Run]:
    """Trains with every method and seed and returns what each run reached.

    The files asked for are written after every run, and what is in the JSON file is not run again: an interrupted
    benchmark goes on where it was.
    """
    runs = read_runs(options)
    done = {(run.method, run.seed) for run in runs}
    with Progress(console=Console(stderr=True)) as progress:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for method in options.methods:
                if (method, seed) in done:
                    continue
                bar = progress.add_task(f"seed {seed}, {method}", total=steps)
                start = time.perf_counter()
                accuracy, figures = train(method, seed, lambda bar=bar: progress.advance(bar))
                seconds = time.perf_counter() - start
                runs.append(Run(method=method, seed=seed, accuracy=accuracy, seconds=seconds, figures=figures))
                write_reports(options, runs)
    return runs


def read_runs(options: argparse.Namespace) -> list[Run]:
    """Returns the runs that the JSON file has already.

    Raises:
        SystemExit: They trained in another way.
    """
    if options.json is None or not options.json.exists():
        return []
    report = json.loads(options.json.read_text())
    asked = _training_settings(options)
    found = {name: report["settings"].get(name) for name in asked}
    if found != asked:
        sys.exit(f"error: {options.json} has runs with {found}, and {asked} was asked for; pass another file as --json")
    return [Run(**run) for run in report["runs"]]


def summarize(runs: Sequence[Run]) -> list[SplitSummary]:
    """Returns the figures of every split and method, ``plain`` included, over the seeds that all of them have.

    None where no seed has all of them, or ``plain`` has not been run yet.
    """
    methods = dict.fromkeys(run.method for run in runs)
    if "plain" not in methods:
        return []
    seeds = set.intersection(*({run.seed for run in runs if run.method == method} for method in methods))
    if not seeds:
        return []
    complete = sorted((run for run in runs if run.seed in seeds), key=lambda run: run.seed)
    return [_summarize_split(complete, method, split) for split in runs[0].accuracy for method in methods]


def markdown_report(summaries: Sequence[SplitSummary]) -> str:
    """Returns one Markdown table for each split, with the score of every seed, in percent unless it is a loss."""
    tables: list[str] = []
    for split in dict.fromkeys(summary.split for summary in summaries):
        rows = [summary for summary in summaries if summary.split == split]
        seeds = [f"seed {seed}" for seed in rows[0].seeds]
        headings = [split, *seeds, "mean", "s.d.", "minus plain", "s.d."]
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *map(_markdown_row, rows)]
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables) + "\n"


def write_reports(options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Writes the table and the figures to the files asked for."""
    summaries = summarize(runs)
    if options.markdown:
        options.markdown.write_text(markdown_report(summaries))
    if options.json:
        options.json.write_text(_json_report(options, runs, summaries))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes the files asked for."""
    options = parse_arguments(arguments)
    logging.set_verbosity_error()  # every load says that the encoder comes without a classifier
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    try:
        train, steps = load_training(options)
        runs = run_all(options, train, steps)
    except (FileNotFoundError, SourceError) as error:
        sys.exit(f"error: {error}")
    Console().print(Markdown(markdown_report(summarize(runs))))


def _summarize_split(runs: Sequence[Run], method: str, split: str) -> SplitSummary:
    accuracies, plain = ([run.accuracy[split] for run in runs if run.method == name] for name in (method, "plain"))
    differences = [found - expected for found, expected in zip(accuracies, plain, strict=True)]
    return SplitSummary(
        method=method,
        split=split,
        seeds=[run.seed for run in runs if run.method == method],
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=_deviation(accuracies),
        mean_difference=statistics.fmean(differences),
        difference_deviation=_deviation(differences),
    )


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _markdown_row(summary: SplitSummary) -> list[str]:
    of_text = summary.split.endswith(TEXT_METRICS)
    factor, digits = (1, 4) if of_text else (100, 2)
    scores = [f"{factor * value:.{digits}f}" for value in (*summary.accuracies, summary.mean, summary.deviation)]
    if summary.method == "plain":
        return [summary.method, *scores, "", ""]
    mean, deviation = factor * summary.mean_difference, factor * summary.difference_deviation
    return [summary.method, *scores, f"{mean:+.{digits}f}", f"{deviation:.{digits}f}"]


def _json_report(options: argparse.Namespace, runs: Sequence[Run], summaries: Sequence[SplitSummary]) -> str:
    report = {
        "summaries": summaries,
        "runs": runs,
        "machine": describe_machine(dtype="fp32", threads=options.threads, device=options.device),
        "settings": {**_training_settings(options), "threads": options.threads},
    }
    return json.dumps(report, indent=2, default=asdict) + "\n"


def _training_settings(options: argparse.Namespace) -> dict[str, str | int | None]:
    """What runs in one file have in common; files from before there were tasks lack those that are None without one."""
    paths = {name: getattr(options, name) for name in ("data", "evaluation", "model", "tokenizer")}
    others = {name: getattr(options, name) for name in ("task", "train_rows", "evaluation_rows", "epochs")}
    return {name: _source_name(path) for name, path in paths.items()} | others


def _source_name(source: str | Path | None) -> str | None:
    """Returns the name of a file or folder without where it is, and that of the Hub as it is."""
    return Path(source).name if source is not None and Path(source).exists() else source and str(source)


if __name__ == "__main__":
    main()
