"""What `daf plan --device` prints: what a training takes on a device, and the longest rows that fit there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from humanfriendly import format_size
from rich.console import Console
from rich.table import Table

from daf_core.plan.observe.without_values import without_values
from daf_integrations.cli.fit import (
    TREATMENTS,
    Device,
    Row,
    Standing,
    check_length,
    length_of,
    most_tokens,
    row_of,
    standing_of,
)
from daf_integrations.cli.workload import BuiltWorkload, Workload, build

NOTE = (
    'Worked out on torch\'s device "meta", without weights. Peak: the most that a step takes beside weights and '
    "optimizer, with gradients. All: with both. One twentieth of the device stays free, for what its driver and its "
    "allocator take. The least memory_budget is for a plan that recomputes, compresses and splits as much as it can."
)


def show_fit(workload: Workload, device: Device, as_json: bool) -> None:
    """Prints what fits; exits with 1 where nothing does.

    Raises:
        ModelError: There is no such model, or it does not do the task.
    """
    with without_values(drops_fused=device.is_gpu):
        sized = build(workload, "meta")
        check_length(sized, workload)
        standing = standing_of(sized.model, device)
        rows = [row_of(name, sized, standing, device) for name in TREATMENTS]
    if as_json:
        click.echo(json.dumps(_as_dict(sized, standing, device, rows), indent=2))
    else:
        _print(sized, standing, device, rows, Console())
    if not any(row.fits for row in rows):
        raise SystemExit(1)


def _as_dict(sized: BuiltWorkload, standing: Standing, device: Device, rows: Sequence[Row]) -> dict[str, object]:
    return {
        "task": sized.task,
        "dtype": sized.dtype,
        "device": {**device._asdict(), "usable_bytes": device.usable},
        "longest_known": most_tokens(sized.model),
        **{f"{name}_bytes": size for name, size in asdict(standing).items()},
        "treatments": [
            {
                "treatment": row.treatment,
                "activation_bytes": row.taken.activations,
                "peak_bytes": row.taken.peak,
                "total_bytes": row.total,
                "fits": row.fits,
                "longest": row.longest,
            }
            for row in rows
        ],
    }


def _print(sized: BuiltWorkload, standing: Standing, device: Device, rows: Sequence[Row], console: Console) -> None:
    console.print(
        f"Weights {format_size(standing.weights)}, gradients {format_size(standing.gradients)}, "
        f"AdamW {format_size(standing.optimizer)}",
        highlight=False,
    )
    batch = len(next(iter(sized.batch.values())))
    table = Table("", "activations", "peak", "all", f"fits {format_size(device.size)}", "longest row")
    table.title = f"{batch} x {length_of(sized)} tokens, {sized.dtype}"
    for row in rows:
        held = "-" if row.taken.activations is None else format_size(row.taken.activations)
        sizes = held, format_size(row.taken.peak), format_size(row.total)
        table.add_row(row.treatment, *sizes, "yes" if row.fits else "no", f"{row.longest:,}" if row.longest else "-")
    console.print(table)
    console.print(
        f"{sized.task}; the model knows rows of up to {most_tokens(sized.model):,} tokens. {NOTE}",
        markup=False,
        highlight=False,
        style="dim",
    )
