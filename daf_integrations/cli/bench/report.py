"""How `daf bench` shows what it measured."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from io import BytesIO
from math import isfinite
from typing import Any

from daf_integrations.cli.bench.machine import GpuMachine, Machine
from daf_integrations.cli.bench.methods import traits
from daf_integrations.cli.bench.process_memory import can_reset_peak
from daf_integrations.cli.bench.rounds import Comparison, Results, first_line
from daf_integrations.cli.bench.summary import MethodResult
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.workload.user_model import names_function

MEGABYTE = 1e6

NOTE = (
    "Held: activations saved for backward. Code: what the method loads, once, whatever the model. Peak: the most that "
    "a step takes above that, the model and the optimizer, with gradients. Ratios are medians over rounds, each within "
    "a round. The error is relative to {reference}'s gradient, over adapters alone where there are any."
)
UNCHECKED_NOTE = (
    "Plain training did not fit: ratios, errors and checks are relative to {reference}, "
    "and nothing checks what that computes."
)
RANDOM_NOTE = "Weights are random: time and memory do not depend on them, errors of gradients and bits of auto do."
PARTIAL_NOTE = "Elastic training: means over at least 20 steps; it has no error, and trains a part."
PEAK_NOTE = "This system starts no new peaks: those shown are of the processes from their start."


def title(asked: Comparison, results: Results) -> str:
    """Returns what was run."""
    workload = asked.workload
    trained = "all weights" if workload.lora_rank is None else f"LoRA r={workload.lora_rank}"
    model = workload.model if names_function(workload.model) else f"{workload.model}, {trained}"
    where = f"{asked.threads} threads" if results.device == "cpu" else results.device
    return f"{model}, {workload.batch} x {workload.length}, {asked.dtype}, {where}"


def grid(asked: Comparison, results: Results) -> Grid:
    """Returns the figures as cells; sizes in MB of 10^6 bytes. A method that computes something wrong has no time."""
    ratio = f"of {results.reference}"
    headings = ("method", "held MB", "code MB", "peak MB", ratio, "step s", ratio, "gradient error")
    return Grid(title(asked, results), headings, [_row(result) for result in results.methods])


def notes(asked: Comparison, results: Results) -> list[str]:
    """Returns what is to be known of the figures."""
    wrong = [f"{result.method} is wrong: {result.problem}" for result in results.methods if result.problem]
    failed = [f"{method} failed: {first_line(text)}" for method, text in results.failed.items()]
    if results.reference != "plain":
        failed.append(UNCHECKED_NOTE.format(reference=results.reference))
    others = [
        (RANDOM_NOTE, not names_function(asked.workload.model)),
        (PARTIAL_NOTE, any(traits(result.method).partial for result in results.methods)),
        (PEAK_NOTE, results.device == "cpu" and not can_reset_peak()),
    ]
    return [*wrong, *failed, NOTE.format(reference=results.reference), *(note for note, holds in others if holds)]


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
        "reference": results.reference,
        "failed": results.failed,
        "machine": asdict(machine),
        "settings": asdict(asked),
    }


def picture(asked: Comparison, results: Results) -> bytes:
    """Returns a PNG file with peak and time of each method that is right, relative to the reference."""
    shown = [result for result in results.methods if result.problem is None and result.peak_ratio is not None]
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 1.2 + 0.38 * len(shown)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [result.method for result in shown]
    for axes, values, label in (
        (memory, [result.peak_ratio or 0.0 for result in shown], f"peak memory of {results.reference}"),
        (time, [result.step_ratio for result in shown], f"step time of {results.reference}"),
    ):
        bars = axes.barh(names, values, color=["tab:blue" if _is_daf(name) else "tab:gray" for name in names])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlim(0, 1.15 * max([1.0, *values]))
        axes.set_xlabel(label)
    memory.invert_yaxis()
    figure.suptitle(title(asked, results), fontsize="small")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=144)
    return content.getvalue()


def _is_daf(name: str) -> bool:
    return name.startswith(("daf", "elastic"))


def _figures(result: MethodResult) -> dict[str, Any]:
    """Returns the figures without what JSON has no word for, and without times of what is wrong."""
    figures = {name: value if _is_finite(value) else None for name, value in asdict(result).items()}
    times: dict[str, Any] = {name: None for name in figures if name.endswith("_seconds")}
    return figures if result.problem is None else figures | times | {"step_ratio": None, "rounds": []}


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or isfinite(value)


def _row(result: MethodResult) -> list[str]:
    wrong = result.problem is not None
    sizes = (result.held_bytes, result.setup_rss_bytes, result.peak_bytes)
    return [
        result.method,
        *(f"{size / MEGABYTE:.1f}" for size in sizes),
        "" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
        "wrong" if wrong else f"{result.step_seconds:.3f}",
        "" if wrong else f"{result.step_ratio:.2f}",
        "" if traits(result.method).partial else _error(result),
    ]


def _error(result: MethodResult) -> str:
    """Returns the error over adapters alone where there are any."""
    error = result.gradient_error if result.lora_gradient_error is None else result.lora_gradient_error
    return "" if error is None else "0" if result.gradients_identical else f"{error:.2g}"
