"""Experts, state spaces and diffusion: exact mode is plain training, and gradients at 4 bits are within the bound."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import daf_integrations as daf
from tests.integrations import varied_models as models

BOUND = 0.3
"""Relative error of all trained gradients at 4 bits."""

NEEDS_DIFFUSERS = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers")

Make = Callable[[], nn.Module]

MODELS = [
    pytest.param(models.mixtral, id="Mixtral"),
    pytest.param(models.looped, id="Mixtral, looped"),
    pytest.param(models.qwen3_moe, id="Qwen3-MoE"),
    pytest.param(models.gpt_oss, id="gpt-oss"),
    pytest.param(models.mamba, id="Mamba"),
    pytest.param(models.mamba2, id="Mamba2"),
    pytest.param(models.dit, marks=NEEDS_DIFFUSERS, id="DiT"),
    pytest.param(models.unet, marks=NEEDS_DIFFUSERS, id="UNet"),
]


@pytest.mark.parametrize("varied", [False, True], ids=["one size", "sizes that change"])
@pytest.mark.parametrize("make", MODELS)
def test_gradients(make: Make, varied: bool) -> None:
    expected = gradients(made(make), varied)
    exact = gradients(daf.prepare(made(make), precision="exact"), varied)
    assert all(map(torch.equal, exact, expected))
    four = daf.prepare(made(make), precision=4, audit_every=None)
    found = gradients(four, varied)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < BOUND
    assert daf.metrics(four)["daf/ratio"] > 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [models.mixtral, models.looped, models.qwen3_moe])
def test_checkpointed_experts_get_the_rows_that_they_had(make: Make, reentrant: bool) -> None:
    """From inputs that lost precision others would be chosen, and non-reentrant checkpoints see other shapes."""

    def checkpointed() -> nn.Module:
        model = made(make)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    expected = gradients(checkpointed(), False)
    found = gradients(daf.prepare(checkpointed(), precision=4, audit_every=None), False)
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)) < 0.03


def made(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def gradients(model: nn.Module, varied: bool) -> list[Tensor]:
    """Returns all gradients of each step; weights stay as they are, so that errors are those of one step."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
    found: list[Tensor] = []
    for step, batch in enumerate(models.batches(model, varied)):
        torch.manual_seed(step)
        model(**batch)["loss"].backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return found
