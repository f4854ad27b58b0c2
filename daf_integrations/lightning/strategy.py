"""The strategy for ``lightning.pytorch``; importing this makes ``Trainer(strategy="daf")`` work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import strategies

from daf_integrations.lightning.base import register_strategy, strategy_class

if TYPE_CHECKING:
    from daf_integrations.lightning.base import ChoosingStrategy as DAFStrategy
else:
    DAFStrategy = strategy_class(strategies, "daf_integrations.lightning.strategy")


def register(registry: Any = strategies.StrategyRegistry) -> None:
    """Makes ``Trainer(strategy="daf")`` work, in a registry of strategies that does not know the name."""
    register_strategy(registry, DAFStrategy)


register()
