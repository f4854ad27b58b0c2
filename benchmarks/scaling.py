"""What DAF costs as work grows: more rows, longer rows, more layers.

Run ``python -m benchmarks.scaling --json scaling.json --picture scaling.png``. At each size, the methods take their
steps in turn in one process, each on a model of its own; ratios are medians over rounds, each of them within a round.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import RobertaConfig, RobertaForSequenceClassification

from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from benchmarks.timing import time_in_turn
from benchmarks.zoo.models import SEED
from daf_integrations.cli.bench.methods import Method, open_method, traits
from daf_integrations.cli.bench.summary import LARGEST_ROUNDING, Gradients, paired_ratio, problem_of
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.bench.worker import TrainingStep, computed, fill_adapters
from daf_integrations.cli.workload import BuiltWorkload

METHODS = ("plain", "daf-exact", "daf-4bit", "daf-auto")
LONGEST = 2048
VOCABULARY = 1000


@dataclass(frozen=True, kw_only=True)
class Size:
    """A batch and the layers that it goes through."""

    rows: int = 8
    length: int = 128
    layers: int = 6


AXES: dict[str, tuple[Size, ...]] = {
    "rows": tuple(Size(rows=rows) for rows in (1, 2, 4, 8, 16, 32, 64)),
    "length": tuple(Size(rows=2, length=length) for length in (64, 128, 256, 512, 1024, LONGEST)),
    "layers": tuple(Size(layers=layers) for layers in (2, 4, 6, 12, 24)),
}
"""What grows; the rest stays as in `Size`, but for two rows where these grow longer."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one method took at one size."""

    axis: str
    size: Size
    method: str
    step_seconds: float
    step_ratio: float
    raw_bytes: int
    held_bytes: int
    seconds: list[float]


def build(size: Size, width: int) -> BuiltWorkload:
    """Returns an encoder with LoRA adapters, and a batch."""
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=LONGEST + 2,
        type_vocab_size=1,
    )
    torch.manual_seed(SEED)
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_dropout=0.1, target_modules=["query", "value"])
    model: nn.Module = get_peft_model(RobertaForSequenceClassification(config), lora)
    fill_adapters(model)
    tokens = torch.randint(4, VOCABULARY, (size.rows, size.length))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.zeros_like(tokens[:, 0])}
    return BuiltWorkload(model.train(), batch, None)


class Steps:
    """Training steps with one method."""

    def __init__(self, name: str, size: Size, width: int) -> None:
        self.sized = build(size, width)
        self.method: Method = open_method(name, self.sized.model)
        optimizer = AdamW([each for each in self.sized.model.parameters() if each.requires_grad], lr=0.0)
        self._step = TrainingStep(self.sized, optimizer, self.method, "fp32")
        for number in range(traits(name).settling):
            self._step.run(SEED + number)
        self.take = partial(self._step.timed_run, SEED)

    def computed(self) -> Gradients:
        """Returns what a step computes."""
        found = computed(self.sized.model, self._step.run(SEED))
        return Gradients(found["loss"], found["gradients"])

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the loss of a batch."""
        return self._step.loss_of(batch)


def measure(axis: str, size: Size, width: int, rounds: int, methods: Sequence[str] = METHODS) -> list[Point]:
    """Measures all methods at one size.

    Raises:
        ArithmeticError: What a method computes is wrong.
    """
    steps = {name: Steps(name, size, width) for name in methods}
    plain = steps["plain"].computed()
    for name, each in steps.items():
        problem = problem_of(name, each.computed(), plain, LARGEST_ROUNDING)
        if problem is not None:
            raise ArithmeticError(f"{name} is wrong at {size}, so that no time of it is shown: {problem}")
    seconds = time_in_turn({name: each.take for name, each in steps.items()}, rounds)
    points: list[Point] = []
    for name, each in steps.items():
        stored = each.method.stored(each.sized.batch, each.loss_of)
        each.method.close()
        points.append(
            Point(
                axis=axis,
                size=size,
                method=name,
                step_seconds=statistics.median(seconds[name]),
                step_ratio=paired_ratio(seconds[name], seconds["plain"]),
                raw_bytes=stored.raw_bytes,
                held_bytes=stored.held_bytes,
                seconds=seconds[name],
            )
        )
    return points


def grid(axis: str, points: Sequence[Point]) -> Grid:
    """Returns time and bytes relative to plain, with a row for each size."""
    methods = [method for method in dict.fromkeys(point.method for point in points) if method != "plain"]
    figures = [f"{name} {figure}" for figure in ("time", "held") for name in methods]
    headings = [axis, "plain s", "plain MB", *figures]
    rows: list[list[str]] = []
    for size in AXES[axis]:
        at = {point.method: point for point in points if point.axis == axis and point.size == size}
        if not at:
            continue
        plain = at["plain"]
        times = [f"{at[name].step_ratio:.2f}" for name in methods]
        held = [f"{at[name].held_bytes / plain.held_bytes:.3f}" for name in methods]
        first = [f"{getattr(size, axis)}", f"{plain.step_seconds:.3f}", megabytes(plain.held_bytes)]
        rows.append([*first, *times, *held])
    return Grid(f"by {axis}", headings, rows)


def draw(points: Sequence[Point], file: Path) -> None:
    """Draws time and bytes relative to plain over what grows."""
    from matplotlib.figure import Figure  # not with every installation

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = list(dict.fromkeys(point.axis for point in points))
    panels = figure.subplots(2, len(axes), sharey="row", squeeze=False)
    for column, axis in enumerate(axes):
        here = [point for point in points if point.axis == axis]
        plain = {point.size: point for point in here if point.method == "plain"}
        for method in dict.fromkeys(point.method for point in here if point.method != "plain"):
            mine = [point for point in here if point.method == method]
            sizes = [getattr(point.size, axis) for point in mine]
            panels[0][column].plot(sizes, [point.step_ratio for point in mine], marker="o", label=method)
            held = [point.held_bytes / plain[point.size].held_bytes for point in mine]
            panels[1][column].plot(sizes, held, marker="o", label=method)
        for row in panels:
            row[column].set_xscale("log", base=2)
            row[column].grid(alpha=0.3)
        panels[1][column].set_xlabel(axis)
    panels[0][0].set_ylabel("step time of plain")
    panels[1][0].set_ylabel("activations held of plain")
    for row in panels:
        row[0].set_ylim(bottom=0)
    panels[0][0].legend()
    figure.savefig(file, dpi=144)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes the files asked for."""
    parser = benchmark_parser("scaling", "Times steps as work grows.", "json", "markdown", "picture", rounds=5)
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES), help="what grows")
    parser.add_argument("--largest", type=whole_number(1), default=LONGEST, help="leave larger sizes out")
    parser.add_argument("--width", type=whole_number(1), default=256, help="hidden size of the encoder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes = [(axis, size) for axis in options.axes for size in AXES[axis] if getattr(size, axis) <= options.largest]
    points: list[Point] = []
    for axis, size in track(sizes, "sizes", console=Console(stderr=True)):
        points += measure(axis, size, options.width, options.rounds)
    if options.picture:
        draw(points, options.picture)
    settings = {name: getattr(options, name) for name in ("width", "rounds", "axes", "largest")}
    grids = [grid(axis, points) for axis in options.axes]
    write_results(options, {"points": points, "settings": settings}, grids)


if __name__ == "__main__":
    main()
