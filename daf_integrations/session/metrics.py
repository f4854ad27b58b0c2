"""Figures of a run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from daf_core import StateError, StepStatistics
from daf_core.elastic.schedule import ElasticStep
from daf_core.state_checks import DAMAGED, amount, count, number


@dataclass
class RunTotals:
    """Figures over the steps of a run, as plain numbers that can be saved with a checkpoint; see `METRICS`.

    Bytes are those of the step that has the most, seconds and the figures of elastic training are sums, and what audits
    have found is of the last one.
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
    audits_above: int = 0  # how many of the `audits` have found an error above `max_gradient_error`
    elastic_steps: int = 0
    elastic_depth: int = 0
    elastic_share: float = 0.0

    @classmethod
    def from_state(cls, state: object) -> RunTotals:
        """Returns the sums that were saved as a mapping; those that are missing, as of an older version, begin anew.

        Raises:
            StateError: It is something else, or one of them is no such number.
        """
        checks: dict[type, Callable[[Any], object]] = {  # by the type that a sum begins with
            int: count,
            float: amount,
            type(None): lambda figure: figure is None or number(figure),
        }
        try:
            figures = cast("Mapping[str, Any]", state)
            totals = cls(**figures)
            for name, figure in figures.items():
                checks[type(getattr(cls, name))](figure)
        except DAMAGED as error:
            raise StateError(f"these are no saved totals of a run with DAF: {error}") from error
        return totals

    def add(self, step: StepStatistics) -> None:
        """Adds a step."""
        self.steps += 1
        for name, combine in _COMBINED.items():
            setattr(self, name, combine(getattr(self, name), getattr(step, name)))
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


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("raw_bytes", "held_bytes", "dropped_bytes", "spilled_bytes"), max),
    **dict.fromkeys(("pack_seconds", "worker_seconds", "unpack_seconds", "audit_seconds"), operator.add),
}
"""How totals take in the statistics of a step."""


@dataclass(frozen=True)
class Metric:
    """A figure that trainers log: what it is, for the reference, and its value; None where there is none."""

    meaning: str
    of: Callable[[RunTotals], float | None]


def _mb(name: str) -> Callable[[RunTotals], float]:
    return lambda run: getattr(run, name) / 1e6


def _ms(name: str) -> Callable[[RunTotals], float]:
    return lambda run: getattr(run, name) * 1e3 / max(run.steps, 1)


def _elastic_mean(name: str) -> Callable[[RunTotals], float | None]:
    return lambda run: getattr(run, name) / run.elastic_steps if run.elastic_steps else None


METRICS = {
    "daf/raw_mb": Metric(
        "Megabytes of saved activations that plain training keeps, less what rewritten operators (a loss in chunks, "
        "GELU) do not save, but with what a plan recomputes.",
        _mb("raw_bytes"),
    ),
    "daf/held_mb": Metric("Megabytes that were held instead.", _mb("held_bytes")),
    "daf/ratio": Metric(
        "The first of these over the second.",
        lambda run: run.raw_bytes / run.held_bytes if run.held_bytes else 1.0,
    ),
    "daf/pack_ms": Metric(
        "Milliseconds a step that the training's own threads spent on encoding.", _ms("pack_seconds")
    ),
    "daf/worker_ms": Metric(
        "Milliseconds a step that DAF's own threads spent on encoding meanwhile.", _ms("worker_seconds")
    ),
    "daf/unpack_ms": Metric("Milliseconds a step spent on decoding.", _ms("unpack_seconds")),
    "daf/dropped_mb": Metric("Megabytes given up to keep the memory budget.", _mb("dropped_bytes")),
    "daf/spilled_mb": Metric(
        "Megabytes moved to `spill_dir`, or from a GPU to main memory, to keep the memory budget.", _mb("spilled_bytes")
    ),
    "daf/audit_ms": Metric("Milliseconds a step spent on measuring the error of the gradient.", _ms("audit_seconds")),
    "daf/gradient_error": Metric(
        "Length of the gradient's error over the length of the exact gradient, at the last audit; after the first one.",
        lambda run: run.gradient_error,
    ),
    "daf/gradient_cosine": Metric(
        "Cosine of the angle between the compressed and the exact gradient, then.", lambda run: run.gradient_cosine
    ),
    "daf/elastic_depth": Metric(
        "Blocks that built a graph, the mean of the steps; with `elastic`.", _elastic_mean("elastic_depth")
    ),
    "daf/elastic_share": Metric(
        "Time that steps take, relative to steps that train everything, as predicted; with `elastic`.",
        _elastic_mean("elastic_share"),
    ),
}
"""The figures, in the order in which they are logged."""
