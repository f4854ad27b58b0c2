"""Figures of a run."""

from __future__ import annotations

from dataclasses import dataclass

from daf_core import StepStatistics
from daf_core.elastic.training import ElasticStep


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
        """Returns the figures under the names that trainers log: megabytes, their ratio, milliseconds a step."""
        steps = max(self.steps, 1)
        audits = {"daf/gradient_error": self.gradient_error, "daf/gradient_cosine": self.gradient_cosine}
        elastic = {"daf/elastic_depth": self.elastic_depth, "daf/elastic_share": self.elastic_share}
        return {
            "daf/raw_mb": self.raw_bytes / 1e6,
            "daf/held_mb": self.held_bytes / 1e6,
            "daf/ratio": self.raw_bytes / self.held_bytes if self.held_bytes else 1.0,
            "daf/pack_ms": self.pack_seconds * 1e3 / steps,
            "daf/worker_ms": self.worker_seconds * 1e3 / steps,
            "daf/unpack_ms": self.unpack_seconds * 1e3 / steps,
            "daf/dropped_mb": self.dropped_bytes / 1e6,
            "daf/spilled_mb": self.spilled_bytes / 1e6,
            "daf/audit_ms": self.audit_seconds * 1e3 / steps,
            **{name: value for name, value in audits.items() if value is not None},
            **{name: total / self.elastic_steps for name, total in elastic.items() if self.elastic_steps},
        }
