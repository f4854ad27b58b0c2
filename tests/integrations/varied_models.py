"""Small models whose activations are those of few architectures: experts, state spaces, diffusion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, WORDS, ROWS, TOKENS = 3, 256, 4, 64
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS: dict[str, Any] = {**HEADS, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"intermediate_size": 128, "num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**EXPERTS, **sizes))


def looped() -> nn.Module:
    """Experts one after the other, those alone that have tokens: which save something, and how many rows, varies."""
    model = mixtral()
    model.set_experts_implementation("eager")
    return model


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=64, num_experts=8))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"intermediate_size": 64, "num_local_experts": 4, "sliding_window": 16}
    return GptOssForCausalLM(GptOssConfig(**EXPERTS, **sizes, layer_types=["sliding_attention", "full_attention"]))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SIZES, state_size=8))


def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 32}
    return Mamba2ForCausalLM(Mamba2Config(**SIZES, **sizes))


class Denoiser(nn.Module):
    """Returns the loss of predicting the noise, as scripts that train diffusion models compute it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        layers = ["to_q", "to_k", "to_v", "to_out.0"]
        self.net = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=layers))

    def forward(self, latents: Tensor, noise: Tensor, timestep: Tensor, **conditions: Tensor) -> dict[str, Tensor]:
        predicted = self.net(0.7 * latents + 0.7 * noise, timestep=timestep, **conditions).sample
        return {"loss": functional.mse_loss(predicted[:, : noise.shape[1]], noise)}


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
    return Denoiser(DiTTransformer2DModel(**heads, in_channels=4, sample_size=16, num_embeds_ada_norm=10))


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    # This name is one of the number of heads.
    heads = {"cross_attention_dim": 32, "attention_head_dim": 2}
    channels = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    return Denoiser(UNet2DConditionModel(sample_size=16, **blocks, **heads, **channels))


def batches(model: nn.Module, varied: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yields the steps' batches; `varied` has each of another size."""
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        rows, tokens = (ROWS - step % 3, TOKENS - 7 * step) if varied else (ROWS, TOKENS)
        if not isinstance(model, Denoiser):
            ids = torch.randint(0, WORDS, (rows, tokens), generator=random)
            yield {"input_ids": ids, "labels": ids}
            continue
        shape = rows, 4, *[16 - 4 * varied * (step % 2)] * 2
        latents, noise = (torch.randn(shape, generator=random) for _ in range(2))
        timestep = torch.randint(0, 1000, (rows,), generator=random)
        labels = torch.randint(0, 10, (rows,), generator=random)
        text = torch.randn(rows, 7, 32, generator=random)
        conditions = {"encoder_hidden_states": text} if "UNet" in type(model.net.base_model.model).__name__ else {}
        yield {"latents": latents, "noise": noise, "timestep": timestep, **(conditions or {"class_labels": labels})}
