"""The strategy for ``lightning.pytorch``; importing this makes ``Trainer(strategy="daf")`` work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import strategies

from daf_integrations.lightning.base import ChoosingStrategy, strategy_for

_strategy, register = strategy_for(strategies, "daf_integrations.lightning.strategy")

if TYPE_CHECKING:
    DAFStrategy = ChoosingStrategy
else:
    DAFStrategy = _strategy
