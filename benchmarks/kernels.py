"""Times the kernels alone against a plain copy of the same tensor and against the same codec in torch operations.

Run ``python -m benchmarks.kernels --json kernels.json``, on a GPU with ``--device cuda``. Every round times the copy,
the kernels and torch in turn; ratios are taken within rounds. Rates are bytes of the uncompressed tensor per second. On
a GPU every call is timed twice: whole, as a caller sees it, and its kernels alone, whose rates are also given as bytes
that have to be moved per second, those of a copy being twice the tensor's.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import reductions, torch_codec
from benchmarks.harness import benchmark_parser, usable_device, whole_number, write_results
from benchmarks.timing import CudaTimer, Timer, time_in_turn, wall_timer
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_integrations.cli.bench.summary import paired_ratio
from daf_integrations.cli.bench.tables import Grid
from daf_kernels import PRECISIONS, Backend, FixedPages, PlaneLayout, load_backend, plane_layout, planes_for
from daf_kernels.backend import bits_of_elements
from daf_kernels.layout import BLOCK, COLUMNS, HEADER_BYTES, PLANE_WIDTHS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = (768, 128, 64)
GROUPS = (256, 1 << 16)
"""Elements of groups whose ranges are found on a GPU: one of the codec's, and one as large as a small activation."""

GPU_WARM_UP = 3
"""Rounds before those that count: the first compiles and measures which kernels to take."""

Calls = tuple[Callable[[], object], Callable[[], object]]
"""An encoding, and a decoding of what it gave."""


@dataclass(frozen=True, kw_only=True)
class TensorKind:
    """One kind of encoding of one tensor.

    ``rivals`` are the same in torch operations, by name; ``coded_bytes`` what is written when encoding.
    """

    name: str
    row: int
    calls: Calls
    coded_bytes: int
    rivals: Mapping[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """How calls are timed: whole, and, on a GPU, their kernels alone; ``kernels_of`` gives those."""

    call: Timer = wall_timer
    alone: Timer | None = None
    kernels_of: Callable[[Callable[[], object]], Callable[[], object]] | None = None
    warm_up: int = 1


@dataclass(frozen=True, kw_only=True)
class RivalResult:
    """Rates of torch operations, and how many times as long they took as the kernels in the same round."""

    name: str
    encode_rate: float
    decode_rate: float
    encode_speedup: float
    decode_speedup: float


@dataclass(frozen=True, kw_only=True)
class AloneResult:
    """Rates of kernels alone; of moved bytes also as a share of the copy's in the same round."""

    encode_rate: float
    decode_rate: float
    copy_moved_rate: float
    encode_moved_rate: float
    decode_moved_rate: float
    encode_moved_ratio: float
    decode_moved_ratio: float


@dataclass(frozen=True, kw_only=True)
class KernelResult:
    """Rates of one kind of encoding: bytes per second, and as a share of the copy's in the same round."""

    name: str
    row: int
    dtype: str
    encode_rate: float
    decode_rate: float
    copy_rate: float
    encode_ratio: float
    decode_ratio: float
    rivals: list[RivalResult]
    alone: AloneResult | None = None


def measure(form: TensorKind, values: Tensor, clocks: Clocks, rounds: int) -> KernelResult:
    """Times a copy, the kernels and their rivals in turn."""
    seconds = time_in_turn(_actions(form, values, clocks), rounds, clocks.warm_up)
    rates = {action: values.nbytes / statistics.median(taken) for action, taken in seconds.items()}
    return KernelResult(
        name=form.name,
        row=form.row,
        dtype=str(values.dtype).removeprefix("torch."),
        encode_rate=rates["encode"],
        decode_rate=rates["decode"],
        copy_rate=rates["copy"],
        encode_ratio=paired_ratio(seconds["copy"], seconds["encode"]),
        decode_ratio=paired_ratio(seconds["copy"], seconds["decode"]),
        rivals=[_rival_result(name, rates, seconds) for name in form.rivals],
        alone=_alone_result(rates, seconds, 1 + form.coded_bytes / values.nbytes) if clocks.alone else None,
    )


def planes_form(backend: Backend, values: Tensor, row: int, precision: int, *, stochastic: bool = False) -> TensorKind:
    """Returns encoding to planes and decoding from them; at 0 bits, to headers alone: ranges and moments of groups."""
    layout, planes = plane_layout(values.numel(), row, PAGE_BYTES), planes_for(precision)
    memory, pages = _memory(layout.pages(planes), values.device)
    seed = (1, 2, 3, 4) if stochastic else None
    out = torch.empty_like(values)
    return TensorKind(
        name=f"{precision} bits{', stochastic' if stochastic else ''}" if precision else "headers",
        row=row,
        calls=(
            lambda: backend.encode(values, layout, planes, memory, pages, seed),
            lambda: backend.decode(out, layout, planes, memory, pages),
        ),
        coded_bytes=HEADER_BYTES * layout.groups + layout.blocks * COLUMNS * sum(PLANE_WIDTHS[:planes]),
        rivals={} if stochastic else torch_planes(values, layout, planes),
    )


def torch_planes(values: Tensor, layout: PlaneLayout, planes: int) -> dict[str, Calls]:
    """Returns the torch operations that encode to planes and decode from them."""
    pages, out = torch_codec.encode(values, layout, planes), torch.empty_like(values)
    return {
        name: (
            partial(torch_codec.encode, values, layout, planes, chunk),
            partial(torch_codec.decode, pages, layout, planes, out, chunk),
        )
        for name, chunk in _chunks(values.device).items()
    }


def mask_form(backend: Backend, elements: int, dtype: torch.dtype, device: torch.device) -> TensorKind:
    """Returns packing a dropout mask to one bit an element and unpacking it."""
    values = (torch.rand(elements, device=device) > 0.1).to(dtype) / 0.9
    if device.type == "cuda":
        values = values > 0  # what a dropout saves there
    coded = PlaneLayout(elements, BLOCK, PAGE_BYTES)
    memory, pages = _memory(coded.plane_pages(0), device)
    out = torch.empty_like(values)
    two = backend.two_values(values)
    if two is None:
        raise RuntimeError("a dropout mask has two values, and the kernels found more; report this as a bug")
    return TensorKind(
        name="mask",
        row=elements,
        calls=(
            lambda: backend.encode_mask(values, two, memory, pages),
            lambda: backend.decode_mask(out, two, memory, pages),
        ),
        coded_bytes=coded.blocks * COLUMNS,
        rivals=torch_mask(values, two),
    )


def torch_mask(values: Tensor, two: tuple[int, int]) -> dict[str, Calls]:
    """Returns the torch operations that pack a mask and unpack it."""
    bits = bits_of_elements(values)
    pages, out = torch_codec.encode_mask(bits, *two, PAGE_BYTES)[0], torch.empty_like(bits)
    return {
        name: (
            partial(torch_codec.encode_mask, bits, *two, PAGE_BYTES, chunk),
            partial(torch_codec.decode_mask, pages, *two, out, chunk),
        )
        for name, chunk in _chunks(values.device).items()
    }


def forms(backend: Backend, values: Tensor) -> Iterator[TensorKind]:
    """Gives all kinds of encoding, one after the other: their pages and results need not exist at the same time."""
    for precision in (*reversed(PRECISIONS), 0):
        yield planes_form(backend, values, ROWS[0], precision)
    for row in ROWS[1:]:
        yield planes_form(backend, values, row, 4)
    yield planes_form(backend, values, ROWS[0], 4, stochastic=True)
    yield mask_form(backend, values.numel(), values.dtype, values.device)


def on_cpu(threads: int) -> tuple[Backend, Clocks]:
    """Returns the kernels of a CPU, compiled, and its clock."""
    from daf_kernels.cpu.backend import CpuBackend, warm_up  # a GPU needs no numba

    warm_up()
    return CpuBackend(threads), Clocks()


def on_gpu() -> tuple[Backend, Clocks]:
    """Returns the kernels of a GPU and its clocks."""
    from benchmarks.launches import kernels_of  # a CPU needs no Triton

    clocks = Clocks(
        call=CudaTimer(ahead=False), alone=CudaTimer(ahead=True), kernels_of=kernels_of, warm_up=GPU_WARM_UP
    )
    return load_backend(torch.device("cuda", torch.cuda.current_device())), clocks


def run(options: argparse.Namespace) -> tuple[list[KernelResult], list[reductions.RangeResult]]:
    """Measures all encodings, and, on a GPU, the ranges of groups."""
    torch.set_num_threads(options.threads)
    backend, clocks = on_cpu(options.threads) if options.device == "cpu" else on_gpu()
    values = torch.randn(options.elements, device=options.device).to(DTYPES[options.dtype])
    results = [measure(form, values, clocks, options.rounds) for form in forms(backend, values)]
    groups = [group for group in GROUPS if clocks.alone and group <= values.numel()]
    return results, [reductions.measure(values, group, clocks.alone, options.rounds) for group in groups]


def call_grid(title: str, results: Sequence[KernelResult]) -> Grid:
    """Returns the rates of whole calls, in GB (10^9 bytes) of the uncompressed tensor per second."""
    headings = ("form", "row", "copy GB/s", "encode GB/s", "of copy", "decode GB/s", "of copy")
    return Grid(title, headings, [*map(_call_row, results)])


def rival_grid(title: str, results: Sequence[KernelResult]) -> Grid:
    """Returns the rates of torch operations, and how many times as fast the kernels were."""
    headings = ("form", "row", "in torch", "encode GB/s", "kernels, of that", "decode GB/s", "kernels, of that")
    rows = [
        [
            result.name,
            str(result.row),
            rival.name,
            *(f"{rival.encode_rate / 1e9:.2f}", f"{rival.encode_speedup:.1f}"),
            *(f"{rival.decode_rate / 1e9:.2f}", f"{rival.decode_speedup:.1f}"),
        ]
        for result in results
        for rival in result.rivals
    ]
    return Grid(f"{title}, against torch operations", headings, rows)


def alone_grid(title: str, results: Sequence[KernelResult]) -> Grid:
    """Returns the rates of kernels alone, in GB of moved bytes per second."""
    rows = [
        [
            result.name,
            str(result.row),
            *_rates(alone.copy_moved_rate),
            *(*_rates(alone.encode_moved_rate), f"{alone.encode_moved_ratio:.2f}"),
            *(*_rates(alone.decode_moved_rate), f"{alone.decode_moved_ratio:.2f}"),
        ]
        for result in results
        if (alone := result.alone)
    ]
    headings = ("form", "row", "copy moves GB/s", "encode moves GB/s", "of copy", "decode moves GB/s", "of copy")
    return Grid(f"{title}, kernels alone", headings, rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a run."""
    parser = benchmark_parser("kernels", "Times the kernels alone.", "json", "markdown", rounds=11, threads=1)
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu or cuda")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--megabytes", type=whole_number(1), default=64, help="size of the tensor, in MiB")
    size.add_argument("--elements", type=whole_number(1), help="size of the tensor")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    options = parser.parse_args(arguments)
    options.elements = options.elements or options.megabytes * (1 << 20) // DTYPES[options.dtype].itemsize
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its tables and writes the files asked for."""
    options = parse_arguments(arguments)
    results, ranges = run(options)
    size = f"{options.elements * DTYPES[options.dtype].itemsize / (1 << 20):g} MiB {options.dtype}"
    title = f"{size}, {options.device}, {options.threads} thread(s)"
    grids = [call_grid(title, results), rival_grid(title, results)]
    content: dict[str, object] = {"kernels": results}
    if ranges:
        grids += [alone_grid(title, results), reductions.grid(ranges)]
        content["ranges"] = ranges
    write_results(options, content, grids, dtype=options.dtype, device=options.device)


def _actions(form: TensorKind, values: Tensor, clocks: Clocks) -> dict[str, Callable[[], float]]:
    """Returns what a round consists of, by name."""
    target = torch.empty_like(values)
    encode, decode = form.calls
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(values),
        "encode": encode,
        "decode": decode,
    }
    for name, (rival_encode, rival_decode) in form.rivals.items():
        calls |= {f"encode, {name}": rival_encode, f"decode, {name}": rival_decode}
    actions = {name: partial(clocks.call, call) for name, call in calls.items()}
    if clocks.alone and clocks.kernels_of:
        alone = {"copy": calls["copy"], "encode": clocks.kernels_of(encode), "decode": clocks.kernels_of(decode)}
        actions |= {f"{name} alone": partial(clocks.alone, call) for name, call in alone.items()}
    return actions


def _rival_result(name: str, rates: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> RivalResult:
    return RivalResult(
        name=name,
        encode_rate=rates[f"encode, {name}"],
        decode_rate=rates[f"decode, {name}"],
        encode_speedup=paired_ratio(seconds[f"encode, {name}"], seconds["encode"]),
        decode_speedup=paired_ratio(seconds[f"decode, {name}"], seconds["decode"]),
    )


def _alone_result(rates: Mapping[str, float], seconds: Mapping[str, Sequence[float]], moved: float) -> AloneResult:
    """Returns the rates of kernels that move `moved` bytes for each of the tensor's; a copy moves 2."""
    copy, encode, decode = (seconds[f"{name} alone"] for name in ("copy", "encode", "decode"))
    return AloneResult(
        encode_rate=rates["encode alone"],
        decode_rate=rates["decode alone"],
        copy_moved_rate=2 * rates["copy alone"],
        encode_moved_rate=moved * rates["encode alone"],
        decode_moved_rate=moved * rates["decode alone"],
        encode_moved_ratio=moved / 2 * paired_ratio(copy, encode),
        decode_moved_ratio=moved / 2 * paired_ratio(copy, decode),
    )


def _call_row(result: KernelResult) -> list[str]:
    return [
        result.name,
        str(result.row),
        *_rates(result.copy_rate, result.encode_rate),
        f"{result.encode_ratio:.2f}",
        *_rates(result.decode_rate),
        f"{result.decode_ratio:.2f}",
    ]


def _rates(*rates: float) -> list[str]:
    return [f"{rate / 1e9:.1f}" for rate in rates]


def _chunks(device: torch.device) -> dict[str, int | None]:
    """Returns how many elements torch works on at a time, by the name of that; chunks are for the cache of a CPU."""
    whole: dict[str, int | None] = {"at once": None}
    return whole if device.type != "cpu" else whole | {"in chunks": torch_codec.CHUNK}


def _memory(count: int, device: torch.device) -> tuple[FixedPages, "np.typing.NDArray[np.int64]"]:
    """Returns pages in random order, as a pool leases them after some steps."""
    return FixedPages(count, PAGE_BYTES, device), np.random.default_rng(0).permutation(count)


if __name__ == "__main__":
    main()
