"""Models and batches that the training benchmark runs: real configurations, random weights, fixed seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    RobertaConfig,
)

SEED = 20
LORA_RANK = 8
LORA_B_DEVIATION = 0.02  # as large as the other weights' at initialisation

TaskKind = Literal["SEQ_CLS", "CAUSAL_LM", "image"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of the benchmark: its configuration, its task and where its adapters go."""

    config: Callable[[], PreTrainedConfig]
    task: TaskKind
    lora_targets: tuple[str, ...] = ()


def _roberta_base() -> PreTrainedConfig:
    return RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)


def _gpt2() -> PreTrainedConfig:
    return GPT2Config(use_cache=False)


def _gpt2_medium() -> PreTrainedConfig:
    return GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8, use_cache=False
    )


def _resnet18() -> PreTrainedConfig:
    return ResNetConfig(
        layer_type="basic",
        depths=[2, 2, 2, 2],
        hidden_sizes=[64, 128, 256, 512],
        num_labels=1000,
        problem_type="single_label_classification",
    )


def _tiny() -> PreTrainedConfig:
    return RobertaConfig(
        vocab_size=128,
        max_position_embeddings=66,
        type_vocab_size=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )


MODELS: dict[str, ModelSpec] = {
    "roberta-base": ModelSpec(config=_roberta_base, task="SEQ_CLS", lora_targets=("query", "value")),
    "gpt2": ModelSpec(config=_gpt2, task="CAUSAL_LM", lora_targets=("c_attn",)),
    "gpt2-medium": ModelSpec(config=_gpt2_medium, task="CAUSAL_LM", lora_targets=("c_attn",)),
    "llama": ModelSpec(config=_llama, task="CAUSAL_LM", lora_targets=("q_proj", "v_proj")),
    "resnet18": ModelSpec(config=_resnet18, task="image"),
    "tiny": ModelSpec(config=_tiny, task="SEQ_CLS", lora_targets=("query", "value")),
}
"""The models by name; ``tiny`` is a two-layer encoder for smoke tests, its figures mean nothing."""


def build_model(name: str, *, lora_dropout: float) -> nn.Module:
    """Returns the named model in training mode, with the same weights in every process.

    Language models train LoRA adapters of rank 8 (and the classifier, if there is one); ResNet trains
    everything. ``lora_B`` starts with small random values, not with zeros as LoRA does: with zeros the
    gradient of ``lora_A`` would be zero, and half of the gradient that is compared would say nothing.
    """
    spec = MODELS[name]
    torch.manual_seed(SEED)
    model: nn.Module = _from_config(spec)
    if spec.lora_targets:
        model = _add_lora(model, spec, lora_dropout)
    return model.train()


def build_batch(name: str, *, batch: int, seq: int, image: int) -> dict[str, Tensor]:
    """Returns one random batch for the named model, the same in every process.

    Args:
        name: A key of ``MODELS``.
        batch: Rows of the batch.
        seq: Tokens of each row, for language models.
        image: Height and width of each image, for image models.
    """
    spec = MODELS[name]
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(0, 2, (batch,), generator=generator)
    if spec.task == "image":
        pixels = torch.randn(batch, 3, image, image, generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    smallest_id = 4  # below are padding and other special tokens
    ids = torch.randint(smallest_id, spec.config().vocab_size, (batch, seq), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | {"labels": ids if spec.task == "CAUSAL_LM" else labels}


def _from_config(spec: ModelSpec) -> PreTrainedModel:
    auto_class = {
        "SEQ_CLS": AutoModelForSequenceClassification,
        "CAUSAL_LM": AutoModelForCausalLM,
        "image": AutoModelForImageClassification,
    }[spec.task]
    return auto_class.from_config(spec.config())


def _add_lora(model: nn.Module, spec: ModelSpec, dropout: float) -> nn.Module:
    config = LoraConfig(
        task_type=spec.task,
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lora_dropout=dropout,
        target_modules=list(spec.lora_targets),
        fan_in_fan_out="c_attn" in spec.lora_targets,  # GPT-2 keeps its weights transposed
    )
    adapted = get_peft_model(model, config)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=LORA_B_DEVIATION)
    return adapted


def _maker(name: str) -> Callable[[int, int], tuple[nn.Module, dict[str, Tensor]]]:
    """Returns what `daf bench benchmarks/zoo/models.py:NAME` calls; for images the length is height and width."""

    def make(rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
        batch = build_batch(name, batch=rows, seq=length, image=length)
        return build_model(name, lora_dropout=0.1), batch

    return make


roberta_base, gpt2, gpt2_medium = _maker("roberta-base"), _maker("gpt2"), _maker("gpt2-medium")
llama, resnet18, tiny = _maker("llama"), _maker("resnet18"), _maker("tiny")
