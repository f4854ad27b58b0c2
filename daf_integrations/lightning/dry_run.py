"""Audits of a LightningModule: how its training_step runs without a trace."""

# pyright: reportPrivateUsage=false
# Torch keeps a module's children under a private name.

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from daf_core import AuditError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy


def loss_aside(strategy: Strategy, module: LightningModule, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the loss of `training_step`, called for its value alone.

    The module is called without the wrapper of a distributed strategy, as nothing is exchanged with other processes.

    Raises:
        AuditError: There is none.
    """
    with _aside(module), strategy.precision_plugin.train_step_context():
        output: Any = module.training_step(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise AuditError(f"training_step returned no loss for a part of the batch, but {output!r}")
    return loss


@contextmanager
def _aside(module: nn.Module) -> Generator[None]:
    """Leaves no trace of what runs inside in logs and metrics; what else it changes is the engine's affair."""
    with ExitStack() as stack:
        for part in list(module.modules()):
            if hasattr(part, "training_step"):
                stack.enter_context(_without_logging(part))
            stack.enter_context(_metrics_kept(part))
        yield


@contextmanager
def _without_logging(module: nn.Module) -> Generator[None]:
    own = vars(module).get("log")
    vars(module)["log"] = _discard  # log_dict calls it, too
    try:
        yield
    finally:
        del vars(module)["log"]
        if own is not None:
            vars(module)["log"] = own


def _discard(*_args: object, **_options: object) -> None:
    """Takes the place of LightningModule.log."""


@contextmanager
def _metrics_kept(module: nn.Module) -> Generator[None]:
    """Gives copies of the metrics in a module to what runs inside."""
    kept = {name: child for name, child in module.named_children() if isinstance(child, Metric | MetricCollection)}
    module._modules.update({name: metric.clone() for name, metric in kept.items()})
    try:
        yield
    finally:
        module._modules.update(kept)
