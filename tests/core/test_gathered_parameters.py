"""Parameters that FSDP brings together for a forward pass: no module owns them, and they are no activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.saved_tensors.classify import Eligibility, TensorKind

WIDTH = 256


class Sharded(nn.Module):
    """Owns a shard, and computes with a parameter that is whole, as FSDP's modules do while they run."""

    def __init__(self, view: bool, trained: bool) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.ones(1))
        whole = nn.Parameter(torch.randn(WIDTH * WIDTH if view else (WIDTH, WIDTH)), requires_grad=trained)
        self.whole = [whole]

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.whole[0].view(WIDTH, WIDTH)
        return nn.functional.linear(inputs * self.shard, weight).sum()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_are_kept_as_they_are(view: bool, trained: bool) -> None:
    model, inputs = Sharded(view, trained), torch.randn(512, WIDTH)
    engine = ActivationEngine(model, DAFConfig(precision=1))
    with engine.compress():
        loss = model(inputs)
    loss.backward()
    found = engine.finish_step()
    engine.close()
    products = 2 if trained else 1  # inputs, and their product with the shard where the weight is trained
    assert found.raw_bytes == pytest.approx(products * inputs.nbytes, abs=8)
    assert found.stored_as["planes"] == products


def test_freed_storage_of_a_parameter_makes_no_activation_one() -> None:
    """Its number must not be that of an activation's storage, which would be kept as it is then."""
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
    eligibility = Eligibility(model)
    eligibility.refresh()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    activations = [torch.randn(WIDTH, WIDTH) for _ in range(200)]
    assert {eligibility.form(tensor, 0) for tensor in activations} == {TensorKind.LOSSY}
