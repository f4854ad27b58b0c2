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
    """Whether a module is a model of transformers with an output projection of any kind."""
    owner: Any = model
    is_pretrained = any(qualified_name(base) == _MODEL for base in type(model).__mro__)
    return is_pretrained and owner.get_output_embeddings() is not None


def _other_layer(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return None if type(head) is nn.Linear else type(head).__name__


def _other_weight(model: Any) -> bool:
    head = model.get_output_embeddings()
    plain = type(getattr(head, "weight", None)) is nn.Parameter
    return type(head) is nn.Linear and not (plain and head.weight.shape == (head.out_features, head.in_features))


def _other_loss(model: Any) -> bool:
    # A class that computes its loss by other means reads the logits.
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and "forward" in vars(kind)]
    codes = [getattr(inspect.unwrap(vars(kind)["forward"]), "__code__", None) for kind in kinds]
    # Not `model.loss_function`: transformers warns where it takes the default.
    known = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", {})
    default = known.get(getattr(model, "loss_type", None)) or known.get("ForCausalLM")
    loss = getattr(model, "_loss_function", None) or default
    return not any("loss_function" in getattr(code, "co_names", ()) for code in codes) or qualified_name(loss) != _LOSS


def _scale(model: Any) -> str | None:
    config = model.config.get_text_config()
    return next((name for name in _SCALES if getattr(config, name, None) is not None), None)


LOSSES_WITHOUT_LOGITS = Feature(
    "a loss without logits",
    (
        (_other_layer, "its output projection is a {}, and no nn.Linear"),
        (
            lambda model: not is_bare(model.get_output_embeddings()),
            "its output projection has hooks or a forward of its own",
        ),
        (_other_weight, "the weight of its output projection is no plain parameter"),
        (
            lambda model: getattr(model.forward, "__module__", "").partition(".")[0] == _FUSED,
            "its forward computes a fused loss already",
        ),
        (_other_loss, "its loss is another than transformers' ForCausalLMLoss"),
        (_scale, "it changes its logits before the loss ({})"),
    ),
)
"""For a model of transformers that has an output projection."""
