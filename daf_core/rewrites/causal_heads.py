"""Which language models have a loss that can be computed without the logits."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from daf_core.rewrites.base import is_bare, qualified_name
from daf_core.rewrites.causal_lm import ChunkedCausalLMLoss

_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LOSSES = "transformers.loss.loss_utils"
_LOSS = f"{_LOSSES}.ForCausalLMLoss"

_FUSED = "liger_kernel"
"""Package whose forward for models computes the loss by itself."""

_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier")
"""Fields of configurations that say what a model does to its logits before the loss."""


def find_head(model: nn.Module) -> nn.Linear | None:
    """Returns the output projection of a causal language model, or None where its loss stays as it is.

    Args:
        model: Any module.
    """
    owner: Any = model
    return owner.get_output_embeddings() if obstacle(model) is None else None


def has_head(model: nn.Module) -> bool:
    """Says whether a module is a model of transformers with an output projection of any kind."""
    owner: Any = model
    return _is_pretrained(model) and owner.get_output_embeddings() is not None


def obstacle(model: nn.Module) -> str | None:
    """Returns why the loss of a module stays as it is; None where it can be computed without the logits.

    A model that is rewritten already has no obstacle.

    Args:
        model: Any module.
    """
    if not has_head(model):
        return "it is no language model of transformers"
    owner: Any = model
    if isinstance(vars(model).get("_loss_function"), ChunkedCausalLMLoss):
        return None
    return _obstacle_in_head(owner.get_output_embeddings()) or _obstacle_in_loss(owner)


def _is_pretrained(model: nn.Module) -> bool:
    return any(qualified_name(base) == _MODEL for base in type(model).__mro__)


def _obstacle_in_head(head: nn.Module) -> str | None:
    if type(head) is not nn.Linear:
        return f"its output projection is a {type(head).__name__}, and no nn.Linear"
    if not is_bare(head):
        return "its output projection has hooks or a forward of its own"
    if type(head.weight) is not nn.Parameter or head.weight.shape != (head.out_features, head.in_features):
        return "the weight of its output projection is no plain parameter"
    return None


def _obstacle_in_loss(model: Any) -> str | None:
    if getattr(model.forward, "__module__", "").partition(".")[0] == _FUSED:
        return "its forward computes a fused loss already"
    # A class that computes its loss by other means reads the logits.
    asks = any("loss_function" in _names_in(vars(base)["forward"]) for base in type(model).__mro__ if _runs(base))
    if not asks or qualified_name(_loss_of(model)) != _LOSS:
        return "its loss is another than transformers' ForCausalLMLoss"
    config = model.config.get_text_config()
    scale = next((name for name in _SCALES if getattr(config, name, None) is not None), None)
    return None if scale is None else f"it changes its logits before the loss ({scale})"


def _runs(kind: type) -> bool:
    return issubclass(kind, nn.Module) and "forward" in vars(kind)


def _names_in(function: Any) -> tuple[str, ...]:
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def _loss_of(model: Any) -> Any:
    """Returns a model's `loss_function`; without the warning that transformers gives where it takes the default."""
    own = getattr(model, "_loss_function", None)
    known = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", {})
    return own or known.get(getattr(model, "loss_type", None)) or known.get("ForCausalLM")
