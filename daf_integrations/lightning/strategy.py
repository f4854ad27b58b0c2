"""Lightning: ``Trainer(strategy=DAFStrategy())``, or ``strategy="daf"`` once this is imported.

For the package of the name ``pytorch_lightning`` there is `daf_integrations.pytorch_lightning`: a Trainer takes
strategies of its own package alone.
"""

# pyright: reportIncompatibleMethodOverride=false
# A callback may take those arguments together that it does not use.

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from typing_extensions import override

from daf_core import DAFConfig
from daf_integrations.lightning.base import ChoosingStrategy, announce_update, report_metrics
from daf_integrations.lightning.base import register as register_in
from daf_integrations.session.options import naming_options


class DAFStrategy(ChoosingStrategy, SingleDeviceStrategy):
    """Compresses the activations of a training run; nothing else in the script changes.

    It is a strategy for one device, or DDP for several: the Trainer's `accelerator`, `devices` and `num_nodes` decide.
    It covers `LightningModule.training_step`, that is the forward pass and the loss. Each optimizer step logs
    ``daf/raw_mb``, ``daf/held_mb``, ``daf/ratio``, ``daf/pack_ms``, ``daf/unpack_ms``, ``daf/dropped_mb``,
    ``daf/spilled_mb`` and ``daf/audit_ms``, and after the first audit ``daf/gradient_error`` and
    ``daf/gradient_cosine``. Audits call `training_step` once more, with a part of the batch, and keep what it logs and
    counts out of logs and metrics. With manual optimization there are none.

    Example:
        >>> Trainer(strategy=DAFStrategy(precision=4)).fit(module, data)

    Args:
        config: A configuration, or a mapping of its fields, instead of options.
        base: A strategy of ``lightning.pytorch`` to add DAF to, such as ``DDPStrategy(static_graph=True)``; the object
            itself is left as it is.
        options: The fields of `DAFConfig`, such as ``precision=4``.

    Raises:
        ConfigError: An option is unknown or its value is not allowed, or `base` is no such strategy.
    """

    _several, _kinds = DDPStrategy, Strategy

    @naming_options
    def __init__(
        self, config: DAFConfig | dict[str, Any] | None = None, base: Strategy | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._begin(config, options, base, Reporter())


class Reporter(Callback):
    """Logs what DAF measured, at the end of a batch, and tells it of optimizers that are about to step."""

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        announce_update(trainer, optimizer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        report_metrics(trainer, pl_module)


def register(registry: dict[str, Any] = StrategyRegistry) -> None:
    """Makes ``Trainer(strategy="daf")`` work, in a registry of strategies that does not know the name."""
    register_in(registry, DAFStrategy)


register()
