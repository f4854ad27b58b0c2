"""Adapters on frozen quantized weights (QLoRA): exact mode is plain training, weights count for nothing, few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import daf_integrations as daf
from daf_core.autograd.torch_private import all_nodes
from tests.integrations.quantized import (
    adam,
    adapted,
    batches,
    checkpointed,
    in_eight_bits,
    in_four_bits,
    in_full,
    lorafa,
    needs,
    of_hqq,
    of_torchao,
    trained,
)

Make = Callable[[], nn.Module]

BOUND = 0.2
"""Relative error of all gradients of the second step at 4 bits: .10 to .17."""


@pytest.mark.parametrize(
    ("base", "adapter", "optimizer"),
    [
        pytest.param(in_four_bits, {}, adam, marks=needs("bitsandbytes"), id="4 bits"),
        pytest.param(in_eight_bits, {}, adam, marks=needs("bitsandbytes"), id="8 bits"),
        pytest.param(in_four_bits, {"use_dora": True}, adam, marks=needs("bitsandbytes"), id="DoRA"),
        pytest.param(in_four_bits, {"use_rslora": True}, adam, marks=needs("bitsandbytes"), id="rsLoRA"),
        pytest.param(in_four_bits, {}, lorafa, marks=needs("bitsandbytes"), id="LoRA-FA"),
        pytest.param(of_torchao, {}, adam, marks=needs("torchao"), id="torchao"),
        pytest.param(of_hqq, {}, adam, marks=needs("hqq"), id="HQQ"),
    ],
)
def test_adapters_on_quantized_weights(base: Make, adapter: dict[str, Any], optimizer: Any) -> None:
    losses, gradient = trained(adapted(base(), **adapter), optimizer)
    exact = daf.prepare(adapted(base(), **adapter), precision="exact")
    found, same = trained(exact, optimizer)
    assert found == losses
    assert torch.equal(same, gradient)
    four = daf.prepare(adapted(base(), **adapter), precision=4, audit_every=None)
    _, close = trained(four, optimizer)
    assert (close - gradient).norm() < BOUND * gradient.norm()
    metrics = daf.metrics(four)
    assert metrics["daf/held_mb"] <= metrics["daf/raw_mb"] / 8


@needs("bitsandbytes")
def test_quantized_weights_count_for_nothing() -> None:
    """What a step saves is what it saves with weights in full, which are no activations either."""
    raw: list[float] = []
    for base in (in_full, in_four_bits, in_eight_bits):
        model = daf.prepare(adapted(base()), precision="exact")
        trained(model, adam)
        raw.append(daf.metrics(model)["daf/raw_mb"])
    assert raw[0] == raw[1] == raw[2] > 0


@needs("bitsandbytes")
@pytest.mark.parametrize("precision", ["exact", 4])
def test_inputs_of_frozen_layers_are_let_go(precision: Any) -> None:
    """They would stay in memory beside what is stored of them, and no hook sees them."""
    plain, prepared = adapted(in_eight_bits()), daf.prepare(adapted(in_eight_bits()), precision=precision)
    batch = next(batches())
    held = [inputs_in(model(**batch).loss.grad_fn) for model in (plain, prepared)]
    assert len(held[0]) == len(held[1]) > 0
    assert None not in held[0]
    assert set(held[1]) == {None}


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(in_four_bits, marks=needs("bitsandbytes"), id="4 bits"),
        pytest.param(in_eight_bits, marks=needs("bitsandbytes"), id="8 bits"),
    ],
)
def test_audits_leave_quantized_weights_as_they_are(base: Make) -> None:
    """The first pass of an 8-bit layer moves scales from the weight, and one that an audit runs is taken back."""
    found = [trained(daf.prepare(adapted(base()), precision=4, audit_every=every), adam) for every in (None, 1)]
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def inputs_in(node: Any) -> list[Any]:
    """Returns what the nodes of a graph that are bitsandbytes' hold as their input."""
    return [each.A for each in all_nodes(node) if type(each).__name__ == "MatMul8bitFpBackward"]


@needs("bitsandbytes")
def test_checkpoints_of_prepare_model_for_kbit_training() -> None:
    """It switches activation checkpointing on by default: what DAF compresses are the inputs of blocks."""
    losses, gradient = trained(adapted(checkpointed()), adam)
    found, same = trained(daf.prepare(adapted(checkpointed()), precision="exact"), adam)
    assert found == losses
    assert torch.equal(same, gradient)
    four = daf.prepare(adapted(checkpointed()), precision=4, audit_every=None)
    _, close = trained(four, adam)
    assert (close - gradient).norm() < BOUND * gradient.norm()
    assert daf.metrics(four)["daf/ratio"] > 4
