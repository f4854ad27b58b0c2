"""Calls of a prepared model that are no training passes: recorded, transformed, or with nothing to train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import daf_integrations as daf
from daf_integrations.loop.training import training_of

# An export and a trace import, and call, what is deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # the loss compares shapes
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.(trace|trace_method|script). is (deprecated|not supported):DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"precision": "exact"},
    "audited": {"audit_every": 2},
    "budget": {"memory_budget": "50MB"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.body(x), y)


X, Y = torch.linspace(-1, 1, 128 * 64).view(128, 64), torch.linspace(0, 1, 128 * 4).view(128, 4)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def loss(model: nn.Module) -> Callable[..., Tensor]:
    return lambda given, x, y: functional_call(model, given, (x, y))


def of_each_row(model: nn.Module) -> Any:
    return vmap(grad(loss(model)), in_dims=(None, 0, 0))(parameters(model), X, Y)["body.0.weight"]


def ensemble(model: nn.Module) -> Any:
    both = {name: torch.stack([each, each]) for name, each in parameters(model).items()}
    return vmap(loss(model), in_dims=(0, None, None))(both, X, Y)


def forward_derivative(model: nn.Module) -> Any:
    given = parameters(model)
    return jvp(lambda values: loss(model)(values, X, Y), (given,), (given,))


def of_input(model: nn.Module) -> Any:
    return grad(lambda x: model(x, Y))(X)


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, (X, Y))(X, Y)


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (X, Y)).module()(X, Y)


def recorded(model: nn.Module) -> Any:
    return make_fx(model)(X, Y)(X, Y)


def fake(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(X), mode.from_tensor(Y)).shape


CALLS = (of_each_row, ensemble, forward_derivative, of_input, traced, exported, recorded, fake)


def train(model: nn.Module, steps: int) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def copy_of(model: nn.Module) -> nn.Module:
    plain = Net()
    plain.load_state_dict(model.state_dict())
    return plain


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(same, one, other)) and len(one) == len(other)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_recorded_or_transformed_is_as_without_daf(
    call: Callable[[nn.Module], Any], steps: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is no training pass, so that nothing is planned, audited or stored for it; training goes on."""
    model = daf.prepare(Net(), **options)
    train(model, steps)
    plain = copy_of(model)
    with caplog.at_level(logging.WARNING, logger="daf"):
        assert same(call(model), call(plain))
        found, expected = train(model, 3), train(plain, 3)
    assert not [each for each in caplog.messages if "audits" in each]
    assert torch.allclose(found, expected, atol=1e-2)
    if options.get("precision") == "exact":
        assert torch.equal(found, expected)
    training = training_of(model)
    assert training is not None
    assert (training.session.totals.audits > 0) is ("audit_every" in options)


def frozen(model: nn.Module) -> Tensor:
    """A frozen critic gives what it judges a gradient."""
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    model(x, Y).backward()
    model.requires_grad_(True)
    assert x.grad is not None
    return x.grad


def target(model: nn.Module) -> Tensor:
    """The same network with other parameters, which are not trained."""
    return functional_call(model, parameters(model), (X, Y))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("call", [frozen, target])
def test_a_pass_in_front_of_each_step_that_trains_nothing(
    call: Callable[[nn.Module], Tensor], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = daf.prepare(Net(), **options)
    with caplog.at_level(logging.WARNING, logger="daf"):
        for _ in range(4):
            found = call(model)
            assert torch.allclose(found, call(copy_of(model)), atol=1e-3)
            train(model, 1)
    assert not [each for each in caplog.messages if "audits" in each]
    training = training_of(model)
    assert training is not None
    assert (training.session.totals.audits > 0) is ("audit_every" in options)


def test_a_batch_that_is_mapped_is_trained() -> None:
    """The gradient is that of ordinary training, and so is what is stored."""
    model = daf.prepare(Net(), precision=8, audit_every=None)
    plain = copy_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = X.view(2, 64, 64), Y.view(2, 64, 4)
    vmap(model)(*given).sum().backward()
    vmap(plain)(*given).sum().backward()
    for each, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert each.grad is not None
        assert exact.grad is not None
        assert (each.grad - exact.grad).norm() < 0.05 * exact.grad.norm()
    optimizer.step()
    training = training_of(model)
    assert training is not None
    assert training.session.last_step is not None
    assert training.session.last_step.stored_as["planes"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_models_may_be_prepared_and_stepped_under_fake_tensors(options: dict[str, Any]) -> None:
    """Kernels are not given addresses that are none."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = daf.prepare(Net(), **options)
        batch = mode.from_tensor(X), mode.from_tensor(Y)
        assert daf.step(model, batch, lambda rows: model(*rows)).shape == ()
