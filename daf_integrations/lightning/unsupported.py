"""Lightning strategies and modules that features of DAF do not work with."""

# pyright: reportPrivateUsage=false
# Lightning has no public way to ask whether a LightningModule is compiled.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from daf_core.unsupported.micro_batches import NO_ROWS, without_rows
from daf_core.unsupported.models import AUDITS, PLANS, SHARDED
from daf_core.unsupported.table import Feature, Limitation

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy


class LightningContext(NamedTuple):
    """A strategy after its setup, the module that it trains, and the step's batch."""

    strategy: Strategy
    module: LightningModule
    batch: Any = None


def _sharding(context: LightningContext) -> str | None:
    model = context.strategy.model
    whole = model is context.module or isinstance(model, DistributedDataParallel)
    return None if whole else type(context.strategy).__name__


def _compiled(context: LightningContext) -> str | None:
    return None if context.module._compiler_ctx is None else type(context.module).__name__


def _manual(sentence: str) -> Limitation:
    return lambda context: not context.module.automatic_optimization, sentence


LIGHTNING_AUDITS = Feature(
    (
        _manual("with manual optimization, training_step runs its own backward and returns no loss to measure"),
        (_sharding, SHARDED),
        (lambda context: without_rows(context.batch), NO_ROWS),
    ),
    AUDITS.error,
)

LIGHTNING_PLANS = Feature(
    (
        _manual("with manual optimization, training_step runs its own backward and optimizer steps"),
        (_sharding, SHARDED),
        (_compiled, "{} is compiled, and what a graph of torch.compile takes is not measured"),
    ),
    PLANS.error,
)

LIGHTNING_ELASTIC = Feature(
    (_manual("only the module knows where a step begins; set automatic_optimization=True, or leave out elastic"),),
    "elastic training is not possible with manual optimization, in which {}",
)
