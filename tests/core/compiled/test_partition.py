"""What a compiled graph works out again in backward rather than to save it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.autograd.torch_compile import given_parameters
from tests.core.compiled.graphs import BACKEND, error_of_weight
from tests.core.harness import normal

pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")]


class Narrowing(nn.Module):
    """Two layers, of whose weights autocast makes copies."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.above = nn.Linear(64, 128), nn.Linear(128, 96).requires_grad_(trained)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.above(self.below(inputs)).float().mean()


class Widening(Narrowing):
    """The same with weights of 16 bits, and a layer that computes in 32."""

    def __init__(self, trained: bool) -> None:
        super().__init__(trained)
        self.to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.below(inputs.bfloat16()).float(), self.above.weight.float()).mean()


class Changing(Narrowing):
    """The upper weight is a buffer that each forward pass halves."""

    def __init__(self, trained: bool) -> None:
        super().__init__(trained)
        del self.above
        self.register_buffer("weight", normal(96, 128, seed=3))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result = F.linear(self.below(inputs), self.weight).float().mean()
        with torch.no_grad():
            self.weight.mul_(0.5)
        return result


def _step(model: nn.Module, bits: int | None) -> tuple[Tensor, Tensor, int]:
    """Returns the gradient of the lower layer's weight and bias, and the bytes that were held."""
    model.zero_grad()
    torch.compiler.reset()
    compiled, inputs = torch.compile(model, backend=BACKEND), normal(512, 64)
    if bits is None:
        compiled(inputs).backward()
        return model.below.weight.grad.clone(), model.below.bias.grad.clone(), 0
    engine = ActivationEngine(model, DAFConfig(precision=bits))
    with engine.compress():
        loss = compiled(inputs)
    loss.backward()
    return model.below.weight.grad, model.below.bias.grad, engine.finish_step().held_bytes


@pytest.mark.parametrize("kind", [Narrowing, Widening])
@pytest.mark.parametrize("trained", [True, False])
def test_copies_of_weights_are_made_again_from_the_weights(kind: type[Narrowing], trained: bool) -> None:
    """The gradient of a lower bias reads nothing but the upper weight: in few bits it would be far off."""
    model = kind(trained)
    weight, bias, _ = _step(model, None)
    found_weight, found_bias, held = _step(model, 2)
    assert torch.equal(found_bias, bias)
    assert not torch.equal(found_weight, weight)
    inputs, hidden = 512 * 64 // 4, 512 * 128 // 4
    assert held < 1.5 * (inputs + trained * hidden)


def test_copies_of_what_forward_changes_are_saved() -> None:
    (_, bias, _), (_, found, _) = (_step(Changing(trained=False), bits) for bits in (None, 8))
    assert (found - bias).norm() < 0.02 * bias.norm()


def test_nothing_is_given_outside_of_the_division_of_a_graph() -> None:
    assert given_parameters() == []


class Pooled(nn.Module):
    """A layer of which the mean of four values each is normalized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, values: Tensor) -> Tensor:
        means = torch.tanh(self.layer(values)).view(32, 4, 64).mean(1)
        return self.head(self.norm(means)).square().mean()


def test_a_small_mean_is_not_worked_out_again_of_codes() -> None:
    """Outside of graphs it stays as it is; in backward it had the error of codes, .2 in all layers of a ConvNeXt."""
    model, inputs = Pooled(), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    assert error_of_weight(model, model.norm.weight, inputs, 4)[0] < 1e-6
