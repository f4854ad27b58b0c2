"""The option `chunked_loss`: whether a language model's loss is computed in chunks."""

from __future__ import annotations

from logging import getLogger

from torch import nn

from daf_core.config import DAFConfig
from daf_core.rewrites.base import Undo
from daf_core.rewrites.causal_lm import LOSSES_WITHOUT_LOGITS, has_head
from daf_core.rewrites.registry import LOSS, OperatorRewrites, uncompiled
from daf_core.unsupported.table import Context, Feature, unsupported_reasons

_SHARDING = ("deepspeed.", "torch.distributed.fsdp.", "fairscale.")
"""Packages whose wrappers leave a process a part of each weight, or update weights where no hook sees it."""

log = getLogger("daf")


def chunk_loss(config: DAFConfig, model: nn.Module) -> Undo | None:
    """Has a model, as it is called, compute its loss in chunks where the option says so.

    Returns:
        What undoes it, to be called once; None where nothing was done.

    Raises:
        ConfigError: ``chunked_loss=True``, and the model's loss cannot be computed so.
    """
    wanted = config.chunked_loss
    if wanted is False or (wanted == "auto" and config.precision == "exact"):
        return None
    rewrites = OperatorRewrites(model, {LOSS})
    reasons = unsupported_reasons(CHUNKED_LOSS, Context(model))
    if not reasons:
        rewrites.apply()
        return rewrites.undo
    name = type(next(iter(_with_heads(model)), model)).__name__
    if wanted is True:
        raise CHUNKED_LOSS.error_for(f"{name}: {reasons[0]}")
    log.debug("The loss of %s is not computed in chunks: %s", name, reasons[0])
    return None


def _with_heads(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if has_head(module)]


def _sharding(context: Context) -> str | None:
    kinds = {base for module in context.model.modules() for base in type(module).__mro__}
    found = next((kind for kind in kinds if kind.__module__.startswith(_SHARDING)), None)
    return None if found is None else found.__module__.split("._")[0]


def _compiled(context: Context) -> bool:
    heads = _with_heads(context.model)
    return bool(heads) and not any(module in heads for _, module in uncompiled(context.model))


def _found_none(context: Context) -> bool:
    return not OperatorRewrites(context.model, {LOSS}).steps


def _unlike(context: Context) -> str | None:
    """Returns why no head of the model can do without logits."""
    if not _found_none(context):
        return None
    heads = _with_heads(context.model)
    return next((reason for head in heads for reason in unsupported_reasons(LOSSES_WITHOUT_LOGITS, head)), None)


CHUNKED_LOSS = Feature(
    (
        (_sharding, "its weights are sharded by {}"),
        (_compiled, "torch.compile compiles it"),
        (_unlike, "{}"),
        (_found_none, "there is no language model of transformers in it"),
    ),
    error="chunked_loss=True is not possible for {}. Set it to False, or leave it out",
)
