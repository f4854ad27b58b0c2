"""What the two runs measured, side by side: a table for the terminal and a picture of one step's memory."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from rich.table import Table

matplotlib.use("Agg")  # draws into a file; no screen needed
from matplotlib import pyplot

MB = 1_000_000


@dataclass(frozen=True)
class RunResult:
    """The measurements of one training run.

    Attributes:
        title: how the run is called in table and picture.
        allocator: name of the memory allocator that the process used.
        raw_mb: activations that autograd saved in the last logged step, in MB; 0 in the plain run, where nobody counts.
        held_mb: the same as they were held in memory until backward, in MB; 0 in the plain run.
        loaded_bytes: memory in use before the first step: libraries and model.
        peak_bytes: most memory in use during training, above `loaded_bytes`.
        step_seconds: median time of an optimizer step.
        accuracy: share of test texts classified rightly.
        curve: (seconds since the step began, bytes above `loaded_bytes`) over one step.
    """

    title: str
    allocator: str
    raw_mb: float
    held_mb: float
    loaded_bytes: int
    peak_bytes: int
    step_seconds: float
    accuracy: float
    curve: list[tuple[float, int]]

    def save(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "RunResult":
        """Reads what `save` wrote."""
        return RunResult(**json.loads(path.read_text(encoding="utf-8")))


def comparison_table(plain: RunResult, daf: RunResult, chance: float) -> Table:
    """Lays the two runs side by side.

    Args:
        plain: the run without DAF. What it saves is what the other run counted before packing.
        daf: the run with DAF.
        chance: accuracy of guessing.
    """
    caption = f"Allocator: {daf.allocator}. Guessing would be right in {chance:.1%}."
    table = Table(title="The same training, plain and with DAF", caption=caption)
    for heading in ("", plain.title, daf.title, "change"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("saved activations, raw", *_ratio(daf.raw_mb, daf.raw_mb, "MB"))
    table.add_row("saved activations, held", *_ratio(daf.raw_mb, daf.held_mb, "MB"))
    table.add_row("loaded before training", *_ratio(plain.loaded_bytes / MB, daf.loaded_bytes / MB, "MB"))
    table.add_row("peak above that", *_ratio(plain.peak_bytes / MB, daf.peak_bytes / MB, "MB"))
    table.add_row("median step time", *_ratio(plain.step_seconds * 1e3, daf.step_seconds * 1e3, "ms"))
    points = (daf.accuracy - plain.accuracy) * 100
    table.add_row("test accuracy", f"{plain.accuracy:.1%}", f"{daf.accuracy:.1%}", f"{points:+.1f} points")
    return table


def draw_curves(plain: RunResult, daf: RunResult, path: Path) -> None:
    """Draws the memory of both runs over one training step into a picture file."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for result, colour in ((plain, "tab:gray"), (daf, "tab:blue")):
        end, _ = result.curve[-1]
        progress = [seconds / end * 100 for seconds, _ in result.curve]  # sampling slows the step: show no times
        megabytes = [size / MB for _, size in result.curve]
        axes.plot(progress, megabytes, color=colour, label=f"{result.title} (peak {max(megabytes):.0f} MB)")
        axes.fill_between(progress, megabytes, color=colour, alpha=0.15)
    axes.set(
        title="Live memory over one training step (forward, backward, update)",
        xlabel="progress of the step (% of its time)",
        ylabel="memory above what is loaded (MB)",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _ratio(plain: float, daf: float, unit: str) -> tuple[str, str, str]:
    return f"{plain:.0f} {unit}", f"{daf:.0f} {unit}", f"{daf / plain:.2f} x"
