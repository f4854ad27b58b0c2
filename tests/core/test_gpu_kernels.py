"""Training with the Triton kernels, interpreted or on a GPU, gives the gradients of the reference bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.saved_tensors import backends
from daf_kernels import Backend
from daf_kernels.reference.backend import ReferenceBackend
from daf_kernels.triton.backend import TritonBackend
from tests.core.harness import LoRA, normal
from tests.kernels.triton_device import DEVICE


class Net(nn.Module):
    """Saves what each kernel is for: floats, a mask, signs, groups that follow blocks and groups that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(64), LoRA(64, 96)
        self.second, self.third = nn.Linear(96, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.gelu(self.first(self.norm(x)))))).square().mean()


def train(monkeypatch: pytest.MonkeyPatch, backend: Backend, **options: Any) -> tuple[list[Tensor], int]:
    """Trains six steps with a backend, the last by address; returns all gradients and the bytes held at most."""
    monkeypatch.setattr(backends, "load_backend", lambda *_: backend)
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    daf = ActivationEngine(model, DAFConfig(**options))
    gradients, held = [], 0
    for step in range(6):
        model.zero_grad()
        torch.manual_seed(step)
        with daf.compress():
            loss = model(normal(64, 64, seed=step).to(DEVICE))
        loss.backward()
        held = max(held, daf.finish_step().held_bytes)
        assert daf.leased_pages == 0
        gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    daf.close()
    return gradients, held


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": 4}, id="4 bits"),
        pytest.param({"precision": 2, "rounding": "stochastic"}, id="2 bits, stochastic"),
        pytest.param({"precision": 8, "memory_budget": 45_000}, id="a budget"),
        pytest.param({"precision": "exact"}, id="exact"),
    ],
)
def test_gradients_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    expected, reference_bytes = train(monkeypatch, ReferenceBackend(), **options)
    found, held = train(monkeypatch, TritonBackend(), **options)
    assert held == reference_bytes > 0
    assert len(found) == len(expected) > 10
    for gradient, wanted in zip(found, expected, strict=True):
        assert torch.equal(gradient, wanted)
