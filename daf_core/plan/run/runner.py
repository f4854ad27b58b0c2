"""Runs training steps within a memory budget: plans each, splits its batch, and runs it again if memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from logging import getLogger
from typing import Any

from torch import Tensor, nn

from daf_core import distributed
from daf_core.autograd.sites import enclosing_backward
from daf_core.autograd.torch_private import NO_TASK
from daf_core.batch.infer_reduction import MicroBatchWeights
from daf_core.batch.micro_batches import Step, WholeStepError, run_parts
from daf_core.batch.rows import rows_of, split, take, tensors_in
from daf_core.batch.samples import copied
from daf_core.config import DAFConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import DAFError, MicroBatchError, PlanError, ProfileError
from daf_core.memory.system.release import release_memory
from daf_core.plan.plan_file import PlanFile
from daf_core.plan.run.retry import is_out_of_memory, with_retries
from daf_core.plan.run.step_planner import Batch, PartialTraining, StepPlanner
from daf_core.plan.search.planner import Plan
from daf_core.rewrites.registry import KINDS, LOSS, OperatorRewrites
from daf_core.snapshots.step import Snapshot, devices_of
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.models import IN_BACKWARD, JOINED, PLANS, RERUNS
from daf_core.unsupported.table import Context, check_supported, unsupported_reasons

LossFunction = Callable[[Any], Tensor]

log = getLogger("daf")


class StepRunner:
    """Runs a model's training steps so that they keep `memory_budget`.

    Operators are rewritten while it exists, unless nothing may lose precision: their results differ by rounding.
    `inner` is the model inside of a DistributedDataParallel, or the model itself. For `elastic` and `plan_file` see
    `StepPlanner`.

    Raises:
        ConfigError: Steps of this model cannot be planned.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        engine: ActivationEngine,
        config: DAFConfig,
        elastic: PartialTraining | None = None,
        plan_file: PlanFile | None = None,
    ) -> None:
        check_supported(PLANS, Context(model, inner))
        self._model, self._inner, self._engine = model, inner, engine
        self._whole: str | None = None  # why steps take no parts
        self._weighting = MicroBatchWeights(model, nullcontext if elastic is None else elastic.everything)
        self._rewrites = OperatorRewrites(inner, KINDS - {LOSS} if config.chunked_loss is False else KINDS)
        if config.precision != "exact":
            self._rewrites.apply()
        relieve = partial(release_memory, devices_of(inner))
        self.planner = StepPlanner(inner, engine, config, relieve, elastic, plan_file)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return self.planner.plan

    def check_pass(self) -> None:
        """Checks a forward pass that begins: a ConfigError if it does so in backward."""
        if enclosing_backward() != NO_TASK:
            raise PLANS.error_for(IN_BACKWARD)

    def prepare(self, batch: Any, loss_function: LossFunction, reason: str) -> Plan:
        """Has the model follow the plan for a step that `run` does not run, for a reason, and whose batch stays whole.

        Raises:
            PlanError: There is no plan.
            ProfileError: What a step takes cannot be measured.
        """
        self.planner.begin_batch()
        return self.planner.prepare(described(self._model, batch, loss_function), reason)

    def run(
        self, batch: Any, loss_function: LossFunction, step: Step, begin: Callable[[], None] | None = None
    ) -> Tensor:
        """Runs forward and backward of all micro-batches, so that gradients are those of the batch; returns the loss.

        Args:
            batch: The step's batch.
            loss_function: Returns the loss of some rows of it, and leaves no trace.
            step: See `run_parts`.
            begin: Called at the beginning of each attempt: takes back what the caller's own objects counted in one
                that ran out of memory.

        Raises:
            PlanError: No plan keeps the budget.
            ProfileError: What a step takes cannot be measured.
        """
        self.planner.begin_batch()
        context = Context(self._model, batch=batch)
        once = unsupported_reasons(RERUNS, context)
        reasons = once or unsupported_reasons(MICRO_BATCHES, context)
        reasons += [] if self._whole is None else [self._whole]
        snapshot = None if once else Snapshot(self._inner, self._engine.snapshot)

        def attempt() -> Tensor:
            if begin is not None:
                begin()
            parts, weights = self._divided(batch, loss_function, next(iter(reasons), None))
            try:
                with self._engine.accumulating():
                    return run_parts(self._model, split(batch, parts), weights, step)
            except Exception as error:
                if parts == 1 or snapshot is None or isinstance(error, DAFError) or is_out_of_memory(error):
                    raise
                if isinstance(error, WholeStepError):
                    self._whole = str(error)
                elif not self._weighting.has_loss(batch, loss_function):
                    raise
                reasons.append(self._whole or f"a part of the batch has no loss: {error!r}")
            log.warning("DAF runs a batch as a whole, from the state before it: %s", reasons[-1])
            gc.collect()  # so that activations are gone
            snapshot.restore()
            return attempt()

        if snapshot is None:
            return attempt()
        retrying = partial(with_retries, attempt, snapshot, self.planner.tighten, look_again=self._engine.look_again)
        if not distributed.exchanging(self._model):
            return retrying()
        if distributed.joined(self._model):
            raise PLANS.error_for(JOINED)
        exchanges = distributed.exchanges_gradients(self._model)
        with distributed.unsynchronized(self._model):
            loss = retrying(anywhere=partial(distributed.any_rank_failed, self._model))
        if exchanges:
            distributed.reduce_gradients(self._model)
        return loss

    def _divided(self, batch: Any, loss_function: LossFunction, whole: str | None) -> tuple[int, list[float]]:
        """Returns the number of parts that the plan has a batch run in, and their weights.

        `whole` is a reason why it stays whole, None where there is none.
        """
        known = described(self._model, batch, loss_function)
        whole = whole or self._weighting.refusal(batch)
        try:
            parts = self.planner.prepare(known, whole).parts
            return parts, [1.0] if parts == 1 else self._weighting.of(batch, parts, loss_function)
        except MicroBatchError as error:
            whole = str(error)
        except PlanError:  # names a budget for parts, which the loss may not have
            whole = None if whole or self.planner.whole else self._lawless(batch, loss_function)
            if whole is None:
                raise
        return self.planner.prepare(known, whole).parts, [1.0]

    def _lawless(self, batch: Any, loss_function: LossFunction) -> str | None:
        """Returns why the loss of this batch does not follow from those of its parts; None if it does."""
        try:
            self._weighting.look_again(batch, loss_function)
        except MicroBatchError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Undoes all changes of the model."""
        self.planner.close()
        self._rewrites.undo()


def described(model: nn.Module, batch: Any, loss_function: LossFunction) -> Batch:
    """Returns what a plan needs to know of a batch; `loss_function` returns the loss of some of its rows."""
    rows = rows_of(batch) or 1
    lengths = [tensor.numel() // rows for tensor in tensors_in(batch) if tensor.shape[0] == rows]

    def loss_of(count: int) -> Tensor:
        try:
            with distributed.apart(model):  # processes measure on their own
                return loss_function(copied(take(batch, slice(0, count), rows)))
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, ProfileError):
                raise
            raise ProfileError(
                f"what a step takes cannot be measured on {count} of {rows} rows of its batch: {error!r}. "
                'budget_covers="activations" needs no measurement'
            ) from error

    return Batch(rows, max(lengths, default=1), loss_of)
