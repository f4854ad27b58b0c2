"""The table at the end of a run."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from daf_integrations.session.metrics import RunTotals


def render(title: str, totals: RunTotals, plan: str | None = None, trained: str | None = None) -> str:
    """Returns a table of a run's figures as text, without colours.

    Args:
        title: A line above the table.
        totals: The figures.
        plan: How steps were run at last, where a budget covers them.
        trained: What they trained, where training was elastic.
    """
    metrics = totals.metrics()
    table = Table("saved activations", "", title_justify="left")
    table.add_row("plain training keeps", f"{metrics['daf/raw_mb']:,.1f} MB")
    table.add_row("DAF held at most", f"{metrics['daf/held_mb']:,.1f} MB")
    if metrics["daf/dropped_mb"]:
        table.add_row("dropped for the budget, in a step", f"{metrics['daf/dropped_mb']:,.1f} MB")
    if metrics["daf/spilled_mb"]:
        table.add_row("moved to the spill file, in a step", f"{metrics['daf/spilled_mb']:,.1f} MB")
    table.add_row("ratio", f"{metrics['daf/ratio']:.2f}")
    if "daf/gradient_error" in metrics:
        error, cosine = metrics["daf/gradient_error"], metrics["daf/gradient_cosine"]
        table.add_row("gradient error, measured last", f"{error:.3g} (cosine {cosine:.4f})")
        table.add_row("audits, and those above the bound", f"{totals.audits:,}, {totals.audits_above:,}")
    table.add_row("encoding, a step", f"{metrics['daf/pack_ms']:.1f} ms")
    if metrics["daf/worker_ms"]:
        table.add_row("encoding meanwhile, a step", f"{metrics['daf/worker_ms']:.1f} ms")
    table.add_row("decoding, a step", f"{metrics['daf/unpack_ms']:.1f} ms")
    table.add_row("measuring the error, a step", f"{metrics['daf/audit_ms']:.1f} ms")
    table.add_row("steps", f"{totals.steps:,}")
    for place, part in enumerate(plan.split("; ") if plan else ()):
        table.add_row("" if place else "plan of the last step", part)
    if totals.elastic_steps:
        table.add_row("blocks that built a graph, a step", f"{metrics['daf/elastic_depth']:.1f}")
        table.add_row("time of a step, of one that trains all", f"{metrics['daf/elastic_share']:.2f} (expected)")
    if trained is not None:
        table.add_row("trained at last", trained)
    text = io.StringIO()
    console = Console(file=text, width=100, no_color=True)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    return text.getvalue().rstrip()
