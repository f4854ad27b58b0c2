"""Options that commands share: the model that is to be trained, its batch and its precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, get_args

import click

from daf_core.config import Precision
from daf_core.errors import DAFError
from daf_integrations.cli.workload import TASKS, Task, Workload, names_function

DEFAULT_RANK = 8

PRECISIONS: dict[str, Precision] = {str(value): value for value in get_args(Precision)}

_OPTIONS = (
    click.argument("model"),
    click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of a batch."),
    click.option("--length", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of a row."),
    click.option("--task", type=click.Choice(TASKS), help="Default: what models of this kind are mostly trained for."),
    click.option("--lora", "rank", type=click.IntRange(min=1), help="Rank of LoRA adapters.  [default: 8]"),
    click.option("--full", is_flag=True, help="Train all parameters, without LoRA."),
)


def _precision(_context: click.Context, _parameter: click.Parameter, value: str) -> Precision:
    return PRECISIONS[value]


precision_option = click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="auto",
    show_default=True,
    callback=_precision,
    help="Bits of an element.",
)
"""Gives a command a precision as a configuration takes it."""


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command MODEL and the options of its batch as one `Workload`; an error of DAF's ends it with its text."""

    @wraps(command)
    def with_workload(
        model: str, batch: int, length: int, task: Task | None, rank: int | None, full: bool, **options: Any
    ) -> None:
        if full and rank is not None:
            raise click.UsageError("--lora and --full exclude each other; pass one of them")
        own = names_function(model)
        if own and (task is not None or rank is not None):
            option = "--lora" if task is None else "--task"
            raise click.UsageError(f"{option} is for Hugging Face models; what {model} makes is trained as it is")
        lora_rank = None if full or own else rank or DEFAULT_RANK
        workload = Workload(model=model, batch=batch, length=length, task=task, lora_rank=lora_rank)
        try:
            command(workload=workload, **options)
        except DAFError as error:
            raise click.ClickException(str(error)) from error

    for option in reversed(_OPTIONS):
        with_workload = option(with_workload)
    return with_workload
