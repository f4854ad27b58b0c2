"""Runs a LightningModule's training_step within a memory budget, inside of Lightning's own order of calls.

Lightning clears gradients between training_step and backward. So parts run backward in training_step, this module takes
their gradients off the parameters, and the backward pass of the returned loss, a leaf, puts them back. What parts log
is logged once for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from daf_core import MicroBatchError
from daf_core.batch.rows import rows_of
from daf_core.snapshots.attributes import Attributes
from daf_integrations.lightning.dry_run import log_replaced, loss_in, output_without_trace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy

Gradients = list[tuple[nn.Parameter, Tensor]]

Options = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of `LightningModule.log` after name and value

_REDUCTIONS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    "sum": sum,
    **dict.fromkeys(("max", "amax"), max),
    **dict.fromkeys(("min", "amin"), min),
}
"""Of values over batches, as `LightningModule.log` takes them, but for means."""


def run_split(
    strategy: Strategy,
    module: LightningModule,
    run_step: Callable[..., Tensor],
    training_step: Callable[..., Any],
    batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs forward and backward within the memory budget, and returns what training_step does for the whole batch.

    Gradients are in place when Lightning's backward is over. A value that each part logs is logged once: the loss
    as the sum of the parts' weighted losses, other numbers as their mean by rows. A mapping that training_step
    returns is the mapping of the last part, with the whole loss. A batch in one piece may have no loss.

    The strategy is set up; `run_step` is that of the session, and `training_step` compresses a part.

    Raises:
        MicroBatchError: A part of the batch has no loss.
        PlanError: No plan keeps the budget.
        ProfileError: The step cannot be measured.
    """
    trainer, precision = module.trainer, strategy.precision_plugin
    scaler: Any = getattr(precision, "scaler", None)
    logs = _PartLogs(module)
    output: Any = None

    def begin() -> None:
        counts.restore()
        logs.parts.clear()

    def step(part: Any, weight: float, last: bool) -> Tensor:
        nonlocal output
        logged = logs.begin_part(part, weight)
        output = training_step(part, *args, **kwargs)
        if output is None and last and len(logs.parts) == 1:
            return torch.zeros((), device="cpu")
        logged.loss = loss = _loss_in(output)
        weighted = loss if weight == 1 else loss * weight
        # As the strategy does it, without the hooks that Lightning calls once for a batch.
        shared = weighted / trainer.accumulate_grad_batches
        precision.backward(shared if scaler is None else scaler.scale(shared), module, None)
        return weighted.detach()

    def loss_of(rows: Any) -> Tensor:
        return _loss_in(output_without_trace(strategy, module, rows, *args, **kwargs))

    # In the first batch of an optimizer step Lightning clears gradients after training_step.
    clears = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    kept = _taken(module) if clears else []
    computed: Gradients = []
    try:
        with logs.collecting():
            counts = _Counts(module)
            loss = run_step(batch, loss_of, step, begin).requires_grad_()
    finally:
        if clears:
            computed = _taken(module)
        _add(kept)
    loss.register_hook(partial(_put_back, computed))
    return {**output, "loss": loss} if isinstance(output, Mapping) else None if output is None else loss


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
    if (loss := loss_in(output)) is None:
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


@dataclass
class _Part:
    """The names, numbers and options that were logged in a part, which has rows, a weight and later a loss."""

    rows: int
    weight: float
    loss: Tensor | None = None
    calls: list[tuple[str, Any, Options]] = field(default_factory=list[tuple[str, Any, Options]])

    @property
    def values(self) -> dict[str, Any]:
        """Numbers by name, the last of each."""
        return {name: value for name, value, _ in self.calls}

    def is_loss(self, name: str) -> bool:
        """Says whether a value is the loss itself: `detach` shares its memory, and numbers are equal."""
        value = self.values[name]
        if self.loss is None:
            return False
        if isinstance(value, Tensor):
            return value.data_ptr() == self.loss.data_ptr()
        return value == float(self.loss.detach())


class _PartLogs:
    """Collects what a module logs in the parts of a step, and logs it once; but for metrics that are objects."""

    def __init__(self, module: LightningModule) -> None:
        self._log: Callable[..., None] = module.log
        self._module = module
        self.parts: list[_Part] = []

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Collects what is logged inside, and logs it at the end: as it was for one part, otherwise each name once."""
        with log_replaced(self._module, self._collect):
            yield
        if len(self.parts) == 1:
            for name, value, (args, options) in self.parts[0].calls:
                self._log(name, value, *args, **options)
            return
        last = {name: options for part in self.parts for name, _, options in part.calls}
        for name, (args, options) in last.items():
            value = self._combined(name, options.get("reduce_fx", "mean"))
            options.pop("batch_size", None)  # that of the part
            self._log(name, value, *args, **options)

    def begin_part(self, batch: Any, weight: float) -> _Part:
        self.parts.append(_Part(rows_of(batch) or 0, weight))
        return self.parts[-1]

    def _collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
            self._log(name, value, *args, **options)
            return
        value = value.detach() if isinstance(value, Tensor) else value
        self.parts[-1].calls.append((name, value, (args, options)))

    def _combined(self, name: str, reduction: Any) -> Any:
        parts = [part for part in self.parts if name in part.values]
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        if reduce is not None:
            return reduce(part.values[name] for part in parts)
        if all(part.is_loss(name) for part in parts):
            return sum(part.weight * part.values[name] for part in parts)
        return sum(part.rows * part.values[name] for part in parts) / sum(part.rows for part in parts)
