"""Steps of small language models, plain and rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from daf_core.rewrites.registry import OperatorRewrites

VOCABULARY, TOKENS, ROWS = 200, 32, 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,  # logits that a limit bends
}


def gpt2(dropout: float = 0.0, **options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        loss_type="ForCausalLM",
        **options,
    )
    return GPT2LMHeadModel(config).train()


def with_bias() -> GPT2LMHeadModel:
    model = gpt2(tie_word_embeddings=False)
    model.lm_head = nn.Linear(64, VOCABULARY)
    return model


def gemma() -> nn.Module:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0)).train()


def granite() -> nn.Module:
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)).train()


def cohere() -> nn.Module:
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)).train()


def batch(ignored: int = 10) -> dict[str, Tensor]:
    """Returns rows whose first labels do not count."""
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([tensor.grad.flatten().double() for tensor in model.parameters() if tensor.grad is not None])


def step(model: nn.Module, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Returns the loss and the gradient."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradient(model)


def compare(model: nn.Module, run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Returns the relative differences that the rewrites make to loss and gradient."""
    plain = run()
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    try:
        rewritten = run()
    finally:
        rewrites.undo()
    return tuple(float((new - old).norm() / old.norm()) for new, old in zip(rewritten, plain, strict=True))
