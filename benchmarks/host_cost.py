"""What DAF costs the host for each tensor that autograd saves, where kernels cost next to nothing.

Run ``python -m benchmarks.host_cost --json host_cost.json``. A RoBERTa of 12 layers and hidden size 64 takes 2 rows of
64 tokens, on one thread. The methods take their steps in turn in one process, each on a model of its own; what a method
costs is the median over rounds of its time less that of plain in the same round. Time is that of the processor, which
others on the machine change less. The tensors include parameters, which pass through.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.harness import benchmark_parser, write_results
from benchmarks.scaling import Size, build
from benchmarks.zoo.models import SEED
from daf_core import ActivationEngine, DAFConfig
from daf_core.config import Precision
from daf_integrations.cli.bench.tables import Grid

SIZE = Size(rows=2, length=64, layers=12)
WIDTH = 64
SHORTEST = 20
"""Tokens of the shortest row where each step has another length."""

SETTLING = 10
"""Steps in which readers are learned, kernels are loaded and the pool grows."""

PRECISIONS: dict[str, Precision] = {"daf-exact": "exact", "daf-4bit": 4}
METHODS = ("plain", "hooks", *PRECISIONS)
"""Hooks that do nothing but detach show what torch itself takes for a pair written in Python."""


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What a method adds to plain training.

    Attributes:
        lengths: "64", or "20 to 64" where each step has another one.
        method: The method.
        saved: Tensors that autograd saves in a step.
        forward_us: Microseconds a saved tensor in forward.
        backward_us: The same in backward.
        step_ratio: Time of a step over that of plain.
    """

    lengths: str
    method: str
    saved: int
    forward_us: float
    backward_us: float
    step_ratio: float


class Steps:
    """Training steps without an optimizer, of a model of their own."""

    def __init__(self, method: str) -> None:
        self._built = build(SIZE, WIDTH)
        self._method = method
        self.model: nn.Module = self._built.model
        self._engine: ActivationEngine | None = None
        if method in PRECISIONS:
            self._engine = ActivationEngine(self.model, DAFConfig(precision=PRECISIONS[method], packing="device"))

    def take(self, length: int) -> tuple[float, float]:
        """Returns the processor's seconds for forward and backward of a step with rows of so many tokens."""
        batch = {name: value[:, :length] if value.dim() == 2 else value for name, value in self._built.batch.items()}
        torch.manual_seed(SEED)
        started = time.process_time()
        with self._scope():
            loss: Tensor = self.model(**batch).loss
        between = time.process_time()
        loss.backward()
        ended = time.process_time()
        if self._engine is not None:
            self._engine.finish_step()
        return between - started, ended - between

    def _scope(self) -> AbstractContextManager[object]:
        if self._engine is not None:
            return self._engine.compress()
        return saved_tensors_hooks(Tensor.detach, lambda saved: saved) if self._method == "hooks" else nullcontext()

    def count_saved(self) -> int:
        """Returns how many tensors autograd saves."""
        saved: list[torch.Size] = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.shape)
            return tensor.detach()

        with saved_tensors_hooks(note, lambda kept: kept):
            self.model(**self._built.batch)
        return len(saved)


def measure(lengths: Sequence[int], name: str, rounds: int) -> list[HostCost]:
    """Measures all methods.

    Args:
        lengths: Tokens of a row, taken one after the other, again and again.
        name: What they are called.
        rounds: Rounds that count.
    """
    steps = {method: Steps(method) for method in METHODS}
    saved = steps["plain"].count_saved()
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for number in track(range(SETTLING + rounds), name, console=Console(stderr=True)):
        for method, each in steps.items():
            taken = each.take(lengths[number % len(lengths)])
            if number >= SETTLING:
                times[method].append(taken)
    return [_cost(method, name, times, saved) for method in METHODS if method != "plain"]


def _cost(method: str, lengths: str, times: Mapping[str, Sequence[tuple[float, float]]], saved: int) -> HostCost:
    pairs = list(zip(times[method], times["plain"], strict=True))
    added = [statistics.median(mine[phase] - plain[phase] for mine, plain in pairs) / saved * 1e6 for phase in (0, 1)]
    return HostCost(
        lengths=lengths,
        method=method,
        saved=saved,
        forward_us=added[0],
        backward_us=added[1],
        step_ratio=statistics.median(sum(mine) / sum(plain) for mine, plain in pairs),
    )


def grid(costs: Sequence[HostCost]) -> Grid:
    """Returns the table of what was measured."""
    headings = ["tokens", "method", "saved tensors", "forward us", "backward us", "step of plain"]
    return Grid("host cost of a saved tensor", headings, [_row(each) for each in costs])


def _row(cost: HostCost) -> list[str]:
    microseconds = [f"{cost.forward_us:.1f}", f"{cost.backward_us:.1f}"]
    return [cost.lengths, cost.method, f"{cost.saved}", *microseconds, f"{cost.step_ratio:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes the files asked for."""
    parser = benchmark_parser(
        "host_cost", "Times what a saved tensor costs the host.", "json", "markdown", rounds=100, threads=1
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    costs = measure([SIZE.length], f"{SIZE.length}", options.rounds)
    costs += measure([*range(SIZE.length, SHORTEST - 1, -1)], f"{SHORTEST} to {SIZE.length}", options.rounds)
    write_results(options, {"rounds": options.rounds, "results": costs}, [grid(costs)])


if __name__ == "__main__":
    main()
