"""The strategy for Lightning where it is imported as ``pytorch_lightning``; see `daf_integrations.lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_lightning import strategies

from daf_integrations.lightning.base import ChoosingStrategy, strategy_for

_strategy, register = strategy_for(strategies, "daf_integrations.pytorch_lightning")

if TYPE_CHECKING:
    DAFStrategy = ChoosingStrategy
else:
    DAFStrategy = _strategy
