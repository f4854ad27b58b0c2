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
from daf_core.distributed import exchanging
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.attributes import referred_kept
from daf_core.unsupported.models import PLANS
from daf_integrations.session.metrics import RunTotals
from daf_integrations.session.own_loss import LossWatch, loss_in
from daf_integrations.session.session import DAFSession
from daf_integrations.session.unwrap import alone, any_backward, is_redirected, unwrap_model

UNSEEN_STEPS = 3
"""Optimizer steps without a compressed pass before a warning: libraries take one of their own to fill their state."""

LossFunction = Callable[[Any], Tensor]

NOT_SPLIT = (
    "a loop that calls the model itself keeps its batches whole; daf_integrations.step(model, batch) splits them"
)

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
    """What is said of a training when the program ends, without keeping its model alive until then.

    Attributes:
        title: The line above the table.
        totals: The figures.
        shown: Whether the table is printed.
        covered: Whether another scope compressed the model.
        process: The process that it is said in: a forked child knows of it, and ends as well.
    """

    title: str
    totals: RunTotals
    shown: bool = False
    covered: bool = False
    process: int = field(default_factory=os.getpid)


class Training:
    """Compresses a model's forward passes; a step ends when an optimizer with its parameters has stepped.

    A step that a gradient scaler skips counts with the next one. Where several optimizers share the model, the first
    of them ends the step.

    Args:
        model: The model as it is called, perhaps compiled, in a DistributedDataParallel or set up by Lightning Fabric.
        config: How activations are stored.

    Raises:
        HooksActiveError: Saved-tensor hooks of someone else are active.
        NothingToTrainError: No parameter requires a gradient.
        UnsupportedDeviceError: The model is on device "meta", or in a DataParallel.
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        self.outer, self.model = model, unwrap_model(model)
        self.session = DAFSession(config)
        self.session.attach(self.model, model)
        self.ending = ExitSummary(self.session.start_line(), self.session.totals)
        self._passes = self._unseen = 0
        self._loss_name: str | None = None
        self._watch: LossWatch | None = None
        self._aside = False
        self._forward = ForwardPatch(model, self._compressed)
        _trainings.add(self)
        _endings.append(self.ending)
        _watch_optimizers()

    def stop(self) -> None:
        """Makes the model the one it was."""
        self._forward.remove()
        self.session.detach()
        _trainings.discard(self)
        if not self.ending.totals.steps:
            _endings.remove(self.ending)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state of the session.

        Raises:
            StateError: It is something else.
        """
        self.session.load_state(state)
        self.ending.totals = self.session.totals

    @contextmanager
    def scope(self) -> Generator[None]:
        """Compresses what is saved inside; does nothing in evaluation, and inside a scope that covers the model.

        Raises:
            AuditError: `max_gradient_error` is set, and the loss is not known here.
            HooksActiveError: Other saved-tensor hooks are active.
            ProfileError: The budget covers steps, and the loss is not known here.
        """
        if self._records and self.session.runner is not None and not self.session.enclosing_session:
            raise ProfileError(
                "memory_budget covers the whole step, which a scope does not know; run it with "
                'daf_integrations.step(model, batch, loss_function), or set budget_covers="activations"'
            )
        if self._records:
            self.session.give_up_audits("the loss is computed in a scope of its own, so it cannot be computed again")
        self._begin_step()
        with self._pass():
            yield

    def step(
        self, model: nn.Module, batch: Any, loss_function: LossFunction, backward: Callable[[Tensor], object]
    ) -> Tensor:
        """Runs forward and backward passes of a batch, within a budget that covers them; see `plain.step`.

        Raises:
            ConfigError: Steps are planned, and the model was prepared before it was wrapped for several processes.
        """

        def aside(rows: Any) -> Tensor:
            with self._uncompressed(), any_backward(model), referred_kept(loss_function, self.model):
                return loss_function(rows)

        def run(part: Any, weight: float, _last: bool) -> Tensor:
            self.session.audit(self.outer, part, aside)
            with self._pass():
                loss = loss_function(part)
            weighted = loss if weight == 1 else loss * weight
            backward(weighted)
            self.session.finish_backward()
            return weighted.detach()

        self._begin_step()
        runner = self.session.runner
        if exchanging(model) and not exchanging(self.outer):
            self._check_unplanned(WRAPPED_LATER)
        return run(batch, 1.0, True) if runner is None else runner.run(batch, aside, run)

    def before_update(self, optimizer: Optimizer, by_closure: bool) -> None:
        """Tells the session that an optimizer is about to train this model, or to call a closure that computes it."""
        if self.session.config.elastic is not None and self._has_parameters_in(optimizer):
            if by_closure:
                self._begin_step()
            self.session.before_update([optimizer])

    def finish_step(self, optimizer: Optimizer) -> None:
        """Ends the step, if the optimizer has trained this model and passes were compressed for it."""
        if not self._has_parameters_in(optimizer):
            return
        self.session.after_update()  # the last of several optimizers ends what is elastic of the step
        if self._passes:
            self.session.finish_step()
            self._passes = 0
            self._check_audit()
        elif self.session.last_step is None and not self.ending.covered:
            self._unseen += 1
            if self._unseen == UNSEEN_STEPS:
                log.warning("%s", _nothing_compressed(self.ending, f"{UNSEEN_STEPS} optimizer steps"))

    def _check_unplanned(self, reason: str) -> None:
        """Checks that steps are not planned.

        Raises:
            ConfigError: They are.
        """
        if self.session.runner is not None and self.session.enclosing_session is None:
            raise PLANS.error_for(reason)

    def _has_parameters_in(self, optimizer: Optimizer) -> bool:
        parameters = set(map(id, self.model.parameters()))
        return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])

    def _begin_step(self) -> None:
        if self._records:
            self.session.begin_step()

    @property
    def _records(self) -> bool:
        return self.outer.training and torch.is_grad_enabled()

    def _compressed(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._records or self._aside:
            if not self._aside:
                self.session.unfreeze()  # an evaluation: what it finds is what the user has chosen
            return forward(*args, **kwargs)
        self._begin_step()
        if is_redirected(self.outer):
            self._check_unplanned(OTHER_METHOD)
            self.session.give_up_audits(OTHER_METHOD)
        if self.session.runner is not None and self.session.enclosing_session is None:
            self.session.runner.prepare((args, kwargs), self._loss, NOT_SPLIT)
        audited = self.session.audit(self.outer, (args, kwargs), self._loss)
        with self._pass():
            output = forward(*args, **kwargs)
        if audited:
            self._watch = LossWatch(output, self._loss_name)
        return output

    def _check_audit(self) -> None:
        """Sees to it that what is audited is what is trained, once it has been trained."""
        watch, self._watch = self._watch, None
        if watch is None or watch.is_trained or not watch.seen:
            return
        if watch.instead is not None:
            self._loss_name = watch.instead
            self.session.retract_audits(None)
        else:
            self.session.retract_audits(OTHER_LOSS)

    def _loss(self, rows: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        # Not through DistributedDataParallel, which would wait for other processes.
        args, kwargs = rows
        with self._uncompressed():
            return loss_in(alone(self.outer)(*args, **kwargs), self._loss_name)

    @contextmanager
    def _uncompressed(self) -> Generator[None]:
        """Has calls of the model inside be no passes of its training."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @contextmanager
    def _pass(self) -> Generator[None]:
        outer = self.session.enclosing_session
        if self._records and outer is None:
            self._passes += 1
        elif outer is not None and outer is not self.session and not self.ending.covered:
            self.ending.covered = True
            log.warning(
                "The activations of %s are compressed by another DAF scope, with its options: those of %r do not count",
                type(self.model).__name__,
                self.ending.title,
            )
        with self.session.scope():
            yield


_trainings: weakref.WeakSet[Training] = weakref.WeakSet()
_endings: list[ExitSummary] = []


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
            training.finish_step(optimizer)

    def prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first one is the optimizer
        for training in trainings():
            training.before_update(optimizer, closure is not None)

    register_optimizer_step_pre_hook(prepare)
    register_optimizer_step_post_hook(finish)


@atexit.register
def print_exit_summaries() -> None:
    """Prints the tables that are to be shown, and warns of trainings in which nothing was compressed."""
    for ending in _endings:
        if ending.process != os.getpid():
            continue
        if not ending.totals.raw_bytes and not ending.covered:
            log.warning("%s", _nothing_compressed(ending, "the whole run"))
        elif ending.shown and not ending.covered:
            from daf_integrations.session.report import render

            print(render(ending.title, ending.totals))
    _endings.clear()


def _nothing_compressed(ending: ExitSummary, when: str) -> str:
    return (
        f"DAF compressed nothing in {when} ({ending.title}). It covers calls of the prepared model in training mode "
        "(model.train()) that record gradients, and steps of torch optimizers that hold its parameters. Call the model "
        "that prepare returned, not a part of it, or put forward pass and loss into `with daf_integrations.scope():`"
    )
