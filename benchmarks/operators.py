"""Measures the exact rewrites of operators: memory and time of a training step, and the difference of its gradient.

Run ``python -m benchmarks.operators --json operators.json``, with tcmalloc in LD_PRELOAD.
Every round takes one step with each set of rewrites; ratios of time are taken within rounds. Bytes are those of tensors
beside the model: *held* when the forward pass ends, *peak* the most at once in the step.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import benchmark_parser, megabytes, write_results
from benchmarks.timing import time_in_turn, wall_timer
from benchmarks.zoo.models import SEED, build_batch, build_model
from daf_core import ActivationEngine, DAFConfig
from daf_core.plan.observe.meter import TensorMeter
from daf_core.rewrites.registry import OperatorRewrites
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid, terminal_table

SHAPES = {
    "gpt2": (2, 512),
    "gpt2-medium": (2, 512),
    "llama": (2, 512),
    "roberta-base": (8, 128),
    "resnet18": (8, 1),
    "tiny": (8, 64),
}
SMALLEST_SHARE = 0.01
IMAGE = 64


@dataclass(frozen=True, kw_only=True)
class OperatorsResult:
    """One model's step with and without its rewrites; ``rewrites`` counts the modules of each kind.

    ``cpu_ratio`` is that of the processor time of all threads, which other processes on the machine disturb less.
    """

    model: str
    batch: int
    seq: int
    rewrites: dict[str, int]
    plain_held_bytes: int
    held_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    plain_seconds: float
    time_ratio: float
    cpu_ratio: float
    gradient_error: float
    rounds: dict[str, list[float]]


def measure(name: str, rounds: int) -> OperatorsResult:
    """Measures one of the models on a random batch."""
    batch, seq = SHAPES[name]
    model = build_model(name, lora_dropout=0.1)
    inputs = build_batch(name, batch=batch, seq=seq, image=IMAGE)
    rewrites = OperatorRewrites(model)
    step = partial(take_step, model, inputs)
    plain_held, plain_peak = memory(model, inputs)
    exact = gradient(model, step)
    with applied(rewrites):
        held, peak = memory(model, inputs)
        found = gradient(model, step)
    cpu: dict[str, list[float]] = {"plain": [], "rewritten": []}
    seconds = time_in_turn(
        {
            "plain": partial(timed, step, cpu["plain"]),
            "rewritten": partial(rewritten, rewrites, step, cpu["rewritten"]),
        },
        rounds,
    )
    return OperatorsResult(
        model=name,
        batch=batch,
        seq=seq,
        rewrites=dict(Counter(kind for kind, _, _ in rewrites.steps)),
        plain_held_bytes=plain_held,
        held_bytes=held,
        plain_peak_bytes=plain_peak,
        peak_bytes=peak,
        plain_seconds=min(seconds["plain"]),
        time_ratio=paired_ratio(seconds["rewritten"], seconds["plain"]),
        cpu_ratio=paired_ratio(cpu["rewritten"][1:], cpu["plain"][1:]),
        gradient_error=float((found - exact).norm() / exact.norm()),
        rounds=seconds,
    )


def take_step(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Computes the gradient, with the same dropout each time."""
    model.zero_grad()
    torch.manual_seed(SEED)
    model(**inputs).loss.backward()


def memory(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """Returns the bytes that are held when the forward pass ends, and the peak of the step."""
    model.zero_grad()
    with TensorMeter() as meter:
        loss = model(**inputs).loss
        held = meter.level
        loss.backward()
        return held, meter.take_peak()


def gradient(model: nn.Module, step: Callable[[], None]) -> Tensor:
    """Returns the gradient of a step as one vector."""
    step()
    return torch.cat([tensor.grad.flatten() for tensor in model.parameters() if tensor.grad is not None])


def timed(step: Callable[[], None], cpu: list[float]) -> float:
    """Returns the seconds of a step, and notes those of the processors."""
    started = time.process_time()
    taken = wall_timer(step)
    cpu.append(time.process_time() - started)
    return taken


def rewritten(rewrites: OperatorRewrites, step: Callable[[], None], cpu: list[float]) -> float:
    """Does the same for a step with rewrites."""
    with applied(rewrites):
        return timed(step, cpu)


@contextmanager
def applied(rewrites: OperatorRewrites) -> Iterator[None]:
    """Applies rewrites inside."""
    rewrites.apply()
    try:
        yield
    finally:
        rewrites.undo()


def result_grid(results: Sequence[OperatorsResult]) -> Grid:
    """Returns the figures; sizes in MB of 10^6 bytes."""
    headings = ("model", "held MB", "rewritten", "peak MB", "rewritten", "share", "time", "processor time", "error")
    rows = [
        (
            f"{each.model}, {each.batch} x {each.seq}",
            *(megabytes(size, 0) for size in (each.plain_held_bytes, each.held_bytes)),
            *(megabytes(size, 0) for size in (each.plain_peak_bytes, each.peak_bytes)),
            f"{each.peak_bytes / each.plain_peak_bytes:.2f}",
            *(f"{each.time_ratio:.2f}", f"{each.cpu_ratio:.2f}", f"{each.gradient_error:.0e}"),
        )
        for each in results
    ]
    return Grid("a step with exact rewrites", headings, rows)


def census_grid(name: str) -> Grid:
    """Returns the bytes that autograd saves in a step of one of the models, but for operators with less than 1%."""
    batch, seq = SHAPES[name]
    model = build_model(name, lora_dropout=0.1)
    kinds = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    inputs = build_batch(name, batch=batch, seq=seq, image=IMAGE)
    engine = ActivationEngine(model, DAFConfig(precision="exact", packing="device"))
    with engine.itemized() as items, engine.compress():
        loss = model(**inputs).loss
    items.name_operators(loss)
    counts: Counter[tuple[str, str]] = Counter()
    for item in items.at_peak():
        counts[kinds[item.site.module], item.operator.removesuffix("Backward0")] += item.raw_bytes
    engine.close()
    total = counts.total()
    rows = [
        (*place, megabytes(size), f"{size / total:.0%}")
        for place, size in counts.most_common()
        if size >= SMALLEST_SHARE * total
    ]
    title = f"{name}, {batch} x {seq}: {megabytes(total, 0)} MB saved"
    return Grid(title, ("module", "operator", "MB", "share"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes its JSON file."""
    parser = benchmark_parser("operators", "Measures the exact rewrites of operators.", "json", rounds=5)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=["gpt2", "llama", "roberta-base"])
    parser.add_argument("--census", action="store_true", help="show what autograd saves, by operator, and end")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.census:
        for name in options.models:
            Console().print(terminal_table(census_grid(name)))
        return
    results = [measure(name, options.rounds) for name in options.models]
    write_results(options, {"operators": results}, [result_grid(results)])


if __name__ == "__main__":
    main()
