"""What an operator reads may depend on its arguments, and one line of a program may run with several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, ReaderError
from tests.core.harness import engine_for, error, gradients, normal

INFINITE = float("inf")


class Net(nn.Module):
    """A layer, and on it the mean of what a function makes of its result with each of several arguments."""

    def __init__(self, function: Callable[[Tensor, float], Tensor], arguments: tuple[float, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.stack([self.function(y, argument).mean() for argument in self.arguments]).sum()


def power(y: Tensor, exponent: float) -> Tensor:
    return y.abs().pow(exponent).cos()


def norm(y: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm((y * 1.0).sin(), order, dim=-1).square()


def bound(y: Tensor, low: float) -> Tensor:
    return y.mul(1.0).clamp(min=low).sin()


def quotient(y: Tensor, size: float) -> Tensor:
    return y.sin() / (y.square() + 0.01 if size else y.square().mean() + 0.01)


CALLS: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, float]]] = {
    "powers": (power, (2.0, 0.6)),
    "orders of a norm": (norm, (2.0, INFINITE)),
    "bounds": (bound, (0.0, -0.1)),
    "divisors": (quotient, (0.0, 1.0)),
}


def step(net: Net, engine: ActivationEngine) -> float:
    """Returns the error of the gradient of a step."""
    x = normal(128, 64)
    net.zero_grad()
    net(x).backward()
    expected = gradients(net)
    net.zero_grad()
    with engine.compress():
        loss = net(x)
    loss.backward()
    engine.finish_step()
    return error(gradients(net), expected)


@pytest.mark.parametrize("function", CALLS)
def test_of_one_line_in_a_pass_are_told_apart(function: str) -> None:
    net = Net(*CALLS[function])
    engine = engine_for(net, 8)
    assert max(step(net, engine) for _ in range(3)) < 0.03


def threshold(y: Tensor, low: float) -> Tensor:
    return F.threshold(y.mul(1.0), low, 0.0).sin()


@pytest.mark.parametrize("function", [bound, threshold, lambda y, high: y.mul(1.0).clamp(0.0, high + 1).sin()])
@pytest.mark.parametrize("arguments", [(0.0, 0.0, 0.1, 0.2), (0.2, 0.1, 0.0, 0.0, 0.1)], ids=str)
def test_bounds_that_pass_through_zero(function: Callable[[Tensor, float], Tensor], arguments: Sequence[float]) -> None:
    """As margins do that are warmed up: a bound of 0 is no reason to take an operator for a ReLU."""
    net = Net(function, (arguments[0],))
    engine = engine_for(net, 8)
    for argument in arguments:
        net.arguments = (argument,)
        assert step(net, engine) < 0.03


@pytest.mark.parametrize("function", CALLS)
def test_that_change_are_an_error_once_or_right(function: str) -> None:
    call, (first, later) = CALLS[function]
    net = Net(call, (first,))
    engine = engine_for(net, 8)
    assert max(step(net, engine) for _ in range(2)) < 0.03
    net.arguments = (later,)
    with suppress(ReaderError):
        assert step(net, engine) < 0.03
    assert max(step(net, engine) for _ in range(2)) < 0.03


def test_a_dimension_may_change() -> None:
    """The node tells it when it saves its result."""
    scores = nn.Linear(1, 1)
    scores.weight = nn.Parameter(normal(256, 256))
    engine = engine_for(scores, 4)
    for dim in (-1, -1, 0):
        found: list[list[Tensor]] = []
        for compressed in (False, True):
            scores.weight.grad = None
            with engine.compress() if compressed else nullcontext():
                loss = -F.log_softmax(scores.weight * 1, dim).diagonal().sum()
            loss.backward()
            assert scores.weight.grad is not None
            found.append([scores.weight.grad])
        assert error(found[1], found[0]) < 0.02


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [
        (torch.bfloat16, lambda x: F.threshold(x, 1.005, 0.5)),
        (torch.float16, lambda x: F.hardtanh(x, -1.005, 1.005)),
        (torch.bfloat16, lambda x: x.clamp(-1.005, 1.005)),
    ],
)
def test_bounds_that_a_type_does_not_hold(dtype: torch.dtype, clip: Callable[[Tensor], Tensor]) -> None:
    """Values lie on the bound as it is rounded: operators differ in whether they are inside."""
    values = torch.linspace(0.98, 1.03, 8192).to(dtype)
    found: list[Tensor] = []
    for compressed in (False, True):
        x = values.clone().requires_grad_()
        engine = engine_for(nn.Linear(1, 1), 4 if compressed else "exact")
        with engine.compress():
            result = clip(x + 0)
        result.backward(torch.ones_like(result))
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_bound_that_is_no_number() -> None:
    """Torch passes every gradient, or none: there is no side to keep."""
    x = normal(128, 64).requires_grad_()
    engine = engine_for(nn.Linear(1, 1), 8)
    with engine.compress():
        result = (x * 1).clamp(float("nan"), 0.5)
    result.backward(torch.ones_like(result))
    plain = normal(128, 64).requires_grad_()
    result = (plain * 1).clamp(float("nan"), 0.5)
    result.backward(torch.ones_like(result))
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("audited", [False, True])
def test_divisors_of_rows_are_statistics_in_batches_of_any_size(audited: bool) -> None:
    """A rehearsal of a few rows, or a short batch, says the same of them as a long one."""
    net = nn.Linear(64, 64)
    engine = engine_for(net, 8)

    def loss(rows: int) -> Tensor:
        y = net(normal(rows, 64))
        return (y / y.norm(dim=-1, keepdim=True))[:, :8].sin().mean()

    if audited:
        with engine.probe_pass(lambda: loss(600)) as rehearsal:
            del rehearsal
    for rows in (64, 5000, 100, 6000):
        net.zero_grad()
        loss(rows).backward()
        expected = gradients(net)
        net.zero_grad()
        with engine.compress():
            value = loss(rows)
        value.backward()
        assert error(gradients(net), expected) < 0.03
        assert engine.finish_step().stored_as.get("planes", 0) >= (rows > 100)


def test_bounds_that_change_in_each_step_are_followed() -> None:
    net = nn.Linear(64, 64)
    engine = engine_for(net, 8)
    for bound in (0.5, 0.4, 0.3, torch.finfo(torch.float32).max):
        results: list[list[Tensor]] = []
        for compressed in (False, True):
            net.zero_grad()
            with engine.compress() if compressed else nullcontext():
                value = net(normal(128, 64)).clamp(-bound, bound).sin().square().mean()
            value.backward()
            results.append(gradients(net))
        assert error(results[1], results[0]) < 0.03
