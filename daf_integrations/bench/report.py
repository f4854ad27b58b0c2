"""How `daf bench` shows what it measured."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from io import BytesIO
from typing import Any

from daf_integrations.bench.machine import GpuMachine, Machine
from daf_integrations.bench.rounds import Comparison, Results
from daf_integrations.bench.summary import MethodResult
from daf_integrations.bench.tables import Grid

MEGABYTE = 1e6

HEADINGS = ("method", "held MB", "peak MB", "of plain", "step s", "of plain", "gradient error")

NOTE = (
    "Weights are random: neither time nor memory depends on their values. Held: activations saved for backward. Peak: "
    "the most that a step takes beside the model. Ratios are medians over rounds, each of them within a round."
)

GLIBC_NOTE = (
    "Peaks are of resident memory under glibc's allocator, which is up to twice what is live: see `daf doctor`."
)


def title(asked: Comparison, results: Results) -> str:
    """Returns what was run."""
    workload = asked.workload
    trained = "all weights" if workload.lora_rank is None else f"LoRA r={workload.lora_rank}"
    if ".py:" in workload.model:
        trained = "as made"
    where = f"{asked.threads} threads" if results.device == "cpu" else results.device
    return f"{workload.model}, {trained}, {workload.batch} x {workload.length}, {asked.dtype}, {where}"


def grid(asked: Comparison, results: Results) -> Grid:
    """Returns the figures as cells; sizes in MB of 10^6 bytes. A method that computes something wrong has no time."""
    return Grid(title(asked, results), HEADINGS, [_row(result) for result in results.methods])


def notes(results: Results) -> list[str]:
    """Returns what is to be known of the figures."""
    wrong = [f"{result.method} is wrong: {result.problem}" for result in results.methods if result.problem]
    failed = [f"{method} did not run: {_last_line(text)}" for method, text in results.failed.items()]
    glibc = [GLIBC_NOTE] if results.device == "cpu" and results.allocator == "glibc" else []
    return [*wrong, *failed, NOTE, *glibc]


def machine_line(machine: Machine) -> str:
    """Returns what it ran on."""
    gpu = f", {machine.gpu}" if isinstance(machine, GpuMachine) else ""
    return (
        f"{machine.cpu}{gpu}, {machine.cores} cores, torch {machine.torch} with {machine.threads} threads, "
        f"Python {machine.python}, allocator {machine.allocator}"
    )


def as_dict(asked: Comparison, results: Results, machine: Machine) -> dict[str, Any]:
    """Returns everything as JSON-able values."""
    return {
        "methods": [_figures(result) for result in results.methods],
        "failed": results.failed,
        "machine": asdict(machine),
        "settings": asdict(asked),
    }


def picture(asked: Comparison, results: Results) -> bytes:
    """Returns a PNG file with peak and time of each method, relative to plain training."""
    shown = [result for result in results.methods if result.problem is None]
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 0.8 + 0.38 * len(shown)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [result.method for result in shown]
    for axes, values, label in (
        (memory, [result.peak_ratio for result in shown], "peak memory of plain"),
        (time, [result.step_ratio for result in shown], "step time of plain"),
    ):
        bars = axes.barh(names, values, color=["tab:blue" if _is_daf(name) else "tab:gray" for name in names])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, 1.15 * max(values))
        axes.set_xlabel(label)
    memory.invert_yaxis()
    figure.suptitle(title(asked, results), fontsize="small")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=144)
    return content.getvalue()


def _is_daf(name: str) -> bool:
    return name.startswith(("daf", "elastic"))


def _figures(result: MethodResult) -> dict[str, Any]:
    figures = asdict(result)
    if result.problem is None:
        return figures
    return figures | {"step_seconds": None, "step_ratio": None, "rounds": []}


def _row(result: MethodResult) -> list[str]:
    wrong = result.problem is not None
    return [
        result.method,
        f"{result.held_bytes / MEGABYTE:.1f}",
        f"{result.peak_bytes / MEGABYTE:.1f}",
        f"{result.peak_ratio:.2f}",
        "wrong" if wrong else f"{result.step_seconds:.3f}",
        "" if wrong else f"{result.step_ratio:.2f}",
        _error(result),
    ]


def _error(result: MethodResult) -> str:
    """Returns the error over adapters alone where there are any."""
    error = result.gradient_error if result.lora_gradient_error is None else result.lora_gradient_error
    return "" if error is None else "0" if result.gradients_identical else f"{error:.2g}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
