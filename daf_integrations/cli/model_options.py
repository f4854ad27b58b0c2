"""What commands are told about the model that is to be trained, and its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args

import click

from daf_core.config import Precision
from daf_integrations.cli.workload.build import TASKS, Task, Workload
from daf_integrations.cli.workload.user_model import names_function

DEFAULT_RANK = 8

PRECISIONS = [str(value) for value in get_args(Precision)]

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of a batch."),
    click.option("--length", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of a row."),
    click.option("--task", type=click.Choice(TASKS), help="Default: what models of this kind are mostly trained for."),
    click.option("--lora", "rank", type=click.IntRange(min=1), help="Rank of LoRA adapters.  [default: 8]"),
    click.option("--full", is_flag=True, help="Train all parameters, without LoRA."),
)

precision_option = click.option(
    "--precision", type=click.Choice(PRECISIONS), default="auto", show_default=True, help="Bits of an element."
)
"""Gives a command the option that `precision_of` reads."""


def model_options(command: Command) -> Command:
    """Gives a command the argument MODEL and the options that `workload_of` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.argument("model")(command)


def workload_of(model: str, batch: int, length: int, task: Task | None, rank: int | None, full: bool) -> Workload:
    """Returns what is to be trained.

    Raises:
        click.UsageError: Options exclude each other.
    """
    if full and rank is not None:
        raise click.UsageError("--lora and --full exclude each other; pass one of them")
    own = names_function(model)
    if own and (task is not None or rank is not None):
        option = "--lora" if task is None else "--task"
        raise click.UsageError(f"{option} is for Hugging Face models; what {model} makes is trained as it is")
    lora_rank = None if full or own else rank or DEFAULT_RANK
    return Workload(model=model, batch=batch, length=length, task=task, lora_rank=lora_rank)


def precision_of(text: str) -> Precision:
    """Returns one of `PRECISIONS` as a configuration takes it."""
    return cast("Precision", int(text) if text.isdigit() else text)
