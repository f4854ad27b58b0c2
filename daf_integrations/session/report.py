"""What a run says of itself: a line at the beginning, and a table at the end."""

from __future__ import annotations

import io
import sys

from humanfriendly import format_size
from torch import nn
from torch.nn.parameter import is_lazy

from daf_core import DAFConfig
from daf_integrations.session.metrics import RunTotals


def title(config: DAFConfig, description: str) -> str:
    """Returns one line that says what is about to happen to a model that `describe` has described."""
    stored = {
        "exact": "exact forms only",
        "auto": f"as many bits as each place needs, {config.rounding}",
    }.get(str(config.precision), f"{config.precision} bits, {config.rounding}")
    if config.max_gradient_error is not None:
        stored += f", gradient error at most {config.max_gradient_error:g}"
    size = config.memory_budget
    budget = f"budget {format_size(size)}" if isinstance(size, int) else f"{size or 'no'} budget"
    budget += " for a step" if config.plans_steps else ""
    if config.elastic is not None:
        shares = {"time": config.elastic.time, "memory": config.elastic.memory}
        said = [f"{share:.0%} of a step's {name}" for name, share in shares.items() if share is not None]
        budget = ", ".join([f"{budget}; elastic", *said])
    return f"DAF stores saved activations in {stored}; {budget}; {description}"


def describe(model: nn.Module) -> str:
    """Returns what is trained, and where."""
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]  # of the first pass
    if not parameters:
        return f"{type(model).__name__}, whose parameters the first batch makes"
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    return f"{type(model).__name__} on {parameters[0].device}, {trained:,} of {total:,} parameters trained"


def render(title: str, totals: RunTotals, plan: str | None = None, trained: str | None = None) -> str:
    """Returns a table of a run's figures as text, without colours, below its title, that standard output can show.

    It ends with how the last steps were run, where a budget covers them, and what they trained, where that was elastic.
    """
    from rich import box  # rich takes time to import
    from rich.console import Console
    from rich.table import Table

    metrics = totals.metrics()
    # That of a file is cp1252 on Windows, and an interpreter without a console has none.
    shows_lines = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    table = Table("saved activations", "", box=box.HEAVY_HEAD if shows_lines else box.ASCII)
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
