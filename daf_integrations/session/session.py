"""The contract between a trainer and DAF: one training run of one model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig, ModelError, StepStatistics
from daf_core.autograd.hook_stack import check_no_foreign_hooks
from daf_core.autograd.torch_compile import has_no_values
from daf_core.batch.micro_batches import Step
from daf_core.batch.rows import tensors_in
from daf_core.elastic.schedule import ElasticStep
from daf_core.elastic.training import ElasticTraining
from daf_core.plan.plan_file import open_plan_file
from daf_core.plan.run.runner import StepRunner
from daf_core.rewrites.while_training import rewrite_model
from daf_integrations.session.audits import Audits
from daf_integrations.session.forward_pass import ForwardPass
from daf_integrations.session.metrics import RunTotals
from daf_integrations.session.report import describe, render, title
from daf_integrations.session.saved_state import parts_of

WHOLE = "a loop that calls the model itself keeps its batches whole; daf_integrations.step(model, batch) splits them"

LossFunction = Callable[[Any], Tensor]  # returns the loss of a batch, or of some of its rows

log = getLogger("daf")


class _Thread(threading.local):
    """The session whose forward pass or measurement runs in this thread."""

    session: DAFSession | None = None


_thread = _Thread()


class DAFSession:
    """Compresses the activations of one model while it trains.

    A trainer makes these calls, in this order::

        session.attach(model, outer)
        for batch in batches:
            with session.forward(batch, loss_of) as forward:
                forward.show(loss := loss_of(batch))
            loss.backward()
            session.after_backward()
            session.before_optimizer([optimizer])
            optimizer.step()
            session.after_optimizer()
            optimizer.zero_grad()
        session.detach()

    - Gradient accumulation repeats `forward` and `after_backward` for each batch of an optimizer step.
    - A trainer that lets `run_step` run forward and backward can split batches to keep a `memory_budget`.
    - An error may end the training anywhere: `detach` then gives the model back.
    - A checkpoint holds `state()`; `load_state` follows `attach`, or comes before it.
    - `start_line`, `take_metrics` and `report` are for people to read.

    `daf_integrations.huggingface.callback` is a whole trainer's adapter, and the tests have a shorter one.

    Args:
        config: How activations are stored.
        covered: The part of the trainer that runs inside `forward`, for a warning.

    Attributes:
        totals: Figures of the run so far.
        last_step: Statistics of the last optimizer step; None before the first.
        runner: Runs steps within a budget that covers them; None without one, and where nothing is attached.
    """

    def __init__(self, config: DAFConfig, covered: str = "compute_loss and the model's forward") -> None:
        self.config = config
        self._covered = covered
        self.totals, self._recent = RunTotals(), RunTotals()
        self.last_step: StepStatistics | None = None
        self.runner: StepRunner | None = None
        self._model: nn.Module | None = None
        self._engine: ActivationEngine | None = None
        self._elastic: ElasticTraining | None = None
        self._audits: Audits | None = None
        self._learned: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = None, None
        self._attached = ExitStack()
        self._splits = False
        self._plan: str | None = None
        self._trained: str | None = None
        self._parameters: frozenset[int] = frozenset()
        self._description = ""

    def attach(self, model: nn.Module, outer: nn.Module | None = None) -> None:
        """Prepares a model for training, and detaches the one before; `outer` is what is called, if something wraps it.

        Raises:
            ConfigError: The configuration plans steps, trains elastically or computes the loss in chunks, and this
                model does not allow it; `plan_file` is not usable.
            ElasticError: Elastic training cannot go on within the share of memory that is asked for now.
            HooksActiveError: Saved-tensor hooks of someone else are active.
            ModelError: A part of the model is a ScriptModule.
            NothingToTrainError: No parameter requires a gradient.
            StateError: The state that was loaded before is not a saved one.
            UnsupportedDeviceError: There are no kernels for the model's device.
        """
        self.detach()
        check_no_foreign_hooks()
        _check_not_scripted(model)
        engine = self._engine = ActivationEngine(model, self.config)
        # Not `outer or model`: a compiled model asks the model inside for its length.
        called = model if outer is None else outer
        learned, elastic = self._learned
        undo = self._attached
        undo.callback(engine.close)
        try:
            if learned is not None:
                engine.load_state_dict(learned)
            undo.callback(rewrite_model(self.config, model, called))
            plan_file = open_plan_file(self.config, model, lambda: self.totals.steps)
            if self.config.elastic is not None:
                self._elastic = ElasticTraining(model, called, engine, self.config.elastic, plan_file=plan_file)
                undo.callback(self._elastic.close)
                if elastic is not None:
                    self._elastic.load(elastic)
            if self.config.plans_steps:
                self.runner = StepRunner(called, model, engine, self.config, self._elastic, plan_file)
                undo.callback(self.runner.close)
        except BaseException:
            self.detach()
            raise
        self._audits = Audits(engine, called, self._elastic, self.runner)
        self._model, self._parameters = model, frozenset(map(id, model.parameters()))
        self._description = describe(model)

    def detach(self) -> None:
        """Removes everything from the model, also in the middle of a step; does nothing where nothing is attached."""
        self._learned = self._learned_now()
        self._attached.close()
        self._model = self._engine = self._elastic = self._audits = self.runner = None

    @contextmanager
    def forward(
        self, batch: Any = None, loss_of: LossFunction | None = None, unmeasurable: str | None = None
    ) -> Generator[ForwardPass]:
        """Compresses what the forward pass and the loss inside save, and begins an optimizer step if none is open.

        Measures the gradient's error first where that is due. Does nothing in evaluation, export, or in such a pass.

        Args:
            batch: The step's batch.
            loss_of: Returns the loss of some rows of the batch, and leaves no trace. Without it and `unmeasurable` the
                pass is compressed, but is no part of a step.
            unmeasurable: Why no loss of a part of this batch is known; None where it is.

        Raises:
            AuditError: The error cannot be measured, and `max_gradient_error` is set.
            ConfigError: The model can no longer be trained elastically, or a planned step runs this in backward.
            HooksActiveError: Other saved-tensor hooks are active, among them those of another model's session.
            PlanError: No plan keeps the budget for a step that `run_step` does not run.
            ProfileError: That step cannot be measured.
        """
        if self._engine is None or not torch.is_grad_enabled() or self._has_no_values or self.enclosing_session:
            yield ForwardPass()
            return
        if self.runner is not None:
            self.runner.check_pass()
        audited = self._begin_pass(batch, loss_of, unmeasurable)
        audits = nullcontext() if self._audits is None else self._audits.following()
        frozen = nullcontext() if self._elastic is None else self._elastic.holding()
        with audits, frozen, self._covering(), self._engine.compress(tensors_in(batch)) as show:
            yield ForwardPass(audited, show)

    def run_step(
        self, batch: Any, loss_of: LossFunction, step: Step, restore: Callable[[], None] | None = None
    ) -> Tensor:
        """Runs forward and backward of a batch: in micro-batches, and again with less memory, as the budget demands.

        Args:
            batch: The step's batch.
            loss_of: Returns the loss of some of its rows, and leaves no trace.
            step: Runs `forward` and backward of a part of the batch; see `run_parts`. It gets the whole batch where no
                budget covers steps, or operators are recorded.
            restore: Takes back what the trainer itself has counted, at the beginning of each attempt.

        Returns:
            The loss, detached.

        Raises:
            PlanError: No plan keeps the budget.
            ProfileError: The step cannot be measured.
        """
        if self._has_no_values:
            return step(batch, 1.0, True)
        self._begin_step()
        if self.runner is None:
            loss = step(batch, 1.0, True)
        else:
            self._splits = True
            try:
                loss = self.runner.run(batch, partial(self._cover, loss_of), step, restore)
            finally:
                self._splits = False
        self.after_backward()
        return loss

    def after_backward(self) -> None:
        """Ends a backward pass: what is saved next belongs to another forward pass, and evaluation may follow."""
        if self._engine is not None:
            self._engine.finish_backward()
        self.unfreeze()

    def before_optimizer(self, optimizers: Iterable[Any], by_closure: bool = False) -> None:
        """Prepares a step of these optimizers, once all gradients are there.

        Args:
            optimizers: Those that will step.
            by_closure: Whether they call a closure that computes the gradients, so that this begins the step.

        Raises:
            ConfigError: Training is elastic, and one of them moves parameters that have no gradient.
        """
        if by_closure:
            self._begin_step()
        if self._elastic is not None:
            self._elastic.before_update(optimizers)

    def after_optimizer(self, counted: bool = True) -> StepStatistics | None:
        """Ends an optimizer step, while its gradients are still there.

        Args:
            counted: Whether this is a step of the run; False for the second of several optimizers in a step.

        Returns:
            The statistics of the step; None where it does not count or nothing is attached.

        Raises:
            ElasticError: Training is elastic, and cannot be within its share of memory, or would save nothing.
        """
        if self._elastic is not None:
            self._add_elastic(self._elastic.finish_step())
        if self._engine is None or not counted:
            return None
        if self.runner is not None:
            self.runner.planner.finish_step()
            self._plan = self.runner.planner.summary
        if self._elastic is not None:
            self._trained = self._elastic.summary
        first = self.last_step is None
        step = self.last_step = self._engine.finish_step()
        self.totals.add(step)
        self._recent.add(step)
        if first and not step.stored_as:
            log.warning(
                "DAF saw no activations in the first step, so nothing is compressed: the loss is computed outside of "
                "the part of the trainer that DAF covers (%s). Compute it there; or, as for a trainer that computes "
                "it elsewhere, give the model to daf_integrations.prepare() in place of this",
                self._covered,
            )
        return step

    def unfreeze(self) -> None:
        """Marks as trained what the user trains, for an evaluation that no `after_backward` precedes."""
        if self._elastic is not None:
            self._elastic.unfreeze()

    @property
    def enclosing_session(self) -> DAFSession | None:
        """The session whose forward pass or measurement runs in this thread, if it covers this whole model."""
        outer = _thread.session
        return outer if outer is not None and self._parameters <= outer._parameters else None

    def retract_audits(self, reason: str | None) -> None:
        """Forgets what audits have found, where they measured another loss than the one that is trained.

        Args:
            reason: Why they cannot measure it, so that training goes on without; None where they can from now on.

        Raises:
            AuditError: `max_gradient_error` is set, and there is a reason.
        """
        if self._engine is not None:
            self._engine.forget_audits()
        for totals in (self.totals, self._recent):
            totals.audits = totals.audits_above = 0
            totals.gradient_error = totals.gradient_cosine = None
        if reason is not None and self._audits is not None:
            self._audits.give_up(reason)

    def take_metrics(self) -> dict[str, float]:
        """Returns the figures of the steps since the last call, for the trainer's log; {} if there were none.

        The error of the gradient is the one measured last, perhaps before.
        """
        recent, self._recent = self._recent, RunTotals()
        recent.gradient_error, recent.gradient_cosine = self.totals.gradient_error, self.totals.gradient_cosine
        return recent.metrics() if recent.steps else {}

    def start_line(self) -> str:
        """Returns one line that says what the run is about to do."""
        return title(self.config, self._description)

    def report(self) -> str:
        """Returns the table at the end of a run."""
        return render(self.start_line(), self.totals, self._plan, self._trained)

    def state(self) -> dict[str, Any]:
        """Returns the totals and what was learned, as JSON-able values."""
        learned, elastic = self._learned_now()
        return {"totals": asdict(self.totals), "engine_state": learned, "elastic_state": elastic}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from all of what `state` returned, or, with an error, from none of it.

        Raises:
            ElasticError: Elastic training cannot go on within the share of memory that is asked for now.
            StateError: It is something else.
        """
        totals, learned, elastic = parts_of(state, self.config)
        if self._elastic is not None and elastic is not None:
            self._elastic.load(elastic)
        if self._engine is not None and learned is not None:
            self._engine.load_state_dict(learned)
        self.totals, self._learned = totals, (learned, elastic)

    def _learned_now(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Returns the states of engine and elastic training; of a detached session those of the end."""
        learned, elastic = self._learned
        return (
            learned if self._engine is None else self._engine.state_dict(),
            elastic if self._elastic is None else self._elastic.state(),
        )

    def _begin_step(self) -> None:
        """Begins an optimizer step, if none is open; no graph of the model may be alive."""
        if self._elastic is not None and self.enclosing_session is None:
            self._add_elastic(self._elastic.finish_stepped())
            self._elastic.begin_step()

    def _begin_pass(self, batch: Any, loss_of: LossFunction | None, unmeasurable: str | None) -> bool:
        """Plans and audits a forward pass of a step; says whether it was audited.

        It does neither where nothing is trained, as where a frozen critic gives another model its gradient.
        """
        if self._engine is None or self._audits is None or (loss_of is None and unmeasurable is None):
            return False
        # To ask takes .06 to 1 ms, which most passes need not wait for.
        asks = self.runner is not None or self._elastic is not None or self._engine.audit_due
        if asks and not self._trains:
            return False
        self._begin_step()
        if self.runner is not None and loss_of is not None and not self._splits:
            self.runner.prepare(batch, partial(self._cover, loss_of), WHOLE)
        with self._covering():
            return self._audits.measure(batch, loss_of, unmeasurable, self.totals)

    @property
    def _has_no_values(self) -> bool:
        return self._model is not None and has_no_values(self._model)

    @property
    def _trains(self) -> bool:
        return self._model is not None and any(each.requires_grad for each in self._model.parameters())

    def _cover(self, loss_of: LossFunction, rows: Any) -> Tensor:
        with self._covering():
            return loss_of(rows)

    @contextmanager
    def _covering(self) -> Generator[None]:
        """Has sessions of the same model, or of a part of it, do nothing inside."""
        outer, _thread.session = _thread.session, self
        try:
            yield
        finally:
            _thread.session = outer

    def _add_elastic(self, step: ElasticStep | None) -> None:
        if step is not None:
            self.totals.add_elastic(step)
            self._recent.add_elastic(step)


def _check_not_scripted(model: nn.Module) -> None:
    """Refuses a model with a part in TorchScript, which allows no forward hook and runs none inside of its graphs."""
    name = next((name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if name is not None:
        where = f"{name} in {type(model).__name__}" if name else "the model"
        raise ModelError(
            f"{where} is a ScriptModule, whose saved activations DAF cannot tell apart: TorchScript allows no forward "
            "hooks. Train the module that torch.jit.script or torch.jit.trace was given, perhaps with torch.compile, "
            "and script it after training"
        )
