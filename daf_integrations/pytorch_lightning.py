"""Lightning, where it is imported as ``pytorch_lightning``: as `daf_integrations.lightning` for its Trainer."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportArgumentType=false, reportAssignmentType=false
# The classes of the two packages are alike in all but their names, which types cannot say.

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from typing_extensions import override

from daf_core import DAFConfig
from daf_integrations.lightning.base import ChoosingStrategy, announce_update, report_metrics
from daf_integrations.lightning.base import register as register_in
from daf_integrations.session.options import naming_options


class DAFStrategy(ChoosingStrategy, SingleDeviceStrategy):
    """Compresses the activations of a training run, as `daf_integrations.lightning.DAFStrategy` does.

    Args:
        config: A configuration, or a mapping of its fields, instead of options.
        base: A strategy of ``pytorch_lightning`` to add DAF to; the object itself is left as it is.
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
