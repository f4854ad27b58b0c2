"""What the two runs measured, side by side: a table and a sentence for the terminal, a picture of one step's memory."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from rich.table import Table

matplotlib.use("Agg")  # draws into a file; no screen needed
from matplotlib import pyplot

MB = 1_000_000


@dataclass(frozen=True)
class RunResult:
    """The measurements of one role: of its first training, and the accuracies of all.

    Attributes:
        title: how the run is called in table and picture.
        allocator: name of the memory allocator that the process used.
        raw_mb: activations that autograd saved in the last logged step, in MB; 0 in the plain run, where nobody counts.
        held_mb: the same as they were held in memory until backward, in MB; 0 in the plain run.
        loaded_bytes: memory in use before the first step: libraries and model.
        peak_bytes: most memory in use during training, above `loaded_bytes`.
        step_seconds: median time of an optimizer step.
        accuracies: share of test texts classified rightly, by seed.
        curve: (seconds since the step began, bytes above `loaded_bytes`) over one step.
    """

    title: str
    allocator: str
    raw_mb: float
    held_mb: float
    loaded_bytes: int
    peak_bytes: int
    step_seconds: float
    accuracies: list[float]
    curve: list[tuple[float, int]]

    @property
    def total_bytes(self) -> int:
        """Most memory of the process at any moment of the training."""
        return self.loaded_bytes + self.peak_bytes

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
    if len(daf.accuracies) > 1:
        caption += f" ±: standard deviation of the difference over {len(daf.accuracies)} seeds."
    table = Table(title="The same training, plain and with DAF", caption=caption)
    for heading in ("", plain.title, daf.title, "change"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("saved activations, raw", *_ratio(daf.raw_mb, daf.raw_mb, "MB"))
    table.add_row("saved activations, held", *_ratio(daf.raw_mb, daf.held_mb, "MB"))
    table.add_row("process at its peak", *_ratio(plain.total_bytes / MB, daf.total_bytes / MB, "MB"))
    table.add_row("  loaded before training", *_ratio(plain.loaded_bytes / MB, daf.loaded_bytes / MB, "MB"))
    table.add_row("  training adds", *_ratio(plain.peak_bytes / MB, daf.peak_bytes / MB, "MB"))
    table.add_row("median step time", *_ratio(plain.step_seconds * 1e3, daf.step_seconds * 1e3, "ms"))
    means = (f"{statistics.fmean(run.accuracies):.1%}" for run in (plain, daf))
    table.add_row("test accuracy", *means, _difference(plain.accuracies, daf.accuracies))
    return table


def summary(plain: RunResult, daf: RunResult) -> str:
    """Says in two sentences what DAF has changed of the memory."""
    return (
        f"Saved activations take {daf.held_mb:,.0f} MB instead of {daf.raw_mb:,.0f}. The process takes "
        f"{daf.total_bytes / MB:,.0f} MB at its peak instead of {plain.total_bytes / MB:,.0f}."
    )


def draw_curves(plain: RunResult, daf: RunResult, path: Path) -> None:
    """Draws the memory of both processes over one training step into a picture file."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for result, colour in ((plain, "tab:gray"), (daf, "tab:blue")):
        end, _ = result.curve[-1]
        progress = [seconds / end * 100 for seconds, _ in result.curve]  # sampling slows the step: show no times
        loaded = result.loaded_bytes / MB
        megabytes = [loaded + size / MB for _, size in result.curve]
        axes.plot(progress, megabytes, color=colour, label=f"{result.title} (peak {max(megabytes):.0f} MB)")
        axes.fill_between(progress, loaded, megabytes, color=colour, alpha=0.15)
        axes.axhline(loaded, color=colour, linestyle=":", label=f"{result.title}: loaded before training")
    axes.set(
        title="Memory of the process over one training step (forward, backward, update)",
        xlabel="progress of the step (% of its time)",
        ylabel="memory of the process (MB)",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _difference(plain: list[float], daf: list[float]) -> str:
    """Returns the mean difference in points, and the standard deviation over the seeds where there are several."""
    points = [100 * (with_daf - without) for without, with_daf in zip(plain, daf, strict=True)]
    spread = f" ± {statistics.stdev(points):.1f}" if len(points) > 1 else ""
    return f"{statistics.fmean(points):+.1f} points{spread}"


def _ratio(plain: float, daf: float, unit: str) -> tuple[str, str, str]:
    return f"{plain:.0f} {unit}", f"{daf:.0f} {unit}", f"{daf / plain:.2f} x"
