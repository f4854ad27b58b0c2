"""Times how the minimum and the maximum of groups are found on a GPU, by strategy and with torch.

Run ``python -m benchmarks.reductions --json reductions.json --markdown reductions.md``. Every round runs all strategies
once, each alone and with nothing in the device's cache; ratios are taken within rounds. Rates are bytes of the tensor
per second, which are read once.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import benchmark_parser, whole_number, write_results
from benchmarks.timing import CudaTimer, Timer, time_in_turn
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STRATEGIES = ("fused", "parallel", "atomic")
TORCH = ("amin and amax", "aminmax")
GROUPS = (64, 256, 1000, 4096, 8192, 1 << 16, 1 << 20, 1 << 24)
"""Elements of a group: of the codec's, around where a strategy ends, and of whole activations."""

ELEMENTS = (1 << 20, 1 << 24, 1 << 27)
WARM_UP = 3
DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class RangeResult:
    """Rates of one problem, in bytes of the tensor per second.

    ``rates`` has the strategies that such groups have and the two ways of torch; ``copy_rate`` counts what a copy reads
    and writes. ``rule`` is the strategy taken where nothing is measured, ``best`` the fastest one, ``speedup`` how many
    times as long the faster way of torch took as that in the same round.
    """

    group: int
    groups: int
    dtype: str
    copy_rate: float
    rates: dict[str, float]
    rule: str
    best: str
    speedup: float


def measure(values: Tensor, group: int, timer: Timer, rounds: int) -> RangeResult:
    """Times a copy, all strategies and torch in turn.

    Args:
        values: Dense floats; what is beyond whole groups is left out.
        group: Elements of a group.
        timer: Times a call.
        rounds: Rounds that count.
    """
    from daf_kernels.triton.reduction import strategies  # Triton is there with a GPU, or on Linux

    values = values.view(-1)[: values.numel() // group * group]
    known = strategies(group)
    calls, target = _calls(values, group, known), torch.empty_like(values)
    actions = {name: partial(timer, call) for name, call in calls.items()}
    seconds = time_in_turn({"copy": lambda: timer(lambda: target.copy_(values)), **actions}, rounds, WARM_UP)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best, rival = (min(names, key=medians.__getitem__) for names in (known, TORCH))
    return RangeResult(
        group=group,
        groups=values.numel() // group,
        dtype=str(values.dtype).removeprefix("torch."),
        copy_rate=2 * values.nbytes / medians["copy"],
        rates={name: values.nbytes / medians[name] for name in calls},
        rule=known[0],
        best=best,
        speedup=paired_ratio(seconds[rival], seconds[best]),
    )


def grid(results: Sequence[RangeResult]) -> Grid:
    """Returns the rates in GB (10^9 bytes) per second."""
    headings = ("dtype", "group", "groups", "copy moves GB/s", *(f"{name} GB/s" for name in (*STRATEGIES, *TORCH)))
    return Grid("ranges of groups", (*headings, "rule", "best", "best, of torch"), [*map(_row, results)])


def problems(options: argparse.Namespace) -> Iterator[tuple[Tensor, int]]:
    """Gives tensors and the groups in them."""
    for name in options.dtypes:
        for elements in options.elements:
            values = torch.randn(elements, device=DEVICE).to(DTYPES[name])
            yield from ((values, group) for group in options.groups if group <= elements)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a run; without a GPU it ends here."""
    description = "Times how ranges of groups are found on a GPU."
    parser = benchmark_parser("reductions", description, "json", "markdown", rounds=11, threads=None)
    parser.add_argument("--groups", type=whole_number(1), nargs="+", default=GROUPS, help="elements of a group")
    parser.add_argument("--elements", type=whole_number(1), nargs="+", default=ELEMENTS, help="of the tensor")
    parser.add_argument("--dtypes", choices=tuple(DTYPES), nargs="+", default=("bf16", "fp32"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here, and these strategies are for GPUs; run it on a machine that has one")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes the files asked for."""
    options = parse_arguments(arguments)
    timer = CudaTimer(ahead=True)
    results = [measure(values, group, timer, options.rounds) for values, group in problems(options)]
    write_results(options, {"ranges": results}, [grid(results)], dtype=" ".join(options.dtypes), device=DEVICE)


def _calls(values: Tensor, group: int, known: Sequence[str]) -> dict[str, Callable[[], object]]:
    from daf_kernels.triton.reduction import group_ranges

    rows = values.view(-1, group)
    return {
        **{strategy: partial(group_ranges, values, group, strategy) for strategy in known},
        TORCH[0]: lambda: (rows.amin(1), rows.amax(1)),
        TORCH[1]: lambda: rows.aminmax(dim=1),
    }


def _row(result: RangeResult) -> list[str]:
    rates = (result.rates.get(name) for name in (*STRATEGIES, *TORCH))
    return [
        result.dtype,
        f"{result.group:,}",
        f"{result.groups:,}",
        f"{result.copy_rate / 1e9:.1f}",
        *("" if rate is None else f"{rate / 1e9:.1f}" for rate in rates),
        result.rule,
        result.best,
        f"{result.speedup:.1f}",
    ]


if __name__ == "__main__":
    main()
