"""8-bit layers of bitsandbytes: what only the gradient of a frozen weight would read is let go, what is read stays."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from daf_core.rewrites.frozen_inputs import release_frozen_inputs
from tests.core.harness import normal

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


def layer_of(training: bool, frozen: bool = True) -> nn.Module:
    """Returns a layer; in evaluation it runs the function that it has for GPUs, also on a CPU."""
    plain = nn.Linear(32, 16)
    with torch.no_grad():
        plain.weight.copy_(normal(16, 32))
    layer = bitsandbytes.nn.Linear8bitLt(32, 16, has_fp16_weights=not frozen)
    layer.load_state_dict(plain.state_dict())
    layer.requires_grad_(not frozen)
    return layer.to("cpu").train(training)


def forward(layer: nn.Module) -> tuple[Tensor, Tensor, weakref.ref[Tensor]]:
    """Returns a leaf, a result of it, and what the layer got."""
    leaf = normal(8, 32).half().requires_grad_()
    inputs = leaf * 2
    return leaf, layer(inputs), weakref.ref(inputs)


@pytest.mark.parametrize("training", [True, False])
def test_a_frozen_layer_keeps_no_input(training: bool) -> None:
    layer = layer_of(training)
    expected, result, kept = forward(layer)
    assert kept() is not None
    result.sum().backward()

    undo = release_frozen_inputs(nn.Sequential(layer))
    leaf, result, kept = forward(layer)
    assert kept() is None
    result.sum().backward()
    assert torch.equal(leaf.grad, expected.grad)

    undo()
    assert "forward" not in vars(layer)


def test_a_trained_layer_keeps_its_input() -> None:
    layer = layer_of(training=True, frozen=False)
    release_frozen_inputs(layer)
    _, result, kept = forward(layer)
    assert kept() is not None
    result.sum().backward()
    assert layer.weight.grad is not None
