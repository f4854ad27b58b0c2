"""Tests of the benchmarks of kernels and of what runs them on a GPU: the rival in torch, clocks, and tiny runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks import gpu_needs, gpu_steps, kernels, reductions, torch_codec
from benchmarks.kernels import Clocks, mask_form, measure, planes_form
from benchmarks.launches import kernels_of
from benchmarks.timing import CudaTimer, time_in_turn, wall_timer
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_integrations.cli.bench.process_memory import GpuMemory
from daf_integrations.cli.bench.tables import Grid, markdown_table
from daf_kernels import FixedPages, plane_layout, planes_for
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import HARD_INPUTS, Make, each
from tests.kernels.harness import bits, used_bytes
from tests.kernels.triton_device import DEVICE, TRITON

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.sh"
PRECISIONS = (8, 4, 2, 1, 0)
BENCHMARKS = ("kernels", "kernels-large", "reductions", "steps", "compiled", "cuda-graphs", "captured", "overlap")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [None, 1000])
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_torch_gives_the_bytes_of_the_reference(make: Make, dtype: torch.dtype, chunk: int | None) -> None:
    values = make(dtype)
    layout = plane_layout(values.numel(), values.shape[-1] if values.dim() else 1, 512)
    values, out = values.reshape(-1), torch.empty(values.numel(), dtype=dtype)
    for planes in map(planes_for, PRECISIONS):
        pages = reference.encode(values, layout, planes)
        assert torch.equal(torch_codec.encode(values, layout, planes, chunk), pages)
        torch_codec.decode(pages, layout, planes, out, chunk)
        assert torch.equal(bits(out), bits(reference.decode(pages, layout, planes, dtype)))


@pytest.mark.parametrize("chunk", [None, 512])
@pytest.mark.parametrize("elements", [1, 256, 3000])
def test_torch_packs_masks_as_the_reference_does(elements: int, chunk: int | None) -> None:
    mask = torch.randint(0, 2, (elements,), generator=torch.Generator().manual_seed(0), dtype=torch.int16) * 9 - 2
    pages, known = torch_codec.encode_mask(mask, -2, 7, 512, chunk)
    assert known
    assert torch.equal(pages, reference.encode_mask(mask, torch.tensor(7), 512))
    out = torch.empty_like(mask)
    torch_codec.decode_mask(pages, -2, 7, out, chunk)
    assert torch.equal(out, mask)
    mask[-1] = 3
    assert not torch_codec.encode_mask(mask, -2, 7, 512, chunk)[1]


def test_every_round_runs_everything_and_the_first_do_not_count() -> None:
    order: list[str] = []

    def action(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = time_in_turn({name: partial(action, name) for name in "ab"}, rounds=2, warm_up=1)
    assert order == list("ababab")
    assert seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_clock_times_the_call() -> None:
    called: list[bool] = []
    assert wall_timer(lambda: called.append(True)) > 0
    assert called == [True]


@needs_gpu
@pytest.mark.parametrize("ahead", [True, False])
def test_a_clock_of_a_gpu_times_the_call(ahead: bool) -> None:
    called: list[bool] = []
    assert CudaTimer(ahead=ahead)(lambda: called.append(True)) > 0
    assert called == [True]


@pytest.mark.parametrize("row", [256, 100])
def test_kernels_alone_write_the_same_bytes(row: int) -> None:
    values = torch.randn(20 * row, device=DEVICE)
    layout = plane_layout(values.numel(), row, 512)
    memory = FixedPages(layout.pages(3), 512, DEVICE)
    numbers = torch.arange(layout.pages(3)).numpy()
    zeros = torch.zeros(len(numbers), 512, dtype=torch.uint8, device=DEVICE)
    memory.write(numbers, zeros)
    encode = kernels_of(lambda: TRITON.encode(values, layout, 3, memory, numbers, None))
    expected = memory.read(numbers)
    memory.write(numbers, zeros)
    encode()
    assert torch.equal(memory.read(numbers), expected)
    assert bool(expected.any())


def tiny_values() -> Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_that_are_written_count_as_moved(precision: int) -> None:
    layout, planes = plane_layout(4096, 128, PAGE_BYTES), planes_for(precision)
    form = planes_form(TRITON, tiny_values(), 128, precision)
    assert form.coded_bytes == int(used_bytes(layout, planes).sum())


@pytest.mark.parametrize("kind", ["planes", "stochastic", "mask"])
def test_kernels_are_measured_alone_beside_torch(kind: str) -> None:
    values = tiny_values()
    form = {
        "planes": lambda: planes_form(TRITON, values, 128, 4),
        "stochastic": lambda: planes_form(TRITON, values, 128, 4, stochastic=True),
        "mask": lambda: mask_form(TRITON, 4096, torch.bfloat16, DEVICE),
    }[kind]()
    clocks = Clocks(alone=wall_timer, kernels_of=kernels_of)
    result = measure(form, values, clocks, rounds=1)
    assert bool(result.rivals) == (kind != "stochastic")
    assert result.alone is not None
    moved = 1 + form.coded_bytes / values.nbytes
    assert result.alone.encode_moved_rate == pytest.approx(moved * result.alone.encode_rate)
    share = result.alone.encode_moved_rate / result.alone.copy_moved_rate
    assert result.alone.encode_moved_ratio == pytest.approx(share)  # of one round, the median is the round
    assert len(kernels.alone_grid("", [result]).rows) == 1


def test_kernels_write_their_figures(tmp_path: Path) -> None:
    report, tables = tmp_path / "kernels.json", tmp_path / "kernels.md"
    kernels.main(["--elements", "5000", "--rounds", "1", "--json", str(report), "--markdown", str(tables)])
    content = json.loads(report.read_text())
    assert content.keys() == {"kernels", "machine"}
    assert content["machine"].keys() == {"cpu", "cores", "threads", "torch", "python", "allocator", "dtype"}
    names = [result["name"] for result in content["kernels"]]
    expected = [*(f"{precision} bits" for precision in (8, 4, 2, 1)), "headers", "4 bits", "4 bits"]
    assert names == [*expected, "4 bits, stochastic", "mask"]
    for result in content["kernels"]:
        rivals = [] if "stochastic" in result["name"] else ["at once", "in chunks"]
        assert [rival["name"] for rival in result["rivals"]] == rivals
        assert result["alone"] is None
        assert min(result["encode_rate"], result["decode_rate"], result["copy_rate"]) > 0
    assert tables.read_text().count("| headers | 768 |") == 1 + len(rivals)


def test_kernels_of_a_gpu_write_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(alone=wall_timer, kernels_of=kernels_of)
    monkeypatch.setattr(kernels, "on_cpu", lambda threads: (TRITON, clocks))
    monkeypatch.setattr(kernels, "forms", lambda *arguments: [planes_form(*arguments, 128, 4)])
    report, tables = tmp_path / "kernels.json", tmp_path / "kernels.md"
    size = ["--elements", "1024", "--dtype", "bf16", "--rounds", "1"]
    kernels.main([*size, "--json", str(report), "--markdown", str(tables)])
    content = json.loads(report.read_text())
    assert all(result["alone"]["encode_moved_ratio"] > 0 for result in content["kernels"])
    assert [result["group"] for result in content["ranges"]] == [256]
    assert [line for line in tables.read_text().splitlines() if line.startswith("**")] == [
        "**0.00195312 MiB bf16, cpu, 1 thread(s)**",
        "**0.00195312 MiB bf16, cpu, 1 thread(s), against torch operations**",
        "**0.00195312 MiB bf16, cpu, 1 thread(s), kernels alone**",
        "**ranges of groups**",
    ]


def test_reductions_write_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(reductions, "CudaTimer", lambda ahead: wall_timer)
    monkeypatch.setattr(reductions, "DEVICE", "cpu")
    report, table = tmp_path / "reductions.json", tmp_path / "reductions.md"
    sizes = ["--groups", "64", "3000", "--elements", "256", "--dtypes", "bf16", "fp32", "--rounds", "1"]
    reductions.main([*sizes, "--json", str(report), "--markdown", str(table)])
    content = json.loads(report.read_text())
    assert [(result["group"], result["groups"]) for result in content["ranges"]] == [(64, 4), (64, 4)]
    assert content["machine"]["dtype"] == "bf16 fp32"
    assert table.read_text().count("| 64 | 4 |") == 2


Parse = Callable[[list[str]], object]


@needs_no_gpu
@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (kernels.parse_arguments, ["--device", "tpu"], "got 'tpu'; allowed are cpu and cuda"),
        (kernels.parse_arguments, ["--megabytes", "1", "--elements", "1"], "not allowed with argument"),
        (kernels.parse_arguments, ["--device", "cuda"], "got 'cuda', and torch sees no GPU here; pass cpu"),
        (reductions.parse_arguments, [], "torch sees no GPU here, and these strategies are for GPUs"),
        (reductions.parse_arguments, ["--groups", "0"], "got '0'; allowed is a whole number, 1 or more"),
    ],
)
def test_benchmarks_refuse(
    parse: Parse, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_elements_follow_from_megabytes() -> None:
    assert kernels.parse_arguments(["--megabytes", "2", "--dtype", "bf16"]).elements == 1 << 20
    assert kernels.parse_arguments(["--elements", "7"]).elements == 7


@pytest.mark.parametrize(("group", "names"), [(64, ["fused"]), (1500, ["fused", "parallel", "atomic"])])
def test_ranges_are_measured_by_strategy(group: int, names: list[str]) -> None:
    result = reductions.measure(tiny_values(), group, wall_timer, rounds=1)
    assert (result.groups, result.rule) == (4096 // group, "fused")
    assert list(result.rates) == [*names, *reductions.TORCH]
    assert result.best in names
    grid = reductions.grid([result])
    assert [len(row) for row in grid.rows] == [len(grid.headings)]
    assert grid.rows[0].count("") == len(reductions.STRATEGIES) - len(names)


@pytest.mark.parametrize("call", [0, 1])
def test_torch_finds_the_same_ranges(call: int) -> None:
    calls = reductions._calls(tiny_values(), 64, ["fused"])
    for found, expected in zip(calls[reductions.TORCH[call]](), calls["fused"](), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps run on the CPU, with figures of a GPU's memory."""
    figures = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 30, "max_memory_allocated": 70}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, partial(lambda figure: figure, figure))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_steps, "DEVICE", "cpu")


@pytest.mark.usefixtures("pretended_gpu")
def test_steps_are_timed_beside_plain_ones() -> None:
    results = list(gpu_steps.measure("tiny", 8, 64, 2, list(gpu_steps.METHODS), None))
    assert [result.method for result in results] == ["plain", *gpu_steps.METHODS]
    plain, exact, eight, four = results
    assert plain.step_ratio == 1
    assert all(result.peak_bytes == 40 and result.step_ratio > 0 for result in results)
    assert plain.held_bytes == plain.saved_bytes >= exact.held_bytes > eight.held_bytes > four.held_bytes > 0
    grid = gpu_steps.grid(results)
    assert {len(row) for row in grid.rows} == {len(grid.headings)}


@pytest.mark.usefixtures("pretended_gpu")
def test_captured_steps_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are captured once for each method, and nothing of the host's runs after that."""
    graphs, captures = list[Mock](), list[str]()

    def graph() -> Mock:
        graphs.append(Mock())
        return graphs[-1]

    def capture(graph: Mock, pool: object = None) -> AbstractContextManager[None]:
        captures.append("forward" if pool is None else "backward")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    results = list(gpu_steps.measure("tiny", 8, 64, 2, ["daf-4bit"], gpu_steps.CAPTURE))
    assert captures == ["forward", "backward"] * 2
    assert [each.replay.call_count for each in graphs] == [2] * 4
    plain, four = results
    assert plain.saved_bytes > four.held_bytes > 0


@pytest.mark.usefixtures("pretended_gpu")
def test_compiled_steps_are_written_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what was measured is there where a later one takes more time than the machine is lent for."""
    compiled = list[dict[str, Any]]()

    def compile_nothing(model: nn.Module, **options: Any) -> nn.Module:
        compiled.append(options)
        if len(compiled) == 2:
            raise TimeoutError
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    report = tmp_path / "steps.json"
    sizes = ["--sizes", "tiny:8x64", "tiny:4x64"]
    with pytest.raises(TimeoutError):
        gpu_steps.main(
            [*sizes, "--methods", "daf-4bit", "--compile", "default", "--rounds", "1", "--json", str(report)]
        )
    assert compiled == [{"mode": "default", "dynamic": False}] * 2
    assert [(each["rows"], each["method"]) for each in json.loads(report.read_text())["steps"]] == [
        (8, "plain"),
        (8, "daf-4bit"),
    ]


def test_tables_in_markdown() -> None:
    grid = Grid("title", ("name", "GB/s"), [("copy", "1.5")])
    assert markdown_table(grid) == "**title**\n\n| name | GB/s |\n| --- | ---: |\n| copy | 1.5 |\n"


def test_gpu_memory_is_counted_from_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 30, "max_memory_allocated": 70}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, partial(lambda figure: figure, figure))
    memory = GpuMemory()
    memory.reset_peak()
    assert memory.peak_bytes() == 40


def test_missing_packages_are_named_with_what_installs_them() -> None:
    assert gpu_needs.missing({"torch": "torch", "no_such_module": "no-such-package>=2"}) == ["no-such-package>=2"]
    assert gpu_needs.missing(gpu_needs.FATAL) == []


@needs_no_gpu
def test_without_a_gpu_nothing_is_begun(tmp_path: Path) -> None:
    run = run_script(tmp_path, sys.executable)
    assert run.returncode == 2
    assert "sees no GPU here; run it on a machine that has one" in run.stderr
    assert list((tmp_path / "out").iterdir()) == []


def run_script(folder: Path, python: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": python}
    command = ["bash", str(SCRIPT), str(folder / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("failing", "status", "failed"),
    [
        ("nothing", 0, []),
        ("benchmarks.reductions", 1, ["reductions"]),
        ("pytest", 1, ["tests"]),
        ("benchmarks.gpu_needs", 1, ["packages"]),
        ("benchmarks.gpu_steps", 1, ["steps", "compiled", "cuda-graphs", "captured"]),
        ("benchmarks.", 1, ["packages", *BENCHMARKS]),
    ],
)
def test_a_part_that_fails_stops_no_other(tmp_path: Path, failing: str, status: int, failed: list[str]) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $*"\ncase "$*" in *"-m {failing}"*) exit 1 ;; esac\n')
    python.chmod(0o755)
    run = run_script(tmp_path, str(python))
    lines = (tmp_path / "out" / "summary.md").read_text().splitlines()[2:]
    results = {name.removeprefix("- "): text for name, _, text in (line.partition(":") for line in lines)}
    assert [name for name in results if name != "packages"] == [*("tests", *BENCHMARKS)]
    assert [name for name, text in results.items() if "FAILED" in text] == failed
    assert run.returncode == status
    assert run.stdout.endswith("\n".join(lines) + "\n")
    log = (tmp_path / "out" / "compiled.log").read_text()
    assert "-m benchmarks.gpu_steps --sizes roberta-base:128x512" in log
    assert f"--json {tmp_path}/out/compiled.json" in log
