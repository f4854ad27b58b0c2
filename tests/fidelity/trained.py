"""Language models with what training leaves in them: biases of keys and values, and channels that are always large.

Random weights have none of it, and what all tokens share cancels in many gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.harness import integers, normal
from tests.fidelity.measure import Case, Problem

WORDS, ROWS, TOKENS, WIDTH = 200, 8, 64, 128
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": TOKENS + 16,
}
GPT2_SIZES = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": TOKENS,
    "use_cache": False,
}
LARGE_CHANNELS = 2

Change = Callable[[nn.Module], list[nn.Parameter]]
"""Changes a model's weights, and returns the parameters whose gradient is told, those that suffer; empty for all."""


def cases() -> Iterator[Case]:
    """Yields models that have one of these things."""
    for model in ("BertForMaskedLM", "Qwen2ForCausalLM"):
        for name, others in (("key", ("query", "q_proj")), ("value", ("query", "q_proj", "key", "k_proj"))):
            change = partial(_biased, (f"{name}.bias", f"{name[0]}_proj.bias"), 5.0, others)
            yield Case(f"{model}, {name}s with a bias of 5", partial(_problem, model, change))
    for bias in (2.0, 10.0):
        change = partial(_biased, ("c_attn.bias",), bias, ("h.0.attn.c_attn",))
        yield Case(f"GPT2LMHeadModel, all with a bias of {bias:g}", partial(_problem, "GPT2LMHeadModel", change))
    for model, name in (("BertForMaskedLM", "LayerNorm.bias"), ("GPT2LMHeadModel", "ln_1.bias")):
        change = partial(_biased, (name,), 1.0, ())
        yield Case(f"{model}, normalizations with a bias of 1", partial(_problem, model, change))
    for model in ("BertForMaskedLM", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        yield Case(f"{model}, {LARGE_CHANNELS} large channels", partial(_problem, model, _with_large_channels))


def _problem(title: str, change: Change) -> Problem:
    import transformers

    model_class = getattr(transformers, title)
    sizes: dict[str, Any] = GPT2_SIZES if title.startswith("GPT2") else SIZES
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).train()
    with torch.no_grad():
        leaves = change(model)
    ids = integers(WORDS - 8, ROWS, TOKENS) + 4

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    return Problem(loss, leaves or [each for each in model.parameters() if each.requires_grad], model)


def _biased(ends: tuple[str, ...], deviation: float, told: tuple[str, ...], model: nn.Module) -> list[nn.Parameter]:
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(ends):
            parameter.copy_(deviation * normal(*parameter.shape, seed=place))
    return [
        each
        for name, each in model.named_parameters()
        if name.endswith("weight") and any(part in name for part in told)
    ]


def _with_large_channels(model: nn.Module) -> list[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if "embed" in name and len(parameter) == WORDS:
            parameter[:, :LARGE_CHANNELS] += 30 * parameter.std()
    return []
