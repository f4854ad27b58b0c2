"""The option `chunked_loss`: whether a language model's loss is computed in chunks."""

from __future__ import annotations

from logging import getLogger

from torch import nn

from daf_core.config import DAFConfig
from daf_core.errors import ConfigError
from daf_core.rewrites.base import Undo
from daf_core.rewrites.causal_heads import has_head, obstacle
from daf_core.rewrites.registry import LOSS, OperatorRewrites, outside_of_graphs

_SHARDING = ("deepspeed.", "torch.distributed.fsdp.", "fairscale.")
"""Packages whose wrappers leave a process a part of each weight, or update weights where no hook sees it."""

log = getLogger("daf")


def chunk_loss(config: DAFConfig, model: nn.Module) -> Undo | None:
    """Has a model compute its loss in chunks where the option says so.

    Args:
        config: The options.
        model: The model as it is called.

    Returns:
        What undoes it, to be called once; None where nothing was done.

    Raises:
        ConfigError: ``chunked_loss=True``, and the model's loss cannot be computed so.
    """
    wanted = config.chunked_loss
    if wanted is False or (wanted == "auto" and config.precision == "exact"):
        return None
    rewrites = OperatorRewrites(model, {LOSS})
    reason = _sharded(model) or (None if rewrites.found else _reason(model))
    if reason is None:
        rewrites.apply()
        return rewrites.undo
    if wanted is True:
        raise ConfigError(
            f"chunked_loss=True is not possible for {_name(model)}: {reason}. Set it to False, or leave it out"
        )
    log.debug("The loss of %s is not computed in chunks: %s", _name(model), reason)
    return None


def _sharded(model: nn.Module) -> str | None:
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    found = next((kind for kind in kinds if kind.__module__.startswith(_SHARDING)), None)
    return None if found is None else f"its weights are sharded by {found.__module__.split('._')[0]}"


def _reason(model: nn.Module) -> str:
    heads = [module for module in model.modules() if has_head(module)]
    if heads and not any(module in heads for _, module in outside_of_graphs(model)):
        return "torch.compile compiles it"
    return next(filter(None, map(obstacle, heads)), "there is no language model of transformers in it")


def _name(model: nn.Module) -> str:
    owner = next((module for module in model.modules() if has_head(module)), model)
    return type(owner).__name__
