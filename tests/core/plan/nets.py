"""Small models of every kind that plans are made for, with a batch and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.core.harness import integers, normal
from tests.integrations.hf_runs import roberta

VOCABULARY = 64
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

# Their name before transformers 5.24, which has another.
takes_caches = pytest.mark.filterwarnings("ignore:`(past_key_values|cache_params)` is deprecated:FutureWarning")

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def gpt2(layers: int = 2, width: int = 64, positions: int = 64) -> nn.Module:
    shape = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": positions}
    return GPT2LMHeadModel(GPT2Config(**SMALL, **shape, loss_type="ForCausalLM"))


def llama() -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **shape))


def bart() -> nn.Module:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    feed_forward = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32}
    return BartForConditionalGeneration(
        BartConfig(**SMALL, **layers, **feed_forward, decoder_start_token_id=0, forced_eos_token_id=None)
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            **SMALL, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.1, decoder_start_token_id=0
        )
    )


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(x)


class ResNet(nn.Module):
    """Two stages of two blocks."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stages = nn.Sequential(*(nn.Sequential(Residual(channels), Residual(channels)) for _ in range(2)))
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    """Torch's own encoder layers, and a mask for them."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class FeedForward(nn.Module):
    """Two linear layers and what is between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Experts(nn.Module):
    """A layer whose rows go through one of several experts each."""

    def __init__(self, width: int = 32, count: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList([FeedForward(width) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x))
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                result = result.index_copy(0, rows, expert(x[rows]) * weights[rows, None])
        return x + result


class Mixture(nn.Module):
    """Layers of experts."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _tokens(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    result = model(batch["x"])
    return (
        (result - normal(*result.shape[1:], seed=9)).square().mean()
    )  # a normalization's own squares have a fixed mean


def tokens(rows: int, length: int = 32, seed: int = 0) -> dict[str, Tensor]:
    ids = integers(VOCABULARY - 1, rows, length, seed=seed) + 1
    return {"input_ids": ids, "labels": ids}


def _texts(rows: int) -> dict[str, Tensor]:
    return {"input_ids": integers(200, rows, 64), "labels": integers(3, rows)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Loss]] = {
    "gpt2": (gpt2, tokens, _tokens),
    "llama": (llama, tokens, _tokens),
    "roberta": (roberta, _texts, _tokens),
    "bart": (bart, tokens, _tokens),
    "t5": (t5, tokens, _tokens),
    "encoder": (Encoder, lambda rows: {"x": normal(rows, 32, 32)}, _squares),
    "resnet": (ResNet, lambda rows: {"x": normal(rows, 3, 16, 16)}, _squares),
    "mixture": (Mixture, lambda rows: {"x": normal(rows, 32)}, _squares),
}


def make(name: str, rows: int = 4) -> tuple[nn.Module, Batch, Loss]:
    """Returns a new model in training mode, always the same one, a batch, and the loss."""
    build, batch, loss = MODELS[name]
    torch.manual_seed(0)
    return build().train(), batch(rows), loss


def gradients_of(model: nn.Module, loss_of: Callable[[], Tensor], scope: Callable[[], Any]) -> list[Tensor]:
    """Returns the gradients of a step from a fixed state of torch's generator."""
    model.zero_grad()
    torch.manual_seed(3)
    with scope():
        loss = loss_of()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
