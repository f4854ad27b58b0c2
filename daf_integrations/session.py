"""One training run with DAF, for any framework: attach to a model, compress each forward pass, report."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import getLogger

import torch
from humanfriendly import format_size
from torch import nn

from daf_core import ActivationEngine, DAFConfig, StepStatistics
from daf_core.hook_stack import refuse_foreign_hooks

log = getLogger("daf")


@dataclass
class RunTotals:
    """Sums over the steps of a run, as plain numbers that can be saved with a checkpoint.

    Attributes:
        steps: Training steps.
        raw_bytes: The most bytes of saved activations that plain training would have kept.
        held_bytes: The most bytes that were held instead.
        pack_seconds: Time spent encoding.
        unpack_seconds: Time spent decoding.
        dropped_bytes: The most bytes that were given up in a step to keep the memory budget.
        spilled_bytes: The most bytes that were written to the spill file in a step.
    """

    steps: int = 0
    raw_bytes: int = 0
    held_bytes: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    dropped_bytes: int = 0
    spilled_bytes: int = 0

    def add(self, step: StepStatistics) -> None:
        """Adds a step."""
        self.steps += 1
        self.raw_bytes = max(self.raw_bytes, step.raw_bytes)
        self.held_bytes = max(self.held_bytes, step.held_bytes)
        self.pack_seconds += step.pack_seconds
        self.unpack_seconds += step.unpack_seconds
        self.dropped_bytes = max(self.dropped_bytes, step.dropped_bytes)
        self.spilled_bytes = max(self.spilled_bytes, step.spilled_bytes)

    def metrics(self) -> dict[str, float]:
        """Returns the figures under the names that trainers log: megabytes, their ratio, milliseconds a step."""
        steps = max(self.steps, 1)
        return {
            "daf/raw_mb": self.raw_bytes / 1e6,
            "daf/held_mb": self.held_bytes / 1e6,
            "daf/ratio": self.raw_bytes / self.held_bytes if self.held_bytes else 1.0,
            "daf/pack_ms": self.pack_seconds * 1e3 / steps,
            "daf/unpack_ms": self.unpack_seconds * 1e3 / steps,
            "daf/dropped_mb": self.dropped_bytes / 1e6,
            "daf/spilled_mb": self.spilled_bytes / 1e6,
        }


class DAFSession:
    """Compresses the activations of one model while it trains.

    Args:
        config: How activations are stored.
        totals: Figures of an earlier part of the run, when it is resumed.
    """

    def __init__(self, config: DAFConfig, totals: RunTotals | None = None) -> None:
        self.config = config
        self.totals = totals or RunTotals()
        self.last_step: StepStatistics | None = None
        self._recent = RunTotals()
        self._engine: ActivationEngine | None = None
        self._description = ""

    def attach(self, model: nn.Module) -> None:
        """Prepares the model; a model that was attached before is let go first.

        Raises:
            HooksActiveError: Saved-tensor hooks of someone else are active.
            NothingToTrainError: No parameter requires a gradient.
            UnsupportedDeviceError: There are no kernels for the model's device.
        """
        self.detach()
        refuse_foreign_hooks()
        self._engine = ActivationEngine(model, self.config)
        self._description = _describe(model)

    def detach(self) -> None:
        """Removes everything from the model."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @contextmanager
    def scope(self) -> Generator[None]:
        """Compresses what is saved inside; does nothing where no gradient is recorded, as in evaluation."""
        if self._engine is None or not torch.is_grad_enabled():
            yield
            return
        with self._engine.compress():
            yield

    def finish_step(self) -> StepStatistics | None:
        """Ends an optimizer step and returns its statistics, or None when not attached."""
        if self._engine is None:
            return None
        first = self.last_step is None
        step = self.last_step = self._engine.finish_step()
        self.totals.add(step)
        self._recent.add(step)
        if first and not step.stored_as:
            log.warning(
                "DAF saw no activations in the first step, so nothing is compressed: the loss is computed outside of "
                "the part of the trainer that DAF covers (compute_loss and the model's forward). Call them, or use "
                "daf_core.ActivationEngine.compress() around your own forward pass"
            )
        return step

    def take_metrics(self) -> dict[str, float]:
        """Returns the figures of the steps since the last call, for the trainer's log; {} if there were none."""
        recent, self._recent = self._recent, RunTotals()
        return recent.metrics() if recent.steps else {}

    def start_line(self) -> str:
        """Says what is about to happen, in one line."""
        config = self.config
        stored = "exact forms only" if config.precision == "exact" else f"{config.precision} bits, {config.rounding}"
        size = config.memory_budget
        budget = f"budget {format_size(size)}" if isinstance(size, int) else f"{size or 'no'} budget"
        return f"DAF stores saved activations in {stored}; {budget}; {self._description}"

    def report(self) -> str:
        """Returns the table at the end of a run."""
        from daf_integrations.report import render

        return render(self.start_line(), self.totals.metrics(), self.totals.steps)

    def state(self) -> dict[str, float]:
        """Returns the totals as JSON-able numbers."""
        return asdict(self.totals)


def _describe(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    return f"{type(model).__name__} on {parameters[0].device}, {trained:,} of {total:,} parameters trained"
