"""The command `daf bench`, and how it shows what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import TimeRemainingColumn

from daf_core.errors import ConfigError
from daf_integrations.cli import output
from daf_integrations.cli.bench.machine import core_count, describe_machine
from daf_integrations.cli.bench.methods import METHODS, parse_methods, traits
from daf_integrations.cli.bench.process_memory import can_reset_peak
from daf_integrations.cli.bench.rounds import Comparison, Results, compare, first_line
from daf_integrations.cli.bench.summary import MethodResult
from daf_integrations.cli.bench.tables import Grid, markdown_table, terminal_table
from daf_integrations.cli.options import takes_model
from daf_integrations.cli.workload import names_function

DEFAULT_METHODS = "plain,checkpoint,bf16,classic-4bit,daf-exact,daf-8bit,daf-4bit,daf-2bit,daf-auto"

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


def _methods(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    try:
        names = parse_methods(DEFAULT_METHODS if value is None else value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return names if "plain" in names else ("plain", *names)


def _list_methods(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    width = max(map(len, METHODS))
    for name, meaning in METHODS.items():
        click.echo(f"{name:{width}}  {meaning}")
    context.exit()


@click.command()
@takes_model
@click.option(
    "--methods",
    metavar="LIST",
    callback=_methods,
    help=f"Separated by commas; see --list-methods.  [default: {DEFAULT_METHODS}]",
)
@click.option(
    "--list-methods", is_flag=True, is_eager=True, expose_value=False, callback=_list_methods, help="Show all and exit."
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Processes of each method.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Timed steps of each process.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch.  [default: one for each core]")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16: mixed precision, by autocast.",
)
@click.option(
    "--compile", "compiled", is_flag=True, help="Compile the whole model with torch.compile: minutes for each process."
)
@output.json_option
@output.file_option("--markdown", suffixes=(".md",), help="The table in Markdown.")
@output.file_option("--png", suffixes=(".png",), help="Picture of memory and time.")
def bench(
    threads: int | None, json_file: Path | str | None, markdown: Path | None, png: Path | None, **compared: Any
) -> None:
    """Train MODEL for a few steps with DAF and the usual alternatives, and compare memory, step time and gradients.

    MODEL is a name on the Hugging Face Hub, a folder with a config.json, or FILE.py:FUNCTION, where the function gets
    the rows of a batch and their length and returns (model, batch). Weights of the others are random, and their rows
    full.

    Each measurement is a process of its own; methods run in turn, round by round, and ratios are taken within rounds.
    So 9 methods in 3 rounds are 27 processes: some minutes, or more with a large model. A method that runs out of
    memory is named; where that is plain training, ratios and checks are relative to an exact method, such as
    checkpoint. What a method computes in the first round is checked: where its loss is not the reference's, or its
    gradient cannot be right, no time of it is shown. The command exits with 1 if a method is wrong or failed.
    """
    output.check_matplotlib("--png", png)
    asked = Comparison(threads=threads or core_count(), **compared)
    with output.progress(asked.rounds * len(asked.methods), TimeRemainingColumn()) as begin:
        results = compare(asked, begin)
    device = "cpu" if results.device == "cpu" else "cuda"
    machine = describe_machine(threads=asked.threads, allocator=results.allocator, dtype=asked.dtype, device=device)
    table, lines = _grid(asked, results), [_machine_line(machine), *_notes(asked, results)]
    if json_file != output.STANDARD_OUTPUT:
        console = Console()
        console.print(terminal_table(table))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    output.write(json_file, lambda: _as_dict(asked, results, machine))
    output.write(markdown, lambda: "\n\n".join([markdown_table(table), *lines]))
    output.write(png, lambda: _picture(asked, results))
    if results.failed or any(result.problem for result in results.methods):
        raise SystemExit(1)


def _title(asked: Comparison, results: Results) -> str:
    workload = asked.workload
    trained = "all weights" if workload.lora_rank is None else f"LoRA r={workload.lora_rank}"
    model = workload.model if names_function(workload.model) else f"{workload.model}, {trained}"
    where = f"{asked.threads} threads" if results.device == "cpu" else results.device
    return f"{model}, {workload.batch} x {workload.length}, {asked.dtype}, {where}"


def _grid(asked: Comparison, results: Results) -> Grid:
    """Returns the figures as cells; sizes in MB of 10^6 bytes. A method that computes something wrong has no time."""
    ratio = f"of {results.reference}"
    headings = ("method", "held MB", "code MB", "peak MB", ratio, "step s", ratio, "gradient error")
    return Grid(_title(asked, results), headings, [_row(result) for result in results.methods])


def _row(result: MethodResult) -> list[str]:
    wrong = result.problem is not None
    error = result.gradient_error if result.lora_gradient_error is None else result.lora_gradient_error
    shown_error = "" if error is None else "0" if result.gradients_identical else f"{error:.2g}"
    return [
        result.method,
        *(f"{size / output.MEGABYTE:.1f}" for size in (result.held_bytes, result.setup_rss_bytes, result.peak_bytes)),
        "" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
        "wrong" if wrong else f"{result.step_seconds:.3f}",
        "" if wrong else f"{result.step_ratio:.2f}",
        "" if traits(result.method).partial else shown_error,
    ]


def _notes(asked: Comparison, results: Results) -> list[str]:
    """Returns what is to be known of the figures."""
    wrong = [f"{result.method} is wrong: {result.problem}" for result in results.methods if result.problem]
    failed = [f"{method} failed: {first_line(text)}" for method, text in results.failed.items()]
    others = [
        (UNCHECKED_NOTE, results.reference != "plain"),
        (NOTE, True),
        (RANDOM_NOTE, not names_function(asked.workload.model)),
        (PARTIAL_NOTE, any(traits(result.method).partial for result in results.methods)),
        (PEAK_NOTE, results.device == "cpu" and not can_reset_peak()),
    ]
    return [*wrong, *failed, *(note.format(reference=results.reference) for note, holds in others if holds)]


def _machine_line(machine: Mapping[str, Any]) -> str:
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"{machine['cpu']}{gpu}, {machine['cores']} cores, torch {machine['torch']} with {machine['threads']} threads, "
        f"Python {machine['python']}, allocator {machine['allocator']}"
    )


def _as_dict(asked: Comparison, results: Results, machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "methods": [_figures(result) for result in results.methods],
        "reference": results.reference,
        "failed": results.failed,
        "machine": machine,
        "settings": asdict(asked),
    }


def _figures(result: MethodResult) -> dict[str, Any]:
    """Returns the figures without what JSON has no word for, and without times of what is wrong."""
    figures = {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in asdict(result).items()
    }
    if result.problem is None:
        return figures
    times: dict[str, Any] = {name: None for name in figures if name.endswith("_seconds")}
    return figures | times | {"step_ratio": None, "rounds": []}


def _picture(asked: Comparison, results: Results) -> bytes:
    """Returns a PNG file with peak and time of each method that is right, relative to the reference."""
    shown = [result for result in results.methods if result.problem is None and result.peak_ratio is not None]
    names = [result.method for result in shown]
    colors = ["tab:blue" if name.startswith(("daf", "elastic")) else "tab:gray" for name in names]

    def draw(figure: Any) -> None:
        memory, time = figure.subplots(1, 2, sharey=True)
        for axes, values, label in (
            (memory, [result.peak_ratio or 0.0 for result in shown], "peak memory"),
            (time, [result.step_ratio for result in shown], "step time"),
        ):
            axes.bar_label(axes.barh(names, values, color=colors), fmt="%.2f", padding=3)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set_xlim(0, 1.15 * max([1.0, *values]))
            axes.set_xlabel(f"{label} of {results.reference}")
        memory.invert_yaxis()
        figure.suptitle(_title(asked, results), fontsize="small")

    return output.drawn((9, 1.2 + 0.38 * len(shown)), draw)
