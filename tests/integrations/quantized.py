"""Small Llamas whose frozen weights are quantized, with adapters: by bitsandbytes, torchao and HQQ."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

WORDS, ROWS, TOKENS, STEPS = 256, 8, 128, 2

FOUR_BITS: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


@cache
def saved_llama() -> Path:
    """Returns a folder with a Llama's weights: quantizers of transformers work on weights that are loaded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = Path(tempfile.mkdtemp())
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads)).save_pretrained(folder)
    return folder


def loaded(quantization: Any = None) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        saved_llama(), quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )


def in_full() -> nn.Module:
    return loaded().requires_grad_(False)


def of_bitsandbytes(checkpointing: bool = False, **options: Any) -> nn.Module:
    model = loaded(BitsAndBytesConfig(**options))
    return peft.prepare_model_for_kbit_training(model, checkpointing, {"use_reentrant": False})


def in_four_bits() -> nn.Module:
    return of_bitsandbytes(**FOUR_BITS)


def in_eight_bits() -> nn.Module:
    return of_bitsandbytes(load_in_8bit=True)


def checkpointed() -> nn.Module:
    return of_bitsandbytes(checkpointing=True, **FOUR_BITS)


def of_torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return peft.prepare_model_for_kbit_training(loaded(TorchAoConfig(Int8WeightOnlyConfig())), False)


def of_hqq() -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model, sizes = in_full(), BaseQuantizeConfig(nbits=4, group_size=64)
    for name, layer in [*model.model.layers.named_modules()]:
        if isinstance(layer, nn.Linear):
            quantized = HQQLinear(layer, sizes, compute_dtype=torch.float32, device="cpu")
            model.model.layers.set_submodule(name, quantized)
    return model


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """Returns a model with an adapter in every linear layer, in training."""
    torch.manual_seed(1)
    layers = [f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")]
    options = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": layers, **options}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).train()


def batches() -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (ROWS, TOKENS), generator=random)
        yield {"input_ids": ids, "labels": ids}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def lorafa(model: nn.Module) -> torch.optim.Optimizer:
    """Freezes the first matrix of each adapter."""
    return create_lorafa_optimizer(model, r=8, lora_alpha=16, lr=1e-3)


def trained(model: nn.Module, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[list[float], Tensor]:
    """Trains, and returns each step's loss and all gradients of the last."""
    optimizer, losses, found = optimizer_of(model), list[float](), torch.empty(0)
    for step, batch in enumerate(batches()):
        torch.manual_seed(step)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return losses, found
