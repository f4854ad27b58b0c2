"""The strategy for Lightning where it is imported as ``pytorch_lightning``; see `daf_integrations.lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_lightning import strategies

from daf_integrations.lightning.base import register_strategy, strategy_class

if TYPE_CHECKING:
    from daf_integrations.lightning.base import ChoosingStrategy as DAFStrategy
else:
    DAFStrategy = strategy_class(strategies, "daf_integrations.pytorch_lightning")


def register(registry: Any = strategies.StrategyRegistry) -> None:
    """Makes ``Trainer(strategy="daf")`` work, in a registry of strategies that does not know the name."""
    register_strategy(registry, DAFStrategy)


register()
