"""Runs a LightningModule's training_step within a memory budget, inside of Lightning's own order of calls.

Lightning clears gradients between training_step and backward. So parts run backward in training_step, this module takes
their gradients off the parameters, and the backward pass of the returned loss, a leaf, puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from daf_core import MicroBatchError
from daf_core.snapshots.attributes import Attributes
from daf_integrations.lightning.dry_run import loss_without_trace
from daf_integrations.lightning.split_logs import PartLogs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy

Gradients = list[tuple[nn.Parameter, Tensor]]


class SplitStep:
    """A strategy's training_step that runs forward and backward in parts.

    Args:
        strategy: The strategy, after its setup.
        module: The module that it trains.
        run_step: `DAFSession.run_step`.
        training_step: Runs training_step for a part, compressed.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: LightningModule,
        run_step: Callable[..., Tensor],
        training_step: Callable[..., Any],
    ) -> None:
        self._strategy, self._module = strategy, module
        self._run_step, self._training_step = run_step, training_step

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward within the memory budget, and returns what training_step does for the whole batch.

        Gradients are in place when Lightning's backward is over. A value that each part logs is logged once: the loss
        as the sum of the parts' weighted losses, other numbers as their mean by rows. A mapping that training_step
        returns is the mapping of the last part, with the whole loss. A batch in one piece may have no loss.

        Args:
            batch: The step's batch.
            args: Further arguments of training_step.
            kwargs: Further arguments of training_step.

        Raises:
            MicroBatchError: A part of the batch has no loss.
            PlanError: No plan keeps the budget.
            ProfileError: The step cannot be measured.
        """
        kept = _taken(self._module) if self._clears else []
        try:
            loss, output = self._run(batch, args, kwargs)
        except BaseException:
            if self._clears:
                _taken(self._module)
                _add(kept)
            raise
        if self._clears:
            computed = _taken(self._module)
            _add(kept)
            loss.register_hook(partial(_put_back, computed))
        return {**output, "loss": loss} if isinstance(output, Mapping) else None if output is None else loss

    def _run(self, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Returns the loss of the batch, as a leaf, and what training_step returned for its last part."""
        output: Any = None
        parts = 0

        def begin() -> None:
            nonlocal parts
            parts = 0
            counts.restore()
            logs.clear()

        def step(part: Any, weight: float, last: bool) -> Tensor:
            nonlocal output, parts
            parts += 1
            with logs.part(part, weight) as log:
                output = self._training_step(part, *args, **kwargs)
                if output is None and last and parts == 1:
                    return torch.zeros(())
                log.loss = loss = _loss_in(output)
            weighted = loss if weight == 1 else loss * weight
            self._backward(weighted)
            return weighted.detach()

        def loss_of(rows: Any) -> Tensor:
            return loss_without_trace(self._strategy, self._module, rows, *args, **kwargs)

        logs = PartLogs(self._module)
        with logs.collecting():
            counts = _Counts(self._module)
            loss = self._run_step(batch, loss_of, step, begin)
        return loss.requires_grad_(), output

    @property
    def _clears(self) -> bool:
        """Whether Lightning clears gradients after this training_step: it is the first of an optimizer step."""
        trainer = self._module.trainer
        return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def _backward(self, loss: Tensor) -> None:
        """Runs backward as the strategy does, without the hooks that Lightning calls once for a batch."""
        precision: Any = self._strategy.precision_plugin
        loss = loss / self._module.trainer.accumulate_grad_batches
        scaler = getattr(precision, "scaler", None)
        precision.backward(loss if scaler is None else scaler.scale(loss), self._module, None)


class _Counts:
    """Attributes of a module that has a training_step, and the metrics inside of it, as they are now."""

    def __init__(self, module: LightningModule) -> None:
        parts = list(module.modules())
        metrics = [part for part in parts if isinstance(part, Metric)]
        # Torch's and Lightning's own attributes are private.
        self._kept = Attributes(*(part for part in parts if hasattr(part, "training_step")))
        self._metrics = Attributes(*metrics, private=True)
        # An update may add to tensors in place; lists only grow.
        states = (state for metric in metrics for state in metric.metric_state.values() if isinstance(state, Tensor))
        self._states = [(state, state.detach().clone()) for state in states]

    def restore(self) -> None:
        self._kept.restore()
        self._metrics.restore()
        with torch.no_grad():
            for state, before in self._states:
                state.copy_(before)


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MicroBatchError(
            f"training_step returned no loss for a part of the batch, but {output!r}. A step in parts needs that of "
            'each; where batches are skipped, pass budget_covers="activations", which splits none'
        )
    return loss


def _taken(module: nn.Module) -> Gradients:
    taken = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def _put_back(gradients: Gradients, _gradient: Tensor) -> None:
    _add(gradients)


def _add(gradients: Gradients) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
