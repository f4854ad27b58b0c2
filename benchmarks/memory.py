"""Measures the memory pool and its pager: fragmentation, the cost of lowering a precision, growth.

Run ``python -m benchmarks.memory --data ../shared/data/glue --json memory.json --picture memory.png``.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.finetune import MissingEncoderError, Recipe, build_encoder, load_splits, training_batches
from benchmarks.harness import MEGABYTE, benchmark_parser, megabytes, whole_number, write_results
from daf_core import ActivationBudgetError, ActivationEngine, DAFConfig
from daf_core.codecs.plane_importance import plane_importances, rounding_errors
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_integrations.cli.bench.tables import Grid
from daf_kernels import PRECISIONS, PlaneLayout, plane_layout, planes_for
from daf_kernels.layout import BLOCK, HEADER_BYTES
from tests.core.books import check_pager

CPU = torch.device("cpu")
DEFAULT_DATA = Path("../shared/data/glue")
ROW = 768
SMALLEST, LARGEST = 1 << 10, 1 << 24  # elements of float32: 4 kB to 64 MB
COUNTED = 1 << 16  # elements from which the payload is counted: 256 kB
SEVERAL = 10
STRESS_BUDGET = 64 << 20
MOST_LIVE = 200


@dataclass(frozen=True, kw_only=True)
class Stress:
    """What a random trace of encodes and releases came to.

    ``mean_payload`` is the share of the pages of activations over 256 kB that held codes and headers, on average over
    the actions; ``least_payload`` the same at the worst moment at which ten of them were there. ``refused`` requests
    did not fit even at precision 0; ``refused_with_room`` are those of them for which enough pages were free, which
    must be none.
    """

    actions: int
    encodes: int
    dropped_planes: int
    least_payload: float
    mean_payload: float
    refused: int
    refused_with_room: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a pool grew to over the steps of a trace: peaks of bytes in use and reserved, and planes dropped."""

    task: str
    growth: str
    budget: int | None
    steps: int
    used_bytes: list[int]
    reserved_bytes: list[int]
    dropped_planes: int

    @property
    def overhead(self) -> float:
        """Reserved over used bytes at the peak."""
        return max(self.reserved_bytes) / max(self.used_bytes)


def stress(actions: int, seed: int = 0) -> Stress:
    """Leases and releases activations of random sizes and precisions, and checks the books after every action.

    Nothing is encoded: this is about pages. Activations have 4 kB to 64 MB of float32, evenly over the logarithm.
    """
    numbers = random.Random(seed)
    pager = Pager(PagePool(CPU), STRESS_BUDGET)
    live: list[tuple[Lease, PlaneLayout]] = []
    payloads: list[float] = []
    encodes = refused = refused_with_room = 0
    for _ in track(range(actions), "stress", console=Console(stderr=True)):
        if live and (len(live) >= MOST_LIVE or numbers.random() < 0.45):
            pager.release(live.pop(numbers.randrange(len(live)))[0])
        else:
            encodes += 1
            elements = int(SMALLEST * (LARGEST / SMALLEST) ** numbers.random())
            layout = plane_layout(elements, ROW, PAGE_BYTES)
            least = pager.settle() + layout.pages(0) * PAGE_BYTES
            try:
                live.append((_lease(pager, layout, numbers), layout))
            except ActivationBudgetError:
                refused += 1
                refused_with_room += least <= STRESS_BUDGET
        check_pager(pager)
        large = [(lease, layout) for lease, layout in live if layout.elements > COUNTED]
        if len(large) >= SEVERAL:
            payloads.append(_payload(large))
    dropped = pager.finish_step().dropped_planes
    return Stress(
        actions=actions,
        encodes=encodes,
        dropped_planes=dropped,
        least_payload=min(payloads),
        mean_payload=statistics.fmean(payloads),
        refused=refused,
        refused_with_room=refused_with_room,
    )


def lowering_seconds(rounds: int = 200) -> float:
    """Returns the median time of lowering a 64 MB activation from precision 8 to 2."""
    layout = plane_layout(LARGEST, ROW, PAGE_BYTES)
    seconds: list[float] = []
    for number in range(rounds):
        pager = Pager(PagePool(CPU))
        lease = _lease(pager, layout, random.Random(number), precision=8)
        kept = lease.pages[: layout.pages(2)].copy()
        started = time.perf_counter()
        pager.set_budget(layout.pages(2) * PAGE_BYTES)
        seconds.append(time.perf_counter() - started)
        if lease.planes != planes_for(2) or lease.pages.tolist() != kept.tolist():
            raise AssertionError("lowering the precision must give up the last two planes and move nothing")
        pager.release(lease)
    return statistics.median(seconds)


def grow(task: str, growth: str, budget: int | None, data: Path, steps: int) -> Growth:
    """Trains the encoder on batches of a task and follows what its pool uses and reserves."""
    model = build_encoder(seed=0)
    engine = ActivationEngine(model, DAFConfig(pool_growth=growth, memory_budget=budget))
    rows = load_splits(data / task)["train"]
    used: list[int] = []
    reserved: list[int] = []
    dropped = 0
    for batch in track(_batches(rows, steps), f"{task}, {growth}", total=steps, console=Console(stderr=True)):
        with engine.compress():
            loss = model(**batch).loss
        reserved.append(engine.reserved_bytes)
        used.append(engine.leased_pages * PAGE_BYTES)
        loss.backward()
        dropped += engine.finish_step().dropped_planes
    engine.close()
    return Growth(
        task=task,
        growth=growth,
        budget=budget,
        steps=steps,
        used_bytes=used,
        reserved_bytes=reserved,
        dropped_planes=dropped,
    )


def compare_growths(data: Path, steps: int) -> list[Growth]:
    """Runs each task with both growths: without a budget, and with one that is half of what the task would use."""
    results: list[Growth] = []
    for task in ("sst2", "mrpc"):
        free = [grow(task, growth, None, data, steps) for growth in ("adaptive", "100MB")]
        budget = max(free[0].used_bytes) // 2
        results += [*free, *(grow(task, growth, budget, data, steps) for growth in ("adaptive", "100MB"))]
    return results


def growth_grid(results: Sequence[Growth]) -> Grid:
    """Returns the figures of the traces; sizes in MB of 10^6 bytes."""
    headings = ("task", "growth", "budget MB", "used MB", "reserved MB", "reserved / used", "planes dropped")
    rows = [
        (
            *(each.task, each.growth, "" if each.budget is None else megabytes(each.budget)),
            *(megabytes(max(sizes)) for sizes in (each.used_bytes, each.reserved_bytes)),
            *(f"{each.overhead:.2f}", f"{each.dropped_planes:,}"),
        )
        for each in results
    ]
    return Grid("growth of the pool", headings, rows)


def draw(results: Sequence[Growth], path: Path) -> None:
    """Draws used and reserved bytes over the steps of each trace without a budget."""
    from matplotlib.figure import Figure

    free = [result for result in results if result.budget is None]
    tasks = sorted({result.task for result in free})
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for result in (result for result in free if result.task == task):
            steps = range(1, result.steps + 1)
            if result.growth == "adaptive":
                axes.bar(steps, [size / MEGABYTE for size in result.used_bytes], color="#9ecae1", label="in use")
            axes.step(
                steps,
                [size / MEGABYTE for size in result.reserved_bytes],
                where="mid",
                label=f"reserved, {result.growth}",
            )
        axes.set(title=task, xlabel="step", ylabel="MB")
        axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all measurements, prints them and writes what was asked for."""
    parser = benchmark_parser("memory", "Measures the memory pool.", "json", "picture", threads=None)
    parser.add_argument("--actions", type=whole_number(10), default=200_000, help="encodes and releases of the stress")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with the tasks sst2 and mrpc")
    parser.add_argument("--steps", type=whole_number(2), default=60, help="training steps of each trace")
    options = parser.parse_args(arguments)
    console = Console()
    stressed = stress(options.actions)
    console.print(stressed)
    lowering = lowering_seconds()
    console.print(f"64 MB from precision 8 to 2: {lowering * 1e6:.0f} microseconds")
    try:
        growths = compare_growths(options.data, options.steps)
    except (MissingEncoderError, FileNotFoundError) as error:
        raise SystemExit(f"{error}") from error
    if options.picture:
        draw(growths, options.picture)
    content = {"stress": stressed, "lowering_seconds": lowering, "growth": growths}
    write_results(options, content, [growth_grid(growths)])


def _lease(pager: Pager, layout: PlaneLayout, numbers: random.Random, precision: int | None = None) -> Lease:
    planes = planes_for(precision or numbers.choice(PRECISIONS))
    pages = [layout.plane_pages(plane) for plane in range(planes)]
    errors = rounding_errors(numbers.uniform(12, 60), layout.elements)
    importances = plane_importances(errors, [PAGE_BYTES * count for count in pages])
    with pager.writing(layout.header_pages, pages, importances) as lease:
        return lease


def _payload(leases: Sequence[tuple[Lease, PlaneLayout]]) -> float:
    filled = sum(
        layout.groups * HEADER_BYTES + layout.blocks * BLOCK * (0, *PRECISIONS)[lease.planes] // 8
        for lease, layout in leases
    )
    return filled / sum(lease.size * PAGE_BYTES for lease, _ in leases)


def _batches(rows: Sequence[dict[str, object]], steps: int) -> Iterator[dict[str, torch.Tensor]]:
    batches = training_batches(rows, Recipe(), seed=0)
    return (next(batches) for _ in range(steps))


if __name__ == "__main__":
    main()
