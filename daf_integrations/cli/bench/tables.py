"""One table, for a terminal and for a Markdown file."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """Cells under headings; the first column is text, the others are numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def terminal_table(grid: Grid) -> Table:
    """Returns the table for a terminal."""
    table = Table(title=grid.title, box=SIMPLE, collapse_padding=True)
    for number, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table


def markdown_table(grid: Grid) -> str:
    """Returns the table in Markdown, its title above it."""
    lines = [grid.headings, ["---", *["---:"] * (len(grid.headings) - 1)], *grid.rows]
    return "\n".join([f"**{grid.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"
