"""Which parts of a model are its blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, SwinConfig, SwinForImageClassification

from daf_core.model.blocks import blocks_of
from tests.core.plan import nets
from tests.core.plan.nets import FeedForward


def names(model: nn.Module) -> list[str]:
    return [block.name for block in blocks_of(model)]


EXPECTED = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "bart": [*(f"model.encoder.layers.{i}" for i in range(2)), *(f"model.decoder.layers.{i}" for i in range(2))],
    "t5": [*(f"encoder.block.{i}" for i in range(2)), *(f"decoder.block.{i}" for i in range(2))],
    "encoder": ["encoder.layers.0", "encoder.layers.1"],
    "resnet": [f"stages.{stage}.{block}" for stage in range(2) for block in range(2)],
    "mixture": [f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in range(4)],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_of_a_model(name: str) -> None:
    model, _, _ = nets.make(name)
    assert names(model) == EXPECTED[name]
    modules = dict(model.named_modules())
    assert all(modules[block.name] is block.module for block in blocks_of(model))


def test_models_without_blocks() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert names(nn.Linear(4, 4)) == []
    albert = AlbertModel(
        AlbertConfig(vocab_size=9, embedding_size=8, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    )
    assert names(albert) == []  # one layer, called again and again


def test_layers_inside_of_layers_are_the_blocks() -> None:
    """Stages of a Swin transformer are layers for transformers, as what is inside of them."""
    config = SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4)
    found = names(SwinForImageClassification(config))
    assert found == ["swin.encoder.layers.0.blocks.0", *(f"swin.encoder.layers.1.blocks.{i}" for i in range(2))]


def test_what_is_left_out_makes_room_for_what_is_around_it() -> None:
    model, _, _ = nets.make("mixture")
    assert [block.name for block in blocks_of(model, EXPECTED["mixture"][:4])] == [
        "layers.0",
        *EXPECTED["mixture"][4:],
    ]
    assert [block.name for block in blocks_of(model, EXPECTED["mixture"])] == ["layers.0", "layers.1"]


class Twice(nn.Module):
    """The same modules in two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FeedForward() for _ in range(2)])
        self.all = nn.Sequential(*self.layers, self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x)


def test_shared_modules_are_one_block_under_their_first_name() -> None:
    assert names(Twice()) == ["layers.0", "layers.1"]


def test_what_is_compiled_is_no_block() -> None:
    model = nn.Sequential(*(FeedForward() for _ in range(3)))
    model[1].compile(backend="eager")
    assert names(model) == ["0", "2"]
    assert names(nn.Sequential(torch.compile(model, backend="eager"))) == []


def _enable(model: nn.Module) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _enable_one(model: nn.Module) -> None:
    model.transformer.h[0].gradient_checkpointing = True


@pytest.mark.parametrize(("enable", "left"), [(_enable, []), (_enable_one, ["transformer.h.1"])])
def test_layers_that_the_user_recomputes_are_no_blocks(enable: Callable[[nn.Module], None], left: list[str]) -> None:
    model, _, _ = nets.make("gpt2")
    enable(model)
    assert names(model) == left
