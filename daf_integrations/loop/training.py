"""The training of one model in a loop of the user's own: its forward passes, optimizer steps and figures."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from daf_core import DAFConfig, ProfileError
from daf_core.autograd.torch_compile import COMPILED, has_no_values, is_forward_compiled
from daf_core.distributed import called, exchanging
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.attributes import referred_kept
from daf_core.unsupported.models import PLANS
from daf_core.unsupported.table import Context, unsupported_reasons
from daf_integrations.session.forward_pass import ForwardPass
from daf_integrations.session.metrics import RunTotals
from daf_integrations.session.own_loss import LossWatch, loss_in
from daf_integrations.session.report import render
from daf_integrations.session.session import DAFSession, LossFunction
from daf_integrations.session.unwrap import alone, any_backward, is_redirected, unwrap_model

UNSEEN_STEPS = 3
"""Optimizer steps without a compressed pass before a warning: libraries take one of their own to fill their state."""

LOSS_OUTSIDE = "the loss is computed in a scope of its own, so it cannot be computed again"

OTHER_LOSS = (
    "backward ran on something else than the loss that the model returns. daf_integrations.step(model, batch, "
    "loss_function) measures that of loss_function"
)

WRAPPED_LATER = (
    "the model was prepared before it was put into DistributedDataParallel, so that each process would plan by itself; "
    "wrap it first, and prepare it then"
)

OTHER_METHOD = "Lightning Fabric calls another method than forward, such as training_step, and calls it once"

log = getLogger("daf")


@dataclass
class ExitSummary:
    """What is said of a training when the program ends, without keeping its model alive until then."""

    title: str
    totals: RunTotals
    shown: bool = False  # whether the table is printed
    covered: bool = False  # whether another scope compressed the model
    compressed: bool = False  # whether any pass of the model was
    # The process that it is said in: a forked child knows of it, and ends as well.
    process: int = field(default_factory=os.getpid)


class Training:
    """Compresses a model's forward passes; a step ends when an optimizer with its parameters has stepped.

    A step that a gradient scaler skips counts with the next one. Where several optimizers share the model, the first
    of them ends the step.

    The model is given as it is called, perhaps compiled, in a DistributedDataParallel or set up by Lightning Fabric;
    errors are those of `daf_integrations.prepare`.
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        self.outer, self.model = model, unwrap_model(model)
        self.session = DAFSession(config)
        self.session.attach(self.model, model)
        self.exit_summary = ExitSummary(self.session.start_line(), self.session.totals)
        self._passes = self._unseen = 0
        self._begun = False
        self._loss_name: str | None = None
        self._watch: LossWatch | None = None
        self._measuring = False
        self._forward = ForwardPatch(model, self._compressed, hidden=True)
        _trainings.add(self)
        _exit_summaries.append(self.exit_summary)
        _watch_optimizers()

    def stop(self) -> None:
        """Gives the model back as it was."""
        self._forward.remove()
        self.session.detach()
        _trainings.discard(self)
        if not self.exit_summary.totals.steps:
            _exit_summaries.remove(self.exit_summary)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state of the session; a StateError if it is something else."""
        self.session.load_state(state)
        self.exit_summary.totals = self.session.totals

    @contextmanager
    def scope(self) -> Generator[None]:
        """Compresses what is saved inside; see `daf_integrations.scope`."""
        records = self._records
        if records and self.session.config.plans_steps and not self.session.enclosing_session:
            raise ProfileError(
                "memory_budget covers the whole step, which a scope does not know; run it with "
                'daf_integrations.step(model, batch, loss_function), or set budget_covers="activations"'
            )
        with self._pass(unmeasurable=LOSS_OUTSIDE if records else None):
            yield

    def step(
        self, model: nn.Module, batch: Any, loss_function: LossFunction, backward: Callable[[Tensor], object]
    ) -> Tensor:
        """Runs forward and backward passes of a batch; see `daf_integrations.step`."""

        def loss_of(rows: Any) -> Tensor:
            with self._uncompressed(), any_backward(model), referred_kept(loss_function, self.model):
                return loss_function(rows)

        def run(part: Any, weight: float, _last: bool) -> Tensor:
            with self._pass(part, loss_of) as running:
                running.show(loss := loss_function(part))
            weighted = loss if weight == 1 else loss * weight
            backward(weighted)
            self.session.after_backward()
            return weighted.detach()

        if exchanging(model) and not exchanging(self.outer):
            self._check_unplanned(WRAPPED_LATER)
        self._check_plans(model)
        return self.session.run_step(batch, loss_of, run)

    def before_optimizer(self, optimizer: Optimizer, by_closure: bool) -> None:
        """Prepares the step of an optimizer, if it trains this model; a closure computes the loss within that step."""
        if self._has_parameters_in(optimizer):
            self.session.before_optimizer([optimizer], by_closure and self._records)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Ends the step, if the optimizer has trained this model and passes were compressed for it."""
        if not self._has_parameters_in(optimizer):
            return
        self.session.after_optimizer(counted=self._passes > 0)
        if self._passes:
            self._passes = 0
            self._check_audit()
        elif self.session.last_step is None and not self.exit_summary.covered:
            self._unseen += 1
            if self._unseen == UNSEEN_STEPS:
                log.warning("%s", _nothing_compressed(self.exit_summary, f"{UNSEEN_STEPS} optimizer steps"))

    def _check_unplanned(self, reason: str) -> None:
        if self.session.config.plans_steps and self.session.enclosing_session is None:
            raise PLANS.error_for(reason)

    def _check_plans(self, model: nn.Module) -> None:
        """Checks, once, a model as it is called first: it may have been sharded or wrapped since it was prepared."""
        if self.session.config.plans_steps and not self._begun:
            for reason in unsupported_reasons(PLANS, Context(called(model), self.model)):
                self._check_unplanned(reason)
            self._begun = True

    def _has_parameters_in(self, optimizer: Optimizer) -> bool:
        # ZeRO has the optimizer of DeepSpeed's engine train tensors of its own, with a part of the parameters each.
        if optimizer is getattr(self.outer, "basic_optimizer", None):
            return True
        parameters = set(map(id, self.model.parameters()))
        return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])

    @property
    def _records(self) -> bool:
        return self.outer.training and torch.is_grad_enabled() and not has_no_values(self.model)

    def _compressed(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._measuring:
            return forward(*args, **kwargs)
        if not self._records:
            if not has_no_values(self.model):
                self.session.unfreeze()  # an evaluation
            return forward(*args, **kwargs)
        unmeasurable = OTHER_METHOD if is_redirected(self.outer) else COMPILED if is_forward_compiled() else None
        if unmeasurable is not None:
            self._check_unplanned(unmeasurable)
        self._check_plans(self.outer)
        with self._pass((args, kwargs), self._own_loss, unmeasurable) as running:
            running.show(output := forward(*args, **kwargs))
        if running.audited:
            self._watch = LossWatch(output, self._loss_name)
        return output

    def _check_audit(self) -> None:
        """Compares the loss that was audited with the one that backward has run on."""
        watch, self._watch = self._watch, None
        if watch is None or watch.is_trained or not watch.seen:
            return
        if watch.instead is not None:
            self._loss_name = watch.instead
            self.session.retract_audits(None)
        else:
            self.session.retract_audits(OTHER_LOSS)

    def _own_loss(self, rows: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        # Not through DistributedDataParallel, which would wait for other processes.
        args, kwargs = rows
        with self._uncompressed():
            return loss_in(alone(self.outer)(*args, **kwargs), self._loss_name)

    @contextmanager
    def _uncompressed(self) -> Generator[None]:
        """Has calls of the model inside measure it, and train nothing."""
        before, self._measuring = self._measuring, True
        try:
            yield
        finally:
            self._measuring = before

    @contextmanager
    def _pass(
        self, batch: Any = None, loss_of: LossFunction | None = None, unmeasurable: str | None = None
    ) -> Generator[ForwardPass]:
        """Counts a forward pass, which `DAFSession.forward` compresses."""
        outer = self.session.enclosing_session
        if self._records and outer is None:
            self._passes += 1
            self.exit_summary.compressed = True
        elif outer is not None and outer is not self.session and not self.exit_summary.covered:
            self.exit_summary.covered = True
            log.warning(
                "The activations of %s are compressed by another DAF scope, with its options: those of %r do not count",
                type(self.model).__name__,
                self.exit_summary.title,
            )
        with self.session.forward(batch, loss_of, unmeasurable) as running:
            yield running


_trainings: weakref.WeakSet[Training] = weakref.WeakSet()
_exit_summaries: list[ExitSummary] = []


def trainings() -> list[Training]:
    """Returns the trainings of all models that still exist."""
    return list(_trainings)


def training_of(model: nn.Module) -> Training | None:
    """Returns the training of a model, whatever it is wrapped in; None if it has none."""
    inner = unwrap_model(model)
    return next((training for training in trainings() if training.model is inner), None)


@cache
def _watch_optimizers() -> None:
    def finish(optimizer: Optimizer, *_: Any) -> None:
        for training in trainings():
            training.after_optimizer(optimizer)

    def prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first one is the optimizer
        for training in trainings():
            training.before_optimizer(optimizer, closure is not None)

    register_optimizer_step_pre_hook(prepare)
    register_optimizer_step_post_hook(finish)


@atexit.register
def print_exit_summaries() -> None:
    """Prints the tables that are to be shown, and warns of trainings in which nothing was compressed."""
    for summary in _exit_summaries:
        if summary.process != os.getpid():
            continue
        if not summary.totals.raw_bytes and not summary.covered:
            uncounted = summary.compressed and not summary.totals.steps
            log.warning("%s", _uncounted(summary) if uncounted else _nothing_compressed(summary, "the whole run"))
        elif summary.shown and not summary.covered:
            print(render(summary.title, summary.totals))
    _exit_summaries.clear()


def _nothing_compressed(summary: ExitSummary, when: str) -> str:
    return (
        f"DAF compressed nothing in {when} ({summary.title}). It covers calls of the prepared model in training mode "
        "(model.train()) that record gradients, and steps of torch optimizers that hold its parameters. Call the model "
        "that prepare returned, not a part of it, or put forward pass and loss into `with daf_integrations.scope():`"
    )


def _uncounted(summary: ExitSummary) -> str:
    return (
        f"DAF compressed forward passes and has no figures of them ({summary.title}). Figures and audits are those of "
        "a step. A step ends when a torch optimizer steps that holds the model's parameters, and none did. If "
        "something else moves them, take daf_core.ActivationEngine in place of prepare, and call its finish_step()"
    )
