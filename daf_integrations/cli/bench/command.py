"""The command `daf bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import TimeRemainingColumn

from daf_core.errors import ConfigError, DAFError
from daf_integrations.cli.model_options import model_options, workload_of
from daf_integrations.cli.output import STANDARD_OUTPUT, json_option, output_file, progress, write_json

DEFAULT_METHODS = "plain,checkpoint,bf16,classic-4bit,daf-exact,daf-8bit,daf-4bit,daf-2bit,daf-auto"


def _methods(context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    from daf_integrations.cli.bench.methods import parse_methods  # takes long to load

    try:
        names = parse_methods(DEFAULT_METHODS if value is None else value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return names if "plain" in names else ("plain", *names)


def _list_methods(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    from daf_integrations.cli.bench.methods import METHODS

    width = max(map(len, METHODS))
    for name, meaning in METHODS.items():
        click.echo(f"{name:{width}}  {meaning}")
    context.exit()


@click.command()
@model_options
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
@json_option
@click.option("--markdown", metavar="FILE", callback=output_file((".md",)), help="The table in Markdown.")
@click.option("--png", metavar="FILE", callback=output_file((".png",)), help="Picture of memory and time.")
def bench(
    methods: tuple[str, ...],
    rounds: int,
    steps: int,
    threads: int | None,
    dtype: Literal["fp32", "bf16"],
    json_file: Path | str | None,
    markdown: Path | None,
    png: Path | None,
    **model: Any,
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
    workload = workload_of(**model)
    from daf_integrations.cli.bench.machine import core_count, describe_machine
    from daf_integrations.cli.bench.report import as_dict, grid, machine_line, notes, picture
    from daf_integrations.cli.bench.rounds import Comparison, compare
    from daf_integrations.cli.bench.tables import markdown_table, terminal_table
    from daf_integrations.cli.profile.page import check_matplotlib

    asked = Comparison(
        workload=workload, methods=methods, dtype=dtype, rounds=rounds, steps=steps, threads=threads or core_count()
    )
    try:
        if png is not None:
            check_matplotlib("--png")
        with progress(rounds * len(methods), TimeRemainingColumn()) as begin:
            results = compare(asked, begin)
    except DAFError as error:
        raise click.ClickException(str(error)) from error
    device = "cpu" if results.device == "cpu" else "cuda"
    machine = describe_machine(threads=asked.threads, allocator=results.allocator, dtype=dtype, device=device)
    table, lines = grid(asked, results), [machine_line(machine), *notes(asked, results)]
    if json_file != STANDARD_OUTPUT:
        console = Console()
        console.print(terminal_table(table))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    try:
        if json_file is not None:
            write_json(json_file, as_dict(asked, results, machine))
        if markdown is not None:
            markdown.write_text("\n\n".join([markdown_table(table), *lines]) + "\n", encoding="utf-8")
        if png is not None:
            png.write_bytes(picture(asked, results))
    except OSError as error:
        raise click.ClickException(f"{error.filename} was not written: {error.strerror}") from error
    if results.failed or any(result.problem for result in results.methods):
        raise SystemExit(1)
