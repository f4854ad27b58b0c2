"""The table at the end of a run."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table


def render(title: str, metrics: dict[str, float], steps: int) -> str:
    """Returns a table of a run's figures as text, without colours.

    Args:
        title: A line above the table.
        metrics: Figures under their log names.
        steps: Steps they were taken over.
    """
    table = Table("saved activations", "", title_justify="left")
    table.add_row("plain training keeps", f"{metrics['daf/raw_mb']:,.1f} MB")
    table.add_row("DAF held at most", f"{metrics['daf/held_mb']:,.1f} MB")
    if metrics["daf/dropped_mb"]:
        table.add_row("dropped for the budget, in a step", f"{metrics['daf/dropped_mb']:,.1f} MB")
    if metrics["daf/spilled_mb"]:
        table.add_row("moved to the spill file, in a step", f"{metrics['daf/spilled_mb']:,.1f} MB")
    table.add_row("ratio", f"{metrics['daf/ratio']:.2f}")
    table.add_row("encoding, a step", f"{metrics['daf/pack_ms']:.1f} ms")
    table.add_row("decoding, a step", f"{metrics['daf/unpack_ms']:.1f} ms")
    table.add_row("steps", f"{steps:,}")
    text = io.StringIO()
    console = Console(file=text, width=100, no_color=True)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    return text.getvalue().rstrip()
