"""One training run with DAF, for any framework: attach to a model, compress each forward pass, report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from daf_core import (
    ActivationBudgetError,
    ActivationEngine,
    AuditError,
    DAFConfig,
    GradientError,
    HooksActiveError,
    StepStatistics,
)
from daf_core.autograd.hook_stack import check_no_foreign_hooks
from daf_core.batch.samples import SHARE, few_rows
from daf_core.elastic.schedule import ElasticStep
from daf_core.elastic.training import ElasticTraining
from daf_core.plan.plan_file import open_plan_file
from daf_core.plan.run.runner import StepRunner
from daf_core.rewrites.loss_option import chunk_loss
from daf_core.snapshots.measurement import missing_values
from daf_core.unsupported.models import AUDITS, UNMEASURED
from daf_core.unsupported.table import Context, unsupported_reasons
from daf_integrations.session.audit_warnings import AuditWarnings, warn_of_large_graphs
from daf_integrations.session.describe import describe, title
from daf_integrations.session.metrics import RunTotals
from daf_integrations.session.saved_state import SavedState

LEAST_SHARE = 1 / 1024
"""Part of a batch below which an audit is given up that does not fit in the memory budget."""

log = getLogger("daf")


class _Thread(threading.local):
    """What runs in this thread.

    Attributes:
        session: Whose scope or audit is open.
    """

    session: DAFSession | None = None


_thread = _Thread()


class DAFSession:
    """Compresses the activations of one model while it trains.

    Args:
        config: How activations are stored.
        covered: What of the trainer runs inside of `scope`.

    Attributes:
        runner: Runs steps within a budget that covers them; None where there is none, or nothing is attached.
    """

    def __init__(self, config: DAFConfig, covered: str = "compute_loss and the model's forward") -> None:
        self.config = config
        self._covered = covered
        self.totals = RunTotals()
        self._engine_state: Mapping[str, Any] | None = None
        self._share: float | None = SHARE
        self._called = False
        self._unaudited: list[str] = []
        self._warnings = AuditWarnings(config)
        self.last_step: StepStatistics | None = None
        self._recent = RunTotals()
        self._engine: ActivationEngine | None = None
        self.runner: StepRunner | None = None
        self._elastic: ElasticTraining | None = None
        self._elastic_state: Mapping[str, Any] | None = None
        self._undo_loss: Callable[[], None] | None = None
        self._plan: str | None = None
        self._trained: str | None = None
        self._parameters: frozenset[int] = frozenset()
        self._description = ""

    def attach(self, model: nn.Module, outer: nn.Module | None = None) -> None:
        """Prepares the model; a model that was attached before is let go first.

        Args:
            model: The model.
            outer: The model as it is called, if that is something around it.

        Raises:
            ConfigError: Steps are to be planned, training to be elastic or the loss computed in chunks, and this
                model's cannot; `plan_file` is not usable.
            ElasticError: Elastic training cannot go on within the share of memory that is asked for now.
            HooksActiveError: Saved-tensor hooks of someone else are active.
            NothingToTrainError: No parameter requires a gradient.
            StateError: What was learned before is no saved state.
            UnsupportedDeviceError: There are no kernels for the model's device.
        """
        self.detach()
        check_no_foreign_hooks()
        self._engine = ActivationEngine(model, self.config)
        # Not `outer or model`: a compiled model asks the model inside for its length.
        called = model if outer is None else outer
        try:
            if self._engine_state is not None:
                self._engine.load_state_dict(self._engine_state)
            plan_file = open_plan_file(self.config, model, lambda: self.totals.steps)
            self._undo_loss = chunk_loss(self.config, called)
            elastic = self.config.elastic
            if elastic is not None:
                self._elastic = ElasticTraining(model, called, self._engine, elastic, plan_file=plan_file)
                if self._elastic_state is not None:
                    self._elastic.load(self._elastic_state)
            if self.config.plans_steps:
                self.runner = StepRunner(called, model, self._engine, self.config, self._elastic, plan_file)
        except BaseException:
            self.detach()
            raise
        self._parameters = frozenset(map(id, model.parameters()))
        self._description = describe(model)

    def detach(self) -> None:
        """Removes everything from the model."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None
        if self._elastic is not None:
            self._elastic_state = self._elastic.state()
            self._elastic.close()
            self._elastic = None
        if self._engine is not None:
            self._engine_state = self._engine.state_dict()
            self._engine.close()
            self._engine = None
        if self._undo_loss is not None:
            self._undo_loss()
            self._undo_loss = None

    def begin_step(self) -> None:
        """Begins an optimizer step, unless one has begun already; to be called while no graph of the model is alive."""
        if self._elastic is not None and self.enclosing_session is None:
            self._add_elastic(self._elastic.finish_stepped())
            self._elastic.begin_step()

    def unfreeze(self) -> None:
        """See `ElasticTraining.unfreeze`."""
        if self._elastic is not None:
            self._elastic.unfreeze()

    def before_update(self, optimizers: Iterable[Any]) -> None:
        """Is to be called between backward and the step of these optimizers."""
        if self._elastic is not None:
            self._elastic.before_update(optimizers)

    def after_update(self) -> None:
        """Is to be called after the optimizers' step, while gradients are still there; `finish_step` does, too.

        Raises:
            ElasticError: Training is elastic, and cannot be within its share of memory, or would save nothing.
        """
        self._add_elastic(None if self._elastic is None else self._elastic.finish_step())

    def _add_elastic(self, step: ElasticStep | None) -> None:
        if step is not None:
            self.totals.add_elastic(step)
            self._recent.add_elastic(step)

    @property
    def chunks_loss(self) -> bool:
        """Whether the model's loss may be computed in chunks."""
        return self._undo_loss is not None

    @property
    def enclosing_session(self) -> DAFSession | None:
        """The session whose scope or audit is open in this thread, if it knows all parameters of this model."""
        outer = _thread.session
        return outer if outer is not None and self._parameters <= outer._parameters else None

    @contextmanager
    def scope(self) -> Generator[None]:
        """Compresses what is saved inside.

        Does nothing where no gradient is recorded, as in evaluation, and inside a scope or audit that covers the model.

        Raises:
            HooksActiveError: Other saved-tensor hooks are active, among them the scope of another model.
        """
        if self._engine is None or not torch.is_grad_enabled() or self.enclosing_session:
            yield
            return
        held = nullcontext() if self._elastic is None else self._elastic.holding()
        with held, self.suppress_nested(), self._engine.compress():
            yield

    @contextmanager
    def suppress_nested(self) -> Generator[None]:
        """Has scopes of others that this session covers do nothing inside."""
        outer, _thread.session = _thread.session, self
        try:
            yield
        finally:
            _thread.session = outer

    def audit(self, model: nn.Module, batch: Any, loss_function: Callable[[Any], Tensor]) -> bool:
        """Measures the error of the gradient on a few rows, where that is due and a gradient is recorded.

        Says whether it was measured.

        Does nothing inside a scope or audit that covers the model. To be called before the forward pass of a step,
        outside of `scope`.

        Args:
            model: The model as it is called, perhaps compiled.
            batch: The step's batch.
            loss_function: Returns the loss of a part of it.

        Raises:
            AuditError: It cannot be measured, and `max_gradient_error` is set.
        """
        if self._engine is None or self.enclosing_session:
            return False
        if not self._called:
            if missing_values(model) is not None:
                self._engine.postpone_audit()  # the first pass makes them
                return False
            self._called, self._unaudited = True, unsupported_reasons(AUDITS, Context(model))
            warn_of_large_graphs(model)
        if not self._audit_due:
            return False
        if self._elastic is not None and not self._elastic.trains_most:
            self._engine.postpone_audit()  # what is not trained here would not be measured
            return False
        if self._keeps_all:
            return False
        if self._unaudited:
            self.give_up_audits(self._unaudited[0])
            return False
        try:
            self._warnings.add(self._audit(self._engine, batch, loss_function), self.totals)
        except HooksActiveError:
            raise
        except Exception as error:  # whatever a model does with a part of a batch: training must not end for it
            self.give_up_audits(repr(error), error)
            return False
        return True

    def give_up_audits(self, reason: str, cause: Exception | None = None) -> None:
        """Trains on without audits, where one is due that is not possible, and says so once.

        Raises:
            AuditError: `max_gradient_error` is set.
        """
        if self._audit_due:
            self._give_up_audits(reason, cause)

    def retract_audits(self, reason: str | None) -> None:
        """Forgets what audits have found, as they measured something else than what is trained.

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
        if reason is not None:
            self._give_up_audits(reason)

    def _give_up_audits(self, reason: str, cause: Exception | None = None) -> None:
        if self.config.max_gradient_error is not None:
            measured = UNMEASURED.format(reason)
            raise AuditError(f"{measured}. max_gradient_error cannot be kept without; leave it out") from cause
        self._share = None
        log.warning("%s", AUDITS.error.format(reason))

    @property
    def _keeps_all(self) -> bool:
        """Whether the plan for this step compresses nothing, so that there is no error to measure."""
        plan = None if self.runner is None else self.runner.plan
        return plan is not None and plan.exact

    @property
    def _audit_due(self) -> bool:
        due = self._engine is not None and self._share is not None and self._engine.audit_due
        return due and torch.is_grad_enabled()

    def _audit(
        self, engine: ActivationEngine, batch: Any, loss_function: Callable[[Any], Tensor]
    ) -> GradientError | None:
        """Audits as many rows as fit in the memory budget."""
        with self.suppress_nested(), nullcontext() if self._elastic is None else self._elastic.everything():
            while True:
                assert self._share is not None
                try:
                    return engine.audit(partial(loss_function, few_rows(batch, self._share)))
                except ActivationBudgetError:
                    if self._share < LEAST_SHARE:
                        raise
                    self._share /= 2

    def finish_backward(self) -> None:
        """A backward pass ended inside of `scope`: what is saved next counts as another forward pass."""
        if self._engine is not None:
            self._engine.finish_backward()

    def finish_step(self) -> StepStatistics | None:
        """Ends an optimizer step and returns its statistics, or None when not attached.

        Raises:
            ElasticError: See `after_update`.
        """
        if self._engine is None:
            return None
        self.after_update()
        if self.runner is not None:
            self.runner.finish_step()
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
                "the part of the trainer that DAF covers (%s). Compute it there, or use "
                "daf_core.ActivationEngine.compress() around your own forward pass",
                self._covered,
            )
        return step

    def take_metrics(self) -> dict[str, float]:
        """Returns the figures of the steps since the last call, for the trainer's log; {} if there were none.

        The error of the gradient is the one measured last, perhaps before.
        """
        recent, self._recent = self._recent, RunTotals()
        recent.gradient_error, recent.gradient_cosine = self.totals.gradient_error, self.totals.gradient_cosine
        return recent.metrics() if recent.steps else {}

    def start_line(self) -> str:
        """Says what is about to happen, in one line."""
        return title(self.config, self._description)

    def report(self) -> str:
        """Returns the table at the end of a run."""
        from daf_integrations.session.report import render  # rich takes time to import

        return render(self.start_line(), self.totals, self._plan, self._trained)

    def state(self) -> dict[str, Any]:
        """Returns the totals and what the engine has learned, as JSON-able values."""
        learned = self._engine_state if self._engine is None else self._engine.state_dict()
        elastic = self._elastic_state if self._elastic is None else self._elastic.state()
        return {"totals": asdict(self.totals), "engine_state": learned, "elastic_state": elastic}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned, attached or not: from all of it, or with an error from nothing.

        Raises:
            ElasticError: Elastic training cannot go on within the share of memory that is asked for now.
            StateError: It is something else.
        """
        totals, learned, elastic = SavedState.of(state, self.config)
        if self._elastic is not None and elastic is not None:
            self._elastic.load(elastic)
        if self._engine is not None and learned is not None:
            self._engine.load_state_dict(learned)
        self.totals, self._engine_state, self._elastic_state = totals, learned, elastic
