"""All language models of transformers, small and with random weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.harness import integers
from tests.fidelity.measure import Case, Problem, Skip

ROWS, TOKENS, WORDS = 4, 64, 500
MOST_PARAMETERS = 20_000_000
"""A model with more did not become small: one of its fields has a name of its own."""

SIZES: dict[int, str] = {
    WORDS: "vocab_size",
    64: "hidden_size d_model n_embd n_embed dim embedding_size embed_dim emb_dim moe_intermediate_size lru_width "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size attention_hidden_size d_embed hidden_dim "
    "word_embed_proj_dim dense_intermediate_size mlp_intermediate_size",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers num_labels "
    "num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk top_k num_kv_heads moe_k num_hidden_groups",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts encoder_layers_attention_heads moe_num_experts",
    16: "head_dim d_kv kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim qk_head_dim d_head kv_channels "
    "global_head_dim swa_head_dim",
    128: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner inner_dim d_inner ffn_hidden_size "
    "feed_forward_dim max_position_embeddings n_positions n_ctx max_seq_len max_source_positions "
    "max_target_positions block_ffn_hidden_size",
    32: "q_lora_rank block_size attention_window sliding_window chunk_size window_size local_attention",
    8: "rotary_dim state_size num_mamba_heads ssm_state_size mamba_d_state",
    1: "n_group topk_group n_groups num_nextn_predict_layers first_k_dense_replace eos_token_id bos_token_id",
    0: "pad_token_id",
}
"""Fields of configurations, by what they are made."""

SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
ATTEMPTS = (
    SMALL,
    {**SMALL, "num_key_value_heads": 4, "num_experts_per_tok": 1},
    {name: size for name, size in SMALL.items() if size not in (1, 8, 16, 32)},
)
"""The first of them that a class takes is measured: some have no groups of heads, or defaults that fit together."""

OF_NONE = ("vocab_size", "head_dim", "num_key_value_heads")
"""Fields that are set even where the default is none."""

EOS = 1

MAPPINGS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "language model",
    "MODEL_FOR_MASKED_LM_MAPPING": "language model",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "language model",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "classifier",
}


def cases() -> Iterator[Case]:
    """Yields each class once, in training as its configuration has it."""
    from transformers.models.auto import modeling_auto

    logging.disable(logging.WARNING)
    seen = set[str]()
    for name, kind in MAPPINGS.items():
        mapping = getattr(modeling_auto, name)
        for model_type, classes in mapping._model_mapping.items():
            for title in [classes] if isinstance(classes, str) else classes:
                if title not in seen:
                    seen.add(title)
                    yield Case(title, partial(_problem, mapping, model_type, title, kind))


def _problem(mapping: Any, model_type: str, title: str, kind: str) -> Problem:
    reason = ""
    for sizes in ATTEMPTS:
        try:
            model = _built(mapping, model_type, title, sizes)
            batch = _batch(kind)
            model(**batch)
        except Exception as error:  # fields that do not fit together, other inputs than text, a missing package
            reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
            continue
        parameters = [each for each in model.parameters() if each.requires_grad]
        return Problem(partial(_loss, model, batch), parameters, model)
    raise Skip(reason)


def _batch(kind: str) -> dict[str, Tensor]:
    ids = integers(WORDS - 8, ROWS, TOKENS) + 4
    ids[:, -1] = EOS  # where some look for the end of a text
    return {"input_ids": ids, "labels": integers(2, ROWS) if kind == "classifier" else ids.clone()}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**{name: each.clone() for name, each in batch.items()}).loss


def _small_fields(default: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Returns the fields that are made smaller, those of configurations inside as mappings."""
    known = default.to_dict()
    fields: dict[str, Any] = {}
    for name, value in known.items():
        if name.endswith("_config") and isinstance(value, dict) and hasattr(getattr(default, name), "to_dict"):
            inside = getattr(default, name)
            fields[name] = {**_small_fields(inside, sizes), "model_type": inside.model_type}
        elif name in sizes and (isinstance(value, int) or (value is None and name in OF_NONE)):
            fields[name] = sizes[name]
    tokens = {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return {**fields, **tokens, **({"use_cache": False} if "use_cache" in known else {})}


def _built(mapping: Any, model_type: str, title: str, sizes: dict[str, int]) -> nn.Module:
    model_class = mapping._load_attr_from_module(model_type, title)
    mapped = mapping._load_attr_from_module(model_type, mapping._config_mapping[model_type])
    config_class = getattr(model_class, "config_class", None) or mapped
    config = config_class(**_small_fields(config_class(), sizes))
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SMALL["pad_token_id"]
    with torch.device("meta"):
        count = sum(each.numel() for each in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count / 1e6:.0f} million parameters even so")
    torch.manual_seed(0)
    return model_class(config).train()
