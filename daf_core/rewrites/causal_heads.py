"""Which language models have a loss that can be computed without the logits."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from daf_core.rewrites.base import is_bare, qualified_name
from daf_core.rewrites.causal_lm import ChunkedCausalLMLoss
from daf_core.unsupported.table import Feature, unsupported_reasons

_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LOSSES = "transformers.loss.loss_utils"
_LOSS = f"{_LOSSES}.ForCausalLMLoss"

_FUSED = "liger_kernel"
"""Package whose forward for models computes the loss by itself."""

_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier")
"""Fields of configurations that say what a model does to its logits before the loss."""


def find_head(model: nn.Module) -> nn.Linear | None:
    """Returns the output projection of a causal language model; None where its loss stays as it is."""
    owner: Any = model
    rewritten = isinstance(vars(model).get("_loss_function"), ChunkedCausalLMLoss)
    if not has_head(model) or (not rewritten and unsupported_reasons(LOSSES_WITHOUT_LOGITS, model)):
        return None
    return owner.get_output_embeddings()


def has_head(model: nn.Module) -> bool:
    """Says whether a module is a model of transformers with an output projection of any kind."""
    owner: Any = model
    return _is_pretrained(model) and owner.get_output_embeddings() is not None


def _is_pretrained(model: nn.Module) -> bool:
    return any(qualified_name(base) == _MODEL for base in type(model).__mro__)


def _other_layer(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return None if type(head) is nn.Linear else type(head).__name__


def _is_watched(model: Any) -> bool:
    return not is_bare(model.get_output_embeddings())


def _other_weight(model: Any) -> bool:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    return type(head.weight) is not nn.Parameter or head.weight.shape != (head.out_features, head.in_features)


def _is_fused(model: Any) -> bool:
    return getattr(model.forward, "__module__", "").partition(".")[0] == _FUSED


def _other_loss(model: Any) -> bool:
    # A class that computes its loss by other means reads the logits.
    forwards = [vars(base)["forward"] for base in type(model).__mro__ if _runs(base)]
    asks = any("loss_function" in _names_in(forward) for forward in forwards)
    return not asks or qualified_name(_loss_of(model)) != _LOSS


def _scale(model: Any) -> str | None:
    config = model.config.get_text_config()
    return next((name for name in _SCALES if getattr(config, name, None) is not None), None)


def _runs(kind: type) -> bool:
    return issubclass(kind, nn.Module) and "forward" in vars(kind)


def _names_in(function: Any) -> tuple[str, ...]:
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def _loss_of(model: Any) -> Any:
    """Returns a model's `loss_function`; without the warning that transformers gives where it takes the default."""
    own = getattr(model, "_loss_function", None)
    known = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", {})
    return own or known.get(getattr(model, "loss_type", None)) or known.get("ForCausalLM")


LOSSES_WITHOUT_LOGITS = Feature(
    "a loss without logits",
    (
        (_other_layer, "its output projection is a {}, and no nn.Linear"),
        (_is_watched, "its output projection has hooks or a forward of its own"),
        (_other_weight, "the weight of its output projection is no plain parameter"),
        (_is_fused, "its forward computes a fused loss already"),
        (_other_loss, "its loss is another than transformers' ForCausalLMLoss"),
        (_scale, "it changes its logits before the loss ({})"),
    ),
)
"""For a model of transformers that has an output projection."""
