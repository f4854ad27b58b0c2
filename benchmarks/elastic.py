"""What elastic training saves: cuts as predicted and as measured, and the mean step within a share of the time.

Run ``python -m benchmarks.elastic --json docs/results/elastic.json``. In every round each kind of step runs once, on a
model of its own: plain training, and training with the lowest blocks cut off or within a share of the time. Ratios of
cuts are medians of rounds; that of a share is of sums, with the steps that measure at the beginning.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from benchmarks.timing import time_in_turn
from benchmarks.zoo.models import build_batch, build_model
from daf_core import ActivationEngine, DAFConfig, ElasticConfig
from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.schedule import Choice, StepSchedule
from daf_core.elastic.training import ElasticTraining
from daf_core.elastic.units import Units
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid

CUTS = (0.25, 0.5, 0.75)
"""Parts of the blocks that are cut off, from the input on."""

SETTLING = 8
"""Steps in which costs are learned before cuts are predicted."""

SHAPES = {"roberta-base": (8, 128), "tiny": (8, 64)}
"""Rows of a batch and tokens of a row."""

DEFAULT_SHARES = {"lora": 0.6, "whole": None}
"""Shares of the time: what is asked with adapters, and DAF's default for models that are trained as a whole."""


@dataclass(frozen=True, kw_only=True)
class CutResult:
    """Steps that train the blocks above a cut.

    ``ratio`` is to steps that train everything, with activations kept exactly as well.
    """

    cut: float
    predicted_share: float
    ratio: float
    predicted_bytes: int
    held_bytes: int
    seconds: list[float]
    whole_seconds: list[float]


@dataclass(frozen=True, kw_only=True)
class ShareResult:
    """Steps within a share of the time.

    Bytes are the most, and the mean over steps.
    """

    kind: str
    precision: str
    time: float | None
    ratio: float
    seconds: list[float]
    plain_seconds: list[float]
    most_bytes: int
    mean_bytes: float


class ForcedCourse(StepSchedule):
    """Has a step train what it is told to; `forced` None leaves it to the course."""

    def __init__(self, units: Units, costs: StepCosts, config: ElasticConfig) -> None:
        super().__init__(units, costs, config)
        self.units, self.costs = units, costs
        self.forced: frozenset[int] | None = None

    def choose(self) -> Choice:
        return super().choose() if self.forced is None else Choice(self.forced, False, False)

    def finish(self, choice: Choice, times: StepTimes | None, gains: Sequence[float] | None) -> bool:
        return False if self.forced is not None else super().finish(choice, times, gains)


class Trained:
    """A model in training, with DAF or without.

    Args:
        model: The model.
        batch: Its batch, the same in every step.
        config: How; None for plain training.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], config: DAFConfig | None) -> None:
        self._model, self._batch = model, batch
        self._optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
        self._engine = None if config is None else ActivationEngine(model, config)
        self.courses: list[ForcedCourse] = []
        self._elastic: ElasticTraining | None = None
        if self._engine is not None and config is not None and config.elastic is not None:
            self._elastic = ElasticTraining(model, model, self._engine, config.elastic, self._course)
        self.held: list[int] = []

    def step(self) -> float:
        """Trains a step, and returns its seconds."""
        start = time.perf_counter()
        if self._elastic is not None:
            self._elastic.begin_step()
        holding = nullcontext() if self._elastic is None else self._elastic.holding()
        with holding, nullcontext() if self._engine is None else self._engine.compress():
            loss = self._model(**self._batch).loss
        loss.backward()
        if self._elastic is not None:
            self._elastic.before_update([self._optimizer])
        self._optimizer.step()
        if self._elastic is not None:
            self._elastic.finish_step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if self._engine is not None:
            self.held.append(self._engine.finish_step().held_bytes)
        return seconds

    def close(self) -> None:
        """Makes the model what it was."""
        if self._elastic is not None:
            self._elastic.close()
        if self._engine is not None:
            self._engine.close()

    def _course(self, units: Units, costs: StepCosts, config: ElasticConfig) -> ForcedCourse:
        self.courses.append(ForcedCourse(units, costs, config))
        return self.courses[-1]


def measure_cuts(name: str, rounds: int, advance: Callable[[], None]) -> list[CutResult]:
    """Predicts steps with the lowest blocks cut off, and measures them in turn with steps that train everything."""
    rows, length = SHAPES[name]
    model, batch = build_model(name, lora_dropout=0.1), build_batch(name, batch=rows, seq=length, image=0)
    trained = Trained(model, batch, DAFConfig(precision="exact", elastic=ElasticConfig(time=0.6)))
    for _ in range(SETTLING):
        trained.step()
    course = trained.courses[-1]
    depths = {cut: round(cut * len(course.units.blocks)) for cut in (0.0, *CUTS)}
    selected = {
        cut: frozenset(number for number in course.units.everything if course.units.units[number].stage >= depth)
        for cut, depth in depths.items()
    }
    shares = {cut: course.costs.share(on) for cut, on in selected.items()}
    predicted = {cut: course.costs.held(depth) for cut, depth in depths.items()}
    held: dict[float, int] = {}

    def run(cut: float) -> float:
        course.forced = selected[cut]
        seconds = trained.step()
        held[cut] = trained.held[-1]
        advance()
        return seconds

    seconds = time_in_turn({str(cut): lambda cut=cut: run(cut) for cut in depths}, rounds)
    trained.close()
    return [
        CutResult(
            cut=cut,
            predicted_share=shares[cut],
            ratio=paired_ratio(seconds[str(cut)], seconds["0.0"]),
            predicted_bytes=int(predicted[cut]),
            held_bytes=held[cut],
            seconds=seconds[str(cut)],
            whole_seconds=seconds["0.0"],
        )
        for cut in CUTS
    ]


def measure_share(
    name: str, kind: str, share: float | None, rounds: int, advance: Callable[[], None]
) -> list[ShareResult]:
    """Trains within a share of the time, exactly and at 4 bits, in turn with plain training and with 4 bits alone."""
    rows, length = SHAPES[name]
    model, batch = build_model(name, lora_dropout=0.1), build_batch(name, batch=rows, seq=length, image=0)
    if kind == "whole":
        model.requires_grad_(True)
    elastic = ElasticConfig(time=share)
    configs: dict[str, DAFConfig | None] = {
        "plain": None,
        "exact": DAFConfig(precision="exact"),
        "exact, elastic": DAFConfig(precision="exact", elastic=elastic),
    }
    if kind == "lora":
        configs["4 bits"] = DAFConfig(precision=4)
        configs["4 bits, elastic"] = DAFConfig(precision=4, elastic=elastic)
    trained = {label: Trained(copy.deepcopy(model), batch, config) for label, config in configs.items()}

    def run(label: str) -> float:
        seconds = trained[label].step()
        advance()
        return seconds

    seconds = time_in_turn({label: lambda label=label: run(label) for label in configs}, rounds, warm_up=0)
    results = []
    for label, one in trained.items():
        one.close()
        if one.held:
            results.append(
                ShareResult(
                    kind=kind,
                    precision=label,
                    time=one.courses[-1].target if one.courses else None,
                    ratio=sum(seconds[label]) / sum(seconds["plain"]),
                    seconds=seconds[label],
                    plain_seconds=seconds["plain"],
                    most_bytes=max(one.held),
                    mean_bytes=statistics.fmean(one.held),
                )
            )
    return results


def tables(name: str, cuts: Sequence[CutResult], shares: Sequence[ShareResult]) -> list[Grid]:
    """Returns both results as tables."""
    headings = ("lowest blocks cut off", "predicted share", "measured", "predicted MB", "measured MB", "step s")
    rows = [
        (
            f"{each.cut:.0%}",
            f"{each.predicted_share:.3f}",
            f"{each.ratio:.3f}",
            megabytes(each.predicted_bytes),
            megabytes(each.held_bytes),
            f"{statistics.median(each.seconds):.3f}",
        )
        for each in cuts
    ]
    grids = [Grid(f"{name} with LoRA, cuts", headings, rows)] if rows else []
    headings = ("trained", "activations", "time asked", "mean step of plain's", "most MB", "mean MB")
    rows = [
        (
            each.kind,
            each.precision,
            "-" if each.time is None else f"{each.time:.2f}",
            f"{each.ratio:.3f}",
            megabytes(each.most_bytes),
            megabytes(each.mean_bytes),
        )
        for each in shares
    ]
    return [*grids, Grid(f"{name}, {len(shares[0].seconds)} steps in turn", headings, rows)] if shares else grids


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes its JSON file."""
    parser = benchmark_parser("elastic", "Trains parts of a model.", "json", rounds=11)
    parser.add_argument("--model", choices=tuple(SHAPES), default="roberta-base", help="tiny is for smoke tests")
    parser.add_argument("--steps", type=whole_number(1), default=60, help="steps within a share of the time")
    parser.add_argument("--kind", choices=tuple(DEFAULT_SHARES), action="append", help="repeatable; what is trained")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kinds = options.kind or tuple(DEFAULT_SHARES)
    cuts: list[CutResult] = []
    shares: list[ShareResult] = []
    with Progress(console=Console(stderr=True)) as progress:
        if "lora" in kinds:
            bar = progress.add_task("cuts", total=(options.rounds + 1) * (1 + len(CUTS)))
            cuts = measure_cuts(options.model, options.rounds, partial(progress.advance, bar))
        for kind in kinds:
            bar = progress.add_task(kind, total=options.steps * (5 if kind == "lora" else 3))
            advance = partial(progress.advance, bar)
            shares += measure_share(options.model, kind, DEFAULT_SHARES[kind], options.steps, advance)
    write_results(options, {"cuts": cuts, "shares": shares}, tables(options.model, cuts, shares))


if __name__ == "__main__":
    main()
