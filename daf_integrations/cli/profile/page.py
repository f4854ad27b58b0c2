"""The picture of `daf profile`, and the page with its tables."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib import import_module
from io import BytesIO
from typing import Any

from daf_core.errors import ProfileError
from daf_core.plan.observe.memory_curve import MemoryCurve
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.profile.compute import Profile
from daf_integrations.cli.profile.tables import NOTE

MEGABYTE = 1e6

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 1.5em 0; font-size: 14px; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
tr:last-child { font-weight: bold; }
.note { color: #666; }
"""


def check_matplotlib(option: str) -> None:
    """Makes sure that a picture can be drawn.

    Raises:
        ProfileError: matplotlib is missing.
    """
    try:
        import_module("matplotlib")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ProfileError(f"{option} needs matplotlib, which is not installed: pip install matplotlib") from error


def picture(profile: Profile, title: str) -> bytes:
    """Returns a PNG file with the memory of tensors over a step, without DAF and with it."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw(axes, profile.plain_curve, "without DAF", "tab:gray")
    _draw(axes, profile.curve, "with DAF", "tab:blue")
    axes.set_title(title, fontsize="small")
    axes.set_xlabel("seconds, with every operator watched; the dotted lines end forward passes")
    axes.set_ylabel("MB of tensors")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=144)
    return content.getvalue()


def page(title: str, tables: Sequence[Grid], lines: Sequence[str], drawn: bytes) -> str:
    """Returns an HTML page that needs nothing beside itself."""
    image = b64encode(drawn).decode()
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<img alt="Memory of tensors over a step" src="data:image/png;base64,{image}">',
        *(f"<p>{escape(line)}</p>" for line in lines),
        *map(_table, tables),
        f'<p class="note">{escape(NOTE)}</p>',
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _draw(axes: Any, curve: MemoryCurve, label: str, color: str) -> None:
    seconds, sizes = [point.seconds for point in curve.points], [point.size / MEGABYTE for point in curve.points]
    axes.step(seconds, sizes, where="post", label=f"{label}: {curve.peak / MEGABYTE:.0f} MB", color=color)
    axes.axvline(curve.forward_seconds, linestyle=":", color=color)


def _table(grid: Grid) -> str:
    rows = [_row("th", grid.headings), *(_row("td", cells) for cells in grid.rows)]
    return f"<table>\n{''.join(rows)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
