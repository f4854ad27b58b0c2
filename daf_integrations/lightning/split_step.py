"""Runs a LightningModule's training_step within a memory budget, inside of Lightning's own order of calls.

Lightning clears gradients between training_step and backward. So parts run backward in training_step, their gradients
are put aside, and the backward pass of the loss that is returned, which has no graph, puts them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from daf_core import MicroBatchError
from daf_integrations.lightning.counters import Counts
from daf_integrations.lightning.dry_run import loss_aside
from daf_integrations.lightning.split_logs import PartLogs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy

    from daf_core.plan.run.runner import StepRunner

Gradients = list[tuple[nn.Parameter, Tensor]]


class StepInParts:
    """Takes the place of a strategy's training_step.

    Args:
        strategy: The strategy, after its setup.
        module: The module that it trains.
        runner: Runs the step.
        training_step: Runs that of a part.
    """

    def __init__(
        self, strategy: Strategy, module: LightningModule, runner: StepRunner, training_step: Callable[..., Any]
    ) -> None:
        self._strategy, self._module, self._runner = strategy, module, runner
        self._training_step = training_step

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward within the memory budget, and returns what training_step does for the whole batch.

        Gradients are in place when Lightning's backward is over. What is logged in each part is logged once: as the
        sum of the parts' weighted values for the loss, as their mean by rows for other numbers. A mapping that
        training_step returns is that of the last part, with the whole loss. A batch in one piece may have no loss.

        Args:
            batch: The step's batch.
            args: Further arguments of training_step.
            kwargs: Further arguments of training_step.

        Raises:
            MicroBatchError: A part of the batch has no loss.
            PlanError: No plan keeps the budget.
            ProfileError: What a step takes cannot be measured.
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
            made = _taken(self._module)
            _add(kept)
            loss.register_hook(partial(_put_in_place, made))
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

        rows_loss = partial(_loss_aside, self._strategy, self._module, args, kwargs)
        with PartLogs(self._module) as logs:
            counts = Counts(self._module)
            loss = self._runner.run(batch, rows_loss, step, begin)
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


def _loss_aside(
    strategy: Strategy, module: LightningModule, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Any
) -> Tensor:
    return loss_aside(strategy, module, rows, *args, **kwargs)


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MicroBatchError(
            f"training_step returned no loss for a part of the batch, but {output!r}. A step in parts needs that of "
            'each; where batches are skipped, pass budget_covers="activations", which splits none'
        )
    return loss


def _taken(module: nn.Module) -> Gradients:
    """Takes the gradients off a module's parameters."""
    taken = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def _put_in_place(gradients: Gradients, _gradient: Tensor) -> None:
    _add(gradients)


def _add(gradients: Gradients) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
