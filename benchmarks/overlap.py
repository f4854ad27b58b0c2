"""Times how much of packing is hidden behind the forward pass when workers do it.

Run ``python -m benchmarks.overlap --json overlap.json`` on a machine with a core for each of torch's threads and of the
workers, and nothing else to do. Every round times the forward pass and its loss in turn: plain, packed on torch's
threads or the GPU, and packed by workers; ratios are taken within rounds. *Hidden* is the share of all the time that
packing adds to a forward pass, Python's included, that workers take off again. With ``--device cuda`` a pass ends when
the GPU has done it. Backward is not timed: what workers packed for a GPU, it reads from host memory.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.harness import CORES, benchmark_parser, usable_device, whole_number, write_results
from benchmarks.timing import time_in_turn
from benchmarks.zoo.models import MODELS, build_batch, build_model
from daf_core import ActivationEngine, DAFConfig, StepStatistics
from daf_core.config import Packing, Precision
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid

PRECISIONS: dict[str, Precision] = {"8": 8, "4": 4, "2": 2, "1": 1}
SMALLEST_IMAGE = 32
Seconds = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """Forward passes at one precision: medians over rounds, ratios within them.

    ``pack_seconds`` is what the training thread spends on packing with workers, ``worker_seconds`` what these do.
    """

    precision: int | str
    plain_seconds: float
    device_ratio: float
    workers_ratio: float
    hidden: float
    pack_seconds: float
    worker_seconds: float
    rounds: Seconds


def hidden_share(device_ratio: float, workers_ratio: float) -> float:
    """Returns the share of packing's time that workers hide, from the ratios of both to the plain forward pass."""
    return 1 - (workers_ratio - 1) / (device_ratio - 1)


def measure(
    model: nn.Module, forward: Callable[[], object], precision: Precision, rounds: int, device: str = "cpu"
) -> OverlapResult:
    """Times the three kinds of forward passes in turn."""
    engines = {packing: _engine(model, precision, packing) for packing in ("device", "workers")}
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
    scopes |= {packing: engine.compress for packing, engine in engines.items()}
    steps: list[StepStatistics] = []

    def timed(name: str) -> float:
        seconds = _timed(forward, scopes[name], finish)
        if name == "workers":
            steps.append(engines[name].finish_step())
        return seconds

    seconds = time_in_turn({name: partial(timed, name) for name in scopes}, rounds)
    for engine in engines.values():
        engine.close()
    return _result(precision, seconds, steps[1:])  # the first round warms up


def run(options: argparse.Namespace) -> list[OverlapResult]:
    """Measures all precisions, on as many cores as torch's threads and the workers need."""
    torch.set_num_threads(options.threads)
    _take_cores(options.threads + options.workers)
    model = build_model(options.model, lora_dropout=0.1).to(options.device)
    batch = build_batch(options.model, batch=options.batch, seq=options.seq, image=SMALLEST_IMAGE)
    batch = {name: tensor.to(options.device) for name, tensor in batch.items()}
    return [
        measure(model, lambda: model(**batch).loss, PRECISIONS[name], options.rounds, options.device)
        for name in options.precisions.split(",")
    ]


def result_grid(title: str, results: Sequence[OverlapResult]) -> Grid:
    """Returns the results as a table."""
    headings = ("bits", "plain s", "device", "workers", "hidden", "training thread ms", "workers ms")
    rows = [
        (
            str(each.precision),
            *(f"{value:.3f}" for value in (each.plain_seconds, each.device_ratio, each.workers_ratio)),
            f"{each.hidden:.0%}",
            *(f"{seconds * 1e3:.0f}" for seconds in (each.pack_seconds, each.worker_seconds)),
        )
        for each in results
    ]
    return Grid(title, headings, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes its JSON file."""
    description = "Times how much of packing workers hide behind the forward pass."
    parser = benchmark_parser("overlap", description, "json", rounds=15, threads=1)
    parser.add_argument("--model", choices=tuple(MODELS), default="roberta-base")
    parser.add_argument("--batch", type=whole_number(1), default=8)
    parser.add_argument("--seq", type=whole_number(1), default=128)
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu or cuda")
    parser.add_argument("--precisions", type=_precisions, default="8,4,2", help="bits, separated by commas")
    parser.add_argument("--workers", type=whole_number(1, CORES), default=1, help="threads that pack")
    options = parser.parse_args(arguments)
    results = run(options)
    where = f"{options.threads} + {options.workers} thread(s)"
    title = f"{options.model} forward on {options.device}, {options.batch} x {options.seq}, {where}"
    write_results(options, {"overlap": results}, [result_grid(title, results)], device=options.device)


def _engine(model: nn.Module, precision: Precision, packing: Packing) -> ActivationEngine:
    return ActivationEngine(model, DAFConfig(precision=precision, audit_every=None, packing=packing))


def _timed(
    forward: Callable[[], object], scope: Callable[[], AbstractContextManager[object]], finish: Callable[[], None]
) -> float:
    """Returns the seconds of a forward pass, until all of it is packed; its graph dies afterwards."""
    finish()
    started = time.perf_counter()
    with scope():
        loss = forward()
    finish()
    seconds = time.perf_counter() - started
    del loss
    return seconds


def _result(precision: Precision, seconds: Seconds, steps: Sequence[StepStatistics]) -> OverlapResult:
    plain, device, workers = seconds["plain"], seconds["device"], seconds["workers"]
    device_ratio, workers_ratio = paired_ratio(device, plain), paired_ratio(workers, plain)
    return OverlapResult(
        precision=precision,
        plain_seconds=statistics.median(plain),
        device_ratio=device_ratio,
        workers_ratio=workers_ratio,
        hidden=hidden_share(device_ratio, workers_ratio),
        pack_seconds=statistics.median(step.pack_seconds for step in steps),
        worker_seconds=statistics.median(step.worker_seconds for step in steps),
        rounds=seconds,
    )


def _take_cores(count: int) -> None:
    """Leaves the process so many cores, which decides how many workers there are."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise SystemExit(f"{count} threads need as many cores, and {len(cores)} may be used; lower --threads")
    os.sched_setaffinity(0, cores[:count])


def _precisions(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in PRECISIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(map(repr, unknown))}; allowed are {', '.join(PRECISIONS)}, separated by commas"
        )
    return text


if __name__ == "__main__":
    main()
