"""One way to run training steps, in a process of its own: as they are, with checkpointing, or in a memory budget.

``benchmarks.budgets`` runs ``python -m benchmarks.budget_worker TASK RESULT``; TASK is the JSON of a ``BudgetTask``,
RESULT the file that the JSON of the ``BudgetMeasurement`` is written to.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # the first checkpoint would load it: code, not activations
from torch import Tensor, nn

from benchmarks.timing import time_in_turn, wall_timer
from benchmarks.zoo.models import SEED, build_batch, build_model
from daf_core import ActivationEngine, DAFConfig
from daf_core.errors import PlanError
from daf_core.memory.system.release import release_free_memory
from daf_core.plan.observe.meter import TensorMeter
from daf_core.plan.run.runner import StepRunner
from daf_core.plan.search.planner import Plan
from daf_integrations.cli.bench.methods import open_method
from daf_integrations.cli.bench.process_memory import peak_bytes, reset_peak, resident_bytes
from daf_integrations.cli.bench.summary import compare_gradients, compare_lora_gradients, paired_ratio
from daf_integrations.cli.bench.worker import gradients_of, serve, switch_dropout_off
from daf_integrations.cli.doctor import loaded_allocator

DROPOUT = 0.1
SETTLING = 3
"""Steps before any that counts: the first one measures what it takes, and the pool grows in the others."""
ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class BudgetTask:
    """What one process runs; ``budget`` is in bytes, 0 for the least there is, and only looked at by method "daf"."""

    method: str
    model: str
    batch: int
    seq: int
    rounds: int
    threads: int
    budget: int = 0


@dataclass(frozen=True, kw_only=True)
class BudgetMeasurement:
    """What one process measured.

    ``peak_bytes`` are those of tensors and of DAF's pool at once in a step, above the model, its gradients and the
    batch; ``peak_rss_bytes`` the same for the memory of the process. ``step_ratio`` is to plain steps run in turn.
    The error of the gradient is measured without dropout, as micro-batches draw other masks.
    """

    budget_bytes: int | None
    peak_bytes: int
    peak_rss_bytes: int
    step_seconds: float
    plain_seconds: float
    step_ratio: float
    gradient_error: float
    lora_gradient_error: float
    allocator: str
    parts: int = 1
    bits: int | None = None
    outside: str = ""
    blocks: tuple[str, ...] = ()
    predicted_bytes: int | None = None
    predicted_seconds: float | None = None


class PlainSteps:
    """Forward and backward passes, perhaps with activation checkpointing."""

    plan: Plan | None = None
    budget: int | None = None

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], checkpointing: bool) -> None:
        self._model = model
        self._batch = batch
        if checkpointing:
            open_method("checkpoint", model)

    def run(self) -> None:
        self._model(**self._batch).loss.backward()

    def resident_bytes(self) -> int:
        return 0

    def close(self) -> None:
        return


class BudgetedSteps:
    """Steps that keep a budget."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], budget: int) -> None:
        self._model = model
        self._batch = batch
        self.budget = budget or 1
        self._open()
        if not budget:
            self._lower_to_least()

    @property
    def plan(self) -> Plan | None:
        return self._runner.plan

    def run(self) -> None:
        self._runner.run(self._batch, self._loss, self._step)
        self._engine.finish_step()
        self._runner.planner.finish_step()

    def resident_bytes(self) -> int:
        return self._engine.resident_bytes

    def close(self) -> None:
        self._runner.close()
        self._engine.close()

    def _open(self) -> None:
        config = DAFConfig(memory_budget=self.budget, audit_every=None)
        self._engine = ActivationEngine(self._model, config)
        self._runner = StepRunner(self._model, self._model, self._engine, config)

    def _lower_to_least(self) -> None:
        """Takes the least budget that an error names; with a budget, more rows are measured and it may change."""
        for _ in range(ATTEMPTS):
            try:
                self._runner.run(self._batch, self._loss, self._step)
            except PlanError as error:
                self.close()
                self.budget = error.least
                self._open()
            else:
                return

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self._model(**batch).loss

    def _step(self, part: dict[str, Tensor], weight: float, _last: bool) -> Tensor:
        with self._engine.compress():
            loss = self._loss(part) * weight
        loss.backward()
        return loss.detach()


def measure(task: BudgetTask) -> BudgetMeasurement:
    """Runs a task in this process: memory first, before plain steps take theirs, then time, then the gradient."""
    torch.set_num_threads(task.threads)
    model = build_model(task.model, lora_dropout=DROPOUT)
    batch = build_batch(task.model, batch=task.batch, seq=task.seq, image=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    steps = _open(task, model, batch)
    release_free_memory()
    level = resident_bytes()
    for _ in range(SETTLING):
        steps.run()
    release_free_memory()
    reset_peak()
    for _ in range(SETTLING):
        steps.run()
    peak_rss = peak_bytes() - level
    with TensorMeter(steps.resident_bytes) as meter:
        steps.run()
        peak = meter.take_peak()
    plain_model = build_model(task.model, lora_dropout=DROPOUT)
    plain = PlainSteps(plain_model, batch, checkpointing=False)
    seconds = time_in_turn({"plain": _timed(plain), "steps": _timed(steps)}, task.rounds)
    gradients, exact = (_gradients(*pair) for pair in ((model, steps.run), (plain_model, plain.run)))
    plan = steps.plan
    steps.close()
    return BudgetMeasurement(
        **({} if plan is None else _figures(plan)),
        budget_bytes=steps.budget,
        peak_bytes=peak,
        peak_rss_bytes=peak_rss,
        step_seconds=statistics.median(seconds["steps"]),
        plain_seconds=statistics.median(seconds["plain"]),
        step_ratio=paired_ratio(seconds["steps"], seconds["plain"]),
        gradient_error=compare_gradients(gradients, exact).error,
        lora_gradient_error=compare_lora_gradients(gradients, exact).error,
        allocator=loaded_allocator(),
    )


def _open(task: BudgetTask, model: nn.Module, batch: dict[str, Tensor]) -> PlainSteps | BudgetedSteps:
    torch.manual_seed(SEED)
    if task.method == "daf":
        return BudgetedSteps(model, batch, task.budget)
    return PlainSteps(model, batch, checkpointing=task.method == "checkpoint")


def _timed(steps: PlainSteps | BudgetedSteps) -> Callable[[], float]:
    return lambda: wall_timer(steps.run)


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "parts": plan.parts,
        "bits": plan.bits,
        "outside": plan.outside.name,
        "blocks": tuple(treatment.name for treatment in plan.blocks),
        "predicted_bytes": plan.forecast.peak_bytes,
        "predicted_seconds": plan.forecast.seconds,
    }


def _gradients(model: nn.Module, run: Callable[[], None]) -> dict[str, Tensor]:
    """Returns the gradient without dropout."""
    switch_dropout_off(model)
    model.zero_grad()
    run()
    return gradients_of(model)


if __name__ == "__main__":
    serve(sys.argv[1:], lambda fields: measure(BudgetTask(**fields)))
