"""Times the CPU kernels alone against a plain copy of the same tensor.

Run ``python -m benchmarks.kernels --json kernels.json``. Every round times the copy and both kernels in turn; ratios
are taken within rounds. Rates are bytes of the uncompressed tensor per second.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import core_count, describe_machine
from benchmarks.options import whole_number
from benchmarks.process_memory import loaded_allocator
from benchmarks.summary import paired_ratio
from daf_core.memory.pool import PAGE_BYTES
from daf_kernels import PRECISIONS, FixedPages, PlaneLayout, plane_layout, planes_for
from daf_kernels.cpu import CpuBackend, warm_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = (768, 128, 64)


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


def measure(
    name: str, values: Tensor, encode: Callable[[], object], decode: Callable[[], object], row: int, rounds: int
) -> KernelResult:
    """Times a copy, an encoding and a decoding in turn."""
    target = torch.empty_like(values)
    seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    actions: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(values),
        "encode": encode,
        "decode": decode,
    }
    for turn in range(rounds + 1):
        for action, run in actions.items():
            started = time.perf_counter()
            run()
            if turn:  # the first round warms up
                seconds[action].append(time.perf_counter() - started)
    rates = {action: values.nbytes / statistics.median(taken) for action, taken in seconds.items()}
    return KernelResult(
        name=name,
        row=row,
        dtype=str(values.dtype).removeprefix("torch."),
        encode_rate=rates["encode"],
        decode_rate=rates["decode"],
        copy_rate=rates["copy"],
        encode_ratio=paired_ratio(seconds["copy"], seconds["encode"]),
        decode_ratio=paired_ratio(seconds["copy"], seconds["decode"]),
    )


def measure_planes(
    backend: CpuBackend, values: Tensor, row: int, precision: int, rounds: int, *, stochastic: bool
) -> KernelResult:
    """Measures encoding to planes and decoding from them."""
    layout, planes = plane_layout(values.numel(), row, PAGE_BYTES), planes_for(precision)
    memory, pages = _memory(layout.pages(planes))
    seed = (1, 2, 3, 4) if stochastic else None
    out = torch.empty_like(values)
    name = f"{precision} bits{', stochastic' if stochastic else ''}"
    return measure(
        name,
        values,
        lambda: backend.encode(values, layout, planes, memory, pages, seed),
        lambda: backend.decode(out, layout, planes, memory, pages),
        row,
        rounds,
    )


def measure_mask(backend: CpuBackend, elements: int, dtype: torch.dtype, rounds: int) -> KernelResult:
    """Measures packing a dropout mask to one bit an element and unpacking it."""
    values = (torch.rand(elements) > 0.1).to(dtype) / 0.9
    memory, pages = _memory(PlaneLayout(elements, 256, PAGE_BYTES).plane_pages(0))
    out = torch.empty_like(values)
    two = backend.two_values(values)
    if two is None:
        raise RuntimeError("a dropout mask has two values, and the kernels found more; report this as a bug")
    return measure(
        "mask",
        values,
        lambda: backend.encode_mask(values, two, memory, pages),
        lambda: backend.decode_mask(out, two, memory, pages),
        elements,
        rounds,
    )


def run(options: argparse.Namespace) -> list[KernelResult]:
    """Measures all encodings."""
    torch.set_num_threads(options.threads)
    warm_up()
    backend, dtype = CpuBackend(options.threads), DTYPES[options.dtype]
    elements = options.megabytes * (1 << 20) // dtype.itemsize
    values = torch.randn(elements).to(dtype)
    results = [
        measure_planes(backend, values, ROWS[0], precision, options.rounds, stochastic=False)
        for precision in reversed(PRECISIONS)
    ]
    results += [measure_planes(backend, values, row, 4, options.rounds, stochastic=False) for row in ROWS[1:]]
    results.append(measure_planes(backend, values, ROWS[0], 4, options.rounds, stochastic=True))
    results.append(measure_mask(backend, elements, dtype, options.rounds))
    return results


def result_table(title: str, results: Sequence[KernelResult]) -> Table:
    """Returns the rates as a table, in GB (10^9 bytes) per second."""
    table = Table(title=title, box=SIMPLE, collapse_padding=True)
    for heading in ("form", "row", "copy GB/s", "encode GB/s", "of copy", "decode GB/s", "of copy"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    for result in results:
        table.add_row(
            result.name,
            str(result.row),
            f"{result.copy_rate / 1e9:.1f}",
            f"{result.encode_rate / 1e9:.1f}",
            f"{result.encode_ratio:.2f}",
            f"{result.decode_rate / 1e9:.1f}",
            f"{result.decode_ratio:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes its JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Times the CPU kernels alone.")
    parser.add_argument("--megabytes", type=whole_number(1), default=64, help="size of the tensor, in MiB")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--threads", type=whole_number(1, core_count()), default=1, help="threads of copy and kernels")
    parser.add_argument("--rounds", type=whole_number(1), default=21)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    results = run(options)
    title = f"{options.megabytes} MiB {options.dtype}, {options.threads} thread(s)"
    Console().print(result_table(title, results))
    if options.json:
        machine = describe_machine(threads=options.threads, allocator=loaded_allocator(), dtype=options.dtype)
        report = {"kernels": [asdict(result) for result in results], "machine": asdict(machine)}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _memory(count: int) -> tuple[FixedPages, "np.typing.NDArray[np.int64]"]:
    """Returns pages in random order, as a pool leases them after some steps."""
    return FixedPages(count, PAGE_BYTES), np.random.default_rng(0).permutation(count)


if __name__ == "__main__":
    main()
