"""Rule 2: changing a tensor in place after it was saved is an error where plain torch raises one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFError, ModifiedInPlaceError
from tests.core.harness import LARGE, assert_empty, engine_for, integers, normal

Change = Callable[[nn.Linear, Tensor], tuple[Tensor, Tensor]]


def _output(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x).exp()
    return y.sum(), y.detach()


def _input(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return model(x).sum(), x


def _view(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    h = model(x)
    return h.sin().sum(), h.detach().t()[:3]


def _weight(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return model(model(x)).sum(), model.weight


def _bias_free_weight_view(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return (model(x) @ model.weight.t()).sum(), model.weight.detach()[:2]


def _target(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    target = integers(64, x.shape[0])
    return F.cross_entropy(model(x), target), target


CHANGES: dict[str, Change] = {
    "output": _output,
    "input": _input,
    "view": _view,
    "weight": _weight,
    "weight-view": _bias_free_weight_view,
    "target": _target,
}


def _change_and_run(change: Change, rows: int, engine: ActivationEngine | None, model: nn.Linear) -> None:
    with engine.compress() if engine else nullcontext():
        loss, changed = change(model, normal(rows, 64))
    with torch.no_grad():
        changed.add_(1)
    loss.backward()


@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_rule_2_change_in_place_raises_as_in_plain_torch(change: Change, rows: int) -> None:
    """Small tensors, and all tensors in exact mode, are references: a change of them must be noticed."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _change_and_run(change, rows, None, nn.Linear(64, 64))
    model = nn.Linear(64, 64)
    engine = engine_for(model, "exact")
    with pytest.raises(ModifiedInPlaceError, match=r"shape \(.*saved at version \d and is at version \d.* x = x \+ y"):
        _change_and_run(change, rows, engine, model)


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_rule_2_parameter_changed_between_forward_and_backward(trainable: bool) -> None:
    """An optimizer step between forward and backward is an error at every precision."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.requires_grad_(trainable)
    engine = engine_for(model, 4)
    with engine.compress():
        loss = model(normal(*LARGE)).sum()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    with pytest.raises(ModifiedInPlaceError, match=r"\(64, 64\)"):
        loss.backward()


def test_rule_2_error_is_a_daf_error_and_leaves_nothing() -> None:
    """The graph can be dropped after the error, and all that it held is free."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, "exact")
    with pytest.raises(DAFError) as raised:
        _change_and_run(_output, 128, engine, model)
    assert isinstance(raised.value, RuntimeError)
    del raised
    assert_empty(engine)


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sigmoid], ids=lambda f: f.__name__)
def test_rule_2_compressed_tensors_keep_the_value_at_save_time(function: Callable[[Tensor], Tensor]) -> None:
    """A compressed tensor is a copy: changing the original changes no gradient."""
    results = []
    for change in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        engine = engine_for(model, 8)
        x = normal(*LARGE).requires_grad_()
        with engine.compress():
            y = function(model(x))
            loss = y.sum() if not change else y.add_(10).sum()
        loss.backward()
        assert engine.finish_step().stored_as["planes"] >= 1
        results.append(x.grad)
    assert torch.equal(*results)


class _Doubled(torch.autograd.Function):
    """Changes its input in place and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "exp_": lambda h: h.exp_(),
    "relu_": lambda h: h.relu_(),
    "mark_dirty": lambda h: _Doubled.apply(h),
    "before-saving": lambda h: h.add_(1).sin(),
    "not-saved": lambda h: h.add(1).add_(2),
    "input-of-sum": lambda h: (h.sum(), h.add_(1))[0],
}


@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("function", ALLOWED.values(), ids=ALLOWED)
def test_rule_2_in_place_operations_that_torch_allows(function: Callable[[Tensor], Tensor], rows: int) -> None:
    """What is no error in plain torch is none under DAF, and the gradients agree bit by bit."""
    results = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64), normal(rows, 64).requires_grad_()
        with engine_for(model, "exact").compress() if compressed else nullcontext():
            loss = function(model(x)).sum()
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_view_that_is_changed_without_gradients() -> None:
    """Torch refuses to say by what such a view was made."""
    model, x = nn.Linear(64, 128), normal(128, 64)

    def loss_of() -> Tensor:
        values = model(x).tanh() * 1.0
        with torch.no_grad():
            values[:, 1].add_(1.0)
        return (values @ normal(128, 8, seed=1)).square().mean()

    loss_of().backward()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    model.zero_grad()
    with engine_for(model, 8).compress():
        loss = loss_of()
    loss.backward()
    assert (model.weight.grad - expected).norm() < 0.02 * expected.norm()
