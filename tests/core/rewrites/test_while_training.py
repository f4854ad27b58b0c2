"""What any training rewrites: GELU in several operators where activations lose precision, nothing in exact mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from daf_core import ConfigError, DAFConfig
from daf_core.config import Precision
from daf_core.rewrites.while_training import rewrite_model
from daf_integrations.session.session import DAFSession
from tests.core.harness import normal


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), NewGELUActivation(), nn.Linear(64, 1))


def saved(model: nn.Module, inputs: Tensor) -> int:
    sizes = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: sizes.append(each.numel()) or each, lambda each: each):
        model(inputs)
    return sum(size >= inputs.numel() for size in sizes)


@pytest.mark.parametrize("precision", ["auto", 8, 1])
def test_a_gelu_saves_its_input_alone_until_that_is_undone(precision: Precision) -> None:
    model, inputs = mlp(), normal(100, 64)
    plain, result = saved(model, inputs), model(inputs)
    undo = rewrite_model(DAFConfig(precision=precision), model)
    assert (plain, saved(model, inputs)) == (6, 3)
    torch.testing.assert_close(model(inputs), result, rtol=1e-5, atol=1e-6)
    undo()
    assert saved(model, inputs) == plain
    assert "forward" not in vars(model[1])


def test_exact_mode_computes_what_plain_training_does() -> None:
    model = mlp()
    rewrite_model(DAFConfig(precision="exact"), model)
    assert "forward" not in vars(model[1])


def test_a_loss_that_cannot_be_computed_in_chunks_leaves_nothing_behind() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match="chunked_loss=True is not possible"):
        rewrite_model(DAFConfig(chunked_loss=True), model)
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_session_gives_the_model_back(budget: str | None) -> None:
    model = mlp()
    session = DAFSession(DAFConfig(precision=4, memory_budget=budget))
    session.attach(model)
    assert "forward" in vars(model[1])
    session.detach()
    assert "forward" not in vars(model[1])
