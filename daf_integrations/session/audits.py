"""When a session measures the error of the gradient, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from logging import getLogger
from typing import Any

from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine, AuditError, GradientError, HooksActiveError
from daf_core.autograd.torch_compile import is_compiled
from daf_core.batch.samples import SHARE, few_rows
from daf_core.compiled.support import missing
from daf_core.elastic.training import ElasticTraining
from daf_core.plan.run.runner import StepRunner
from daf_core.snapshots.measurement import missing_values
from daf_core.unsupported.models import AUDITS, UNMEASURED
from daf_core.unsupported.table import Context, unsupported_reasons
from daf_integrations.session.metrics import RunTotals

LEAST_SHARE = 1 / 1024  # share of a batch below which an audit that does not fit in the memory budget is given up

LOW_COSINE = 0.5
"""Cosine of the angle between compressed and exact gradient below which an audit warns: the step goes elsewhere."""

LARGE_SHARE = 0.5
"""Share of a model's parameters in one compiled graph above which the backward of that graph is most of the model's."""

log = getLogger("daf")


class Audits:
    """Measures the error of the gradient on a few rows of a batch, and counts and reports it.

    The model is given as it is called, perhaps compiled.
    """

    def __init__(
        self, engine: ActivationEngine, model: nn.Module, elastic: ElasticTraining | None, runner: StepRunner | None
    ) -> None:
        self._engine, self._model, self._elastic, self._runner = engine, model, elastic, runner
        self._bound = engine.config.max_gradient_error
        self._share: float | None = SHARE
        self._checked_model = self._tried = self._warned_unmeasured = self._warned_low = False
        self._unsupported: str | None = None
        self._failure = ""  # what the audit raised before the forward pass that is running

    def measure(
        self, batch: Any, loss_of: Callable[[Any], Tensor] | None, unsupported: str | None, totals: RunTotals
    ) -> bool:
        """Measures the error before a forward pass of the batch, if that is due; says whether it did.

        `loss_of` returns the loss of some of its rows, or `unsupported` says why there is none; `totals` count it.

        Raises:
            AuditError: The error cannot be measured, and `max_gradient_error` is set.
            HooksActiveError: Saved-tensor hooks of someone else are active.
        """
        if not self._checked_model:
            if missing_values(self._model) is not None:
                self._engine.postpone_audit()  # the first pass makes them
                return False
            self._checked_model = True
            self._unsupported = next(iter(unsupported_reasons(AUDITS, Context(self._model))), None)
            _warn_of_large_graphs(self._model, self._engine.config.precision == "exact")
        if self._share is None or not self._engine.audit_due:
            return False
        if unsupported is None:
            if self._elastic is not None and not self._elastic.trains_most:
                self._engine.postpone_audit()  # an audit sees only what this step trains
                return False
            if self._runner is not None and self._runner.plan is not None and self._runner.plan.exact:
                return False
            unsupported = self._unsupported
        if unsupported is not None or loss_of is None:
            self.give_up(unsupported or "")
            return False
        try:
            self._report(self._measured(batch, loss_of), totals)
        except HooksActiveError:
            raise
        except Exception as error:  # whatever a model does with a part of a batch: training must not end for it
            if self._bound is not None:
                self.give_up(repr(error), error)
            self._failure = repr(error)
            self._engine.postpone_audit()
            return False
        return True

    @contextmanager
    def following(self) -> Generator[None]:
        """Covers the forward pass that follows: if it raises, too, the batch is to blame for an audit that failed."""
        try:
            yield
            if self._failure:
                self.give_up(self._failure)
        finally:
            self._failure = ""

    def give_up(self, reason: str, cause: Exception | None = None) -> None:
        """Trains on without audits, and warns.

        Raises:
            AuditError: `max_gradient_error` is set.
        """
        if self._bound is not None:
            measured = UNMEASURED.format(reason)
            raise AuditError(f"{measured}. max_gradient_error cannot be kept without; leave it out") from cause
        self._share = None
        log.warning("%s", AUDITS.error.format(reason))

    def _measured(self, batch: Any, loss_of: Callable[[Any], Tensor]) -> GradientError | None:
        """Audits as many rows as fit in the memory budget."""
        with nullcontext() if self._elastic is None else self._elastic.everything():
            while True:
                assert self._share is not None
                try:
                    return self._engine.audit(partial(loss_of, few_rows(batch, self._share)))
                except ActivationBudgetError:
                    if self._share < LEAST_SHARE:
                        raise
                    self._share /= 2

    def _report(self, measured: GradientError | None, totals: RunTotals) -> None:
        if measured is None:
            first, self._tried = not self._tried, True  # before the first pass nothing is known of what it stores
            if not self._warned_unmeasured and (self._bound is not None or not first):
                log.warning(
                    "DAF could not measure the error of the gradient: on a part of the batch the gradient is zero or "
                    "not finite. Until it can, precision is chosen without it"
                )
                self._warned_unmeasured = True
            return
        above = self._bound is not None and measured.error > self._bound
        totals.audits += 1
        totals.audits_above += above
        low = measured.cosine < LOW_COSINE
        if low and not self._warned_low:
            log.warning(
                "DAF's compressed gradient differs from the exact one by %.0f%% of its length, and the cosine of the "
                "angle between them is %.2f: training will be slow or fail. Raise memory_budget or precision",
                100 * measured.error,
                measured.cosine,
            )
        elif above:
            log.warning("DAF measured a gradient error of %.3g; max_gradient_error=%.3g", measured.error, self._bound)
        self._warned_low = low


def _warn_of_large_graphs(model: nn.Module, exact: bool) -> None:
    """Says where one compiled graph holds most of a model and cannot decode part by part what it has saved.

    A graph stores nothing inside where activations are stored exactly.
    """
    reason = "exact mode stores nothing inside of graphs" if exact else missing()
    if reason is None:
        return
    total = _size(model)
    for module in model.modules():
        if is_compiled(module) and _size(module) > LARGE_SHARE * total:
            log.warning(
                "One graph of torch.compile holds %.0f%% of the model's parameters, and %s. Its backward begins by "
                "decoding all that it has saved: DAF frees that memory until then, and the peak of the step stays. "
                "Compile block by block (`for block in model.layers: block.compile()`), or set "
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 for Trainer and Accelerate",
                100 * _size(module) / total,
                reason,
            )
            return


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
