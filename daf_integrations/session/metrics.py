"""Figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from daf_core import StateError, StepStatistics
from daf_core.elastic.schedule import ElasticStep
from daf_core.state_checks import DAMAGED, amount, count, number


@dataclass
class RunTotals:
    """Sums over the steps of a run, as plain numbers that can be saved with a checkpoint.

    Attributes:
        steps: Training steps.
        raw_bytes: The most bytes of saved activations that plain training would have kept.
        held_bytes: The most bytes that were held instead.
        pack_seconds: Time spent encoding, by the threads that train.
        worker_seconds: Time that workers spent encoding meanwhile.
        unpack_seconds: Time spent decoding.
        dropped_bytes: The most bytes that were given up in a step to keep the memory budget.
        spilled_bytes: The most bytes that were written to the spill file in a step.
        audit_seconds: Time spent on measuring the error of the gradient.
        gradient_error: The error that was measured last, relative to the gradient's length; None before the first.
        gradient_cosine: Cosine of the angle between compressed and exact gradient, then.
        audits: How often the error was measured.
        audits_above: How often it was above `max_gradient_error`.
        elastic_steps: Steps of elastic training.
        elastic_depth: Blocks that built a graph in these, their sum.
        elastic_share: The time that they take, relative to steps that train everything, their sum.
    """

    steps: int = 0
    raw_bytes: int = 0
    held_bytes: int = 0
    pack_seconds: float = 0.0
    worker_seconds: float = 0.0
    unpack_seconds: float = 0.0
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    audit_seconds: float = 0.0
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    audits: int = 0
    audits_above: int = 0
    elastic_steps: int = 0
    elastic_depth: int = 0
    elastic_share: float = 0.0

    @classmethod
    def from_state(cls, state: object) -> RunTotals:
        """Returns the sums that were saved as a mapping; those that are missing, as of an older version, begin anew.

        Raises:
            StateError: It is something else, or one of them is no such number.
        """
        try:
            figures = cast("Mapping[str, Any]", state)
            totals = cls(**figures)
            for name, figure in figures.items():
                _CHECKS[type(getattr(cls, name))](figure)
        except DAMAGED as error:
            raise StateError(f"these are no saved totals of a run with DAF: {error}") from error
        return totals

    def add(self, step: StepStatistics) -> None:
        """Adds a step."""
        self.steps += 1
        self.raw_bytes = max(self.raw_bytes, step.raw_bytes)
        self.held_bytes = max(self.held_bytes, step.held_bytes)
        self.pack_seconds += step.pack_seconds
        self.worker_seconds += step.worker_seconds
        self.unpack_seconds += step.unpack_seconds
        self.dropped_bytes = max(self.dropped_bytes, step.dropped_bytes)
        self.spilled_bytes = max(self.spilled_bytes, step.spilled_bytes)
        self.audit_seconds += step.audit_seconds
        if step.gradient_error is not None:
            self.gradient_error, self.gradient_cosine = step.gradient_error.error, step.gradient_error.cosine

    def add_elastic(self, step: ElasticStep) -> None:
        """Adds what a step of elastic training trained."""
        self.elastic_steps += 1
        self.elastic_depth += step.depth
        self.elastic_share += step.share

    def metrics(self) -> dict[str, float]:
        """Returns the figures under the names that trainers log, those that there are; see `METRICS`."""
        figures = {name: metric.of(self) for name, metric in METRICS.items()}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def ms_per_step(self, seconds: float) -> float:
        """Returns a time of all steps as milliseconds a step."""
        return seconds * 1e3 / max(self.steps, 1)

    def mean_per_elastic_step(self, total: float) -> float | None:
        """Returns a sum over steps of elastic training as their mean; None if there were none."""
        return total / self.elastic_steps if self.elastic_steps else None


def _measured(figure: Any) -> None:
    if figure is not None:
        number(figure)


_CHECKS: dict[type, Callable[[Any], object]] = {int: count, float: amount, type(None): _measured}
"""What a saved sum has to be, by the type that it begins with."""


@dataclass(frozen=True)
class Metric:
    """A figure that trainers log.

    Attributes:
        meaning: What it is, for the reference.
        of: Takes it from the sums; None where there is none.
    """

    meaning: str
    of: Callable[[RunTotals], float | None]


METRICS = {
    "daf/raw_mb": Metric("Megabytes of saved activations that plain training keeps.", lambda run: run.raw_bytes / 1e6),
    "daf/held_mb": Metric("Megabytes that were held instead.", lambda run: run.held_bytes / 1e6),
    "daf/ratio": Metric(
        "The first of these over the second.",
        lambda run: run.raw_bytes / run.held_bytes if run.held_bytes else 1.0,
    ),
    "daf/pack_ms": Metric(
        "Milliseconds a step that the training's own threads spent on encoding.",
        lambda run: run.ms_per_step(run.pack_seconds),
    ),
    "daf/worker_ms": Metric(
        "Milliseconds a step that DAF's own threads spent on encoding meanwhile.",
        lambda run: run.ms_per_step(run.worker_seconds),
    ),
    "daf/unpack_ms": Metric("Milliseconds a step spent on decoding.", lambda run: run.ms_per_step(run.unpack_seconds)),
    "daf/dropped_mb": Metric("Megabytes given up to keep the memory budget.", lambda run: run.dropped_bytes / 1e6),
    "daf/spilled_mb": Metric(
        "Megabytes moved to `spill_dir`, or from a GPU to main memory, to keep the memory budget.",
        lambda run: run.spilled_bytes / 1e6,
    ),
    "daf/audit_ms": Metric(
        "Milliseconds a step spent on measuring the error of the gradient.",
        lambda run: run.ms_per_step(run.audit_seconds),
    ),
    "daf/gradient_error": Metric(
        "Length of the gradient's error over the length of the exact gradient, at the last audit; after the first one.",
        lambda run: run.gradient_error,
    ),
    "daf/gradient_cosine": Metric(
        "Cosine of the angle between the compressed and the exact gradient, then.", lambda run: run.gradient_cosine
    ),
    "daf/elastic_depth": Metric(
        "Blocks that built a graph, the mean of the steps; with `elastic`.",
        lambda run: run.mean_per_elastic_step(run.elastic_depth),
    ),
    "daf/elastic_share": Metric(
        "Time that steps take, relative to steps that train everything, as predicted; with `elastic`.",
        lambda run: run.mean_per_elastic_step(run.elastic_share),
    ),
}
"""The figures, in the order in which they are logged."""
