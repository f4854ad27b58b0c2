"""The loss of a LightningModule for an audit, whose training_step leaves no trace."""

# pyright: reportPrivateUsage=false
# Torch keeps a module's children under a private name.

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy


def output_without_trace(strategy: Strategy, module: LightningModule, *args: Any, **kwargs: Any) -> Any:
    """Returns what `training_step` does, and takes back what it logs and what metrics count.

    It runs without the wrapper of a distributed strategy: other processes do not take part.
    """
    with _untraced(module), strategy.precision_plugin.train_step_context():
        return module.training_step(*args, **kwargs)


def loss_in(output: Any) -> Tensor | None:
    """Returns the loss in what `training_step` has returned; None where that skips a batch."""
    loss: Any = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


@contextmanager
def _untraced(module: nn.Module) -> Generator[None]:
    """Discards logs, and gives copies of metrics to what runs inside; the engine takes back the rest."""
    parts = list(module.modules())
    kept = [
        {name: child for name, child in part.named_children() if isinstance(child, Metric | MetricCollection)}
        for part in parts
    ]
    with ExitStack() as stack:
        for part, metrics in zip(parts, kept, strict=True):
            if hasattr(part, "training_step"):
                stack.enter_context(log_replaced(part, lambda *_args, **_options: None))  # log_dict calls it, too
            stack.callback(part._modules.update, metrics)
            part._modules.update({name: metric.clone() for name, metric in metrics.items()})
        yield


@contextmanager
def log_replaced(module: nn.Module, function: Callable[..., None]) -> Generator[None]:
    """Has `LightningModule.log` call another function inside."""
    own = vars(module).get("log")
    vars(module)["log"] = function
    try:
        yield
    finally:
        del vars(module)["log"]
        if own is not None:
            vars(module)["log"] = own
