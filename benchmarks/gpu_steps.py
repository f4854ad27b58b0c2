"""Times training steps on a GPU, from sizes at which the host cannot keep up with it to sizes that fill it.

Run ``python -m benchmarks.gpu_steps --json steps.json --markdown steps.md``. Each method takes its steps in turn with
plain ones, in one process and on one model; ratios are taken within rounds. *Host* is the part of the forward pass
after which the host goes on, though the GPU may not be done. Peaks are of allocated bytes above the loaded model.

With ``--compile MODE`` the whole model is one graph of torch.compile, for plain steps and for each method. With
``--capture`` forward and backward are CUDA graphs.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.harness import benchmark_parser, megabytes, write_results
from benchmarks.zoo.models import build_batch, build_model
from daf_core import ActivationEngine, DAFConfig
from daf_core.config import Precision
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid

SIZES = (("roberta-base", 32, 128), ("roberta-base", 128, 512), ("gpt2-medium", 8, 1024))
"""Models with batches of so many rows of so many tokens."""

METHODS: dict[str, Precision] = {"daf-exact": "exact", "daf-8bit": 8, "daf-4bit": 4}
MODES = ("default", "reduce-overhead")
CAPTURE = "capture"
"""Stands among these modes for CUDA graphs of steps that are not compiled."""

DEVICE = "cuda"
SETTLING = 7
"""Steps in which readers are learned, kernels are compiled and the pool grows."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Medians of a method's steps, in seconds, and its bytes.

    Attributes:
        model: The model.
        rows: Rows of the batch.
        length: Tokens of each.
        method: The method.
        host: Forward pass until the host goes on.
        forward: Forward pass.
        backward: Backward pass.
        step_ratio: Both of them over those of plain.
        saved_bytes: What autograd saves.
        held_bytes: What is held of it, at most.
        peak_bytes: The most that was allocated above the loaded model.
    """

    model: str
    rows: int
    length: int
    method: str
    host: float
    forward: float
    backward: float
    step_ratio: float
    saved_bytes: int
    held_bytes: int
    peak_bytes: int


class Steps:
    """Steps of a model, plain or with an engine.

    Args:
        model: The model, on the GPU.
        batch: Its batch, there too.
        engine: Compresses what autograd saves; None for plain steps.
        loaded: Bytes that were allocated before the engine was there.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], engine: ActivationEngine | None, loaded: int):
        self._model, self._batch, self._engine, self._loaded = model, batch, engine, loaded
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None  # of forward and backward
        self.seconds: list[tuple[float, float, float]] = []
        self.saved_bytes = self.held_bytes = self.peak_bytes = 0

    def take(self) -> None:
        """Takes a step."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = self._forward() if self._graphs is None else self._graphs[0].replay()
        left = time.perf_counter()
        torch.cuda.synchronize()
        between = time.perf_counter()
        if self._graphs is not None:
            self._graphs[1].replay()
        elif loss is not None:
            loss.backward()
        torch.cuda.synchronize()
        self.seconds.append((left - started, between - started, time.perf_counter() - between))
        if self._graphs is None:  # a graph has all its memory from when it was captured
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._loaded
            self._finish()

    def capture(self) -> None:
        """Captures a step: those to come run it again."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            loss = self._forward()
        with torch.cuda.graph(backward, pool=forward.pool()):
            loss.backward()
        self.peak_bytes = torch.cuda.max_memory_allocated() - self._loaded
        self._finish()
        self._graphs = forward, backward

    def _forward(self) -> Tensor:
        with nullcontext() if self._engine is None else self._engine.compress():
            return self._model(**self._batch).loss

    def _finish(self) -> None:
        self._model.zero_grad()
        if self._engine is not None:
            statistics = self._engine.finish_step()
            self.saved_bytes, self.held_bytes = statistics.raw_bytes, statistics.held_bytes

    def result(self, model: str, rows: int, length: int, method: str, plain: "Steps") -> StepResult:
        """Returns what was measured beside plain steps."""
        mine, others = (each.seconds[SETTLING:] for each in (self, plain))
        host, forward, backward = (statistics.median(taken) for taken in zip(*mine, strict=True))
        ratio = paired_ratio([sum(each[1:]) for each in mine], [sum(each[1:]) for each in others])
        return StepResult(
            model=model,
            rows=rows,
            length=length,
            method=method,
            host=host,
            forward=forward,
            backward=backward,
            step_ratio=ratio,
            saved_bytes=self.saved_bytes,
            held_bytes=self.held_bytes,
            peak_bytes=self.peak_bytes,
        )


def measure(
    name: str, rows: int, length: int, rounds: int, methods: Sequence[str], mode: str | None
) -> Iterator[StepResult]:
    """Measures methods with a model in bfloat16, compiled if there is a mode, or captured."""
    model = build_model(name, lora_dropout=0.1).to(DEVICE, torch.bfloat16)
    if mode not in (None, CAPTURE):
        torch.compiler.reset()
        model = cast("nn.Module", torch.compile(model, mode=mode, dynamic=False))
    batch = {key: value.to(DEVICE) for key, value in build_batch(name, batch=rows, seq=length, image=32).items()}
    torch.cuda.synchronize()
    loaded = torch.cuda.memory_allocated()
    for method in methods:
        engine = ActivationEngine(model, DAFConfig(precision=METHODS[method], audit_every=None))
        plain, compressed = Steps(model, batch, None, loaded), Steps(model, batch, engine, loaded)
        plain.take()  # alone: nothing of the engine is allocated yet
        peak = plain.peak_bytes
        plain.seconds.clear()
        for number in range(SETTLING + rounds):
            if mode == CAPTURE and number == SETTLING:
                plain.capture()
                compressed.capture()
            plain.take()
            compressed.take()
        plain.peak_bytes, plain.saved_bytes, plain.held_bytes = peak, compressed.saved_bytes, compressed.saved_bytes
        engine.close()
        if method == methods[0]:
            yield plain.result(name, rows, length, "plain", plain)
        yield compressed.result(name, rows, length, method, plain)


def grid(results: Sequence[StepResult]) -> Grid:
    """Returns the results as a table, with times in milliseconds and bytes in MB of 10^6."""
    headings = ("model", "batch", "method", "host ms", "forward ms", "backward ms", "of plain", "held MB", "peak MB")
    rows = [
        (
            each.model,
            f"{each.rows} x {each.length}",
            each.method,
            *(f"{seconds * 1e3:.1f}" for seconds in (each.host, each.forward, each.backward)),
            f"{each.step_ratio:.2f}",
            *(megabytes(size, 0) for size in (each.held_bytes, each.peak_bytes)),
        )
        for each in results
    ]
    return Grid("training steps in bfloat16", headings, rows)


def parse_size(text: str) -> tuple[str, int, int]:
    """Returns a model, rows of its batches and tokens of each, written as ``roberta-base:32x128``."""
    model, _, batch = text.partition(":")
    rows, tokens = map(int, batch.split("x"))
    return model, rows, tokens


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a run; without a GPU it ends here."""
    parser = benchmark_parser(
        "gpu_steps", "Times training steps on a GPU.", "json", "markdown", rounds=15, threads=None
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, metavar="MODEL:ROWSxTOKENS")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--compile", choices=MODES, help="compile the whole model, in this mode")
    way.add_argument("--capture", action="store_const", const=CAPTURE, help="capture steps in CUDA graphs")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here; run it on a machine that has one")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes the files asked for."""
    options = parse_arguments(arguments)
    results = list[StepResult]()
    for name, rows, length in options.sizes:  # what is measured is there, also where the machine's time ends
        results += measure(name, rows, length, options.rounds, options.methods, options.compile or options.capture)
        write_results(options, {"steps": results}, [grid(results)], dtype="bf16", device=DEVICE)


if __name__ == "__main__":
    main()
