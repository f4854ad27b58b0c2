"""A ReLU saves the signs of its result alone; who uses the result gets it with exact zeros."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.memory.pages.pool import PAGE_BYTES
from tests.core.harness import (
    LARGE,
    Loss,
    Scale,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    gradients,
    normal,
    watch,
)

PRECISIONS = [8, 4, 2, 1]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_own_save_is_a_bit_an_element(inplace: bool, dtype: torch.dtype, precision: int) -> None:
    """Where nobody else saves the result, nothing else is held, and the gradient is exact."""
    engine = engine_for(nn.Linear(1, 1), precision)
    x = normal(256, 1024).to(dtype).requires_grad_()
    with engine.compress():
        y = F.relu(x * 1, inplace=inplace)
    assert engine.held_bytes == x.numel() // 8 == 8 * PAGE_BYTES
    y.backward(normal(256, 1024, seed=1).to(dtype))
    assert engine.finish_step().stored_as == {"signs": 1}
    assert torch.equal(x.grad, normal(256, 1024, seed=1).to(dtype) * (x > 0))
    assert_empty(engine)


RELU: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in-place": lambda x: F.relu(x * 1, inplace=True),
    "channels-last": lambda x: F.relu(x.view(8, 16, 8, 8).to(memory_format=torch.channels_last)).reshape(LARGE),
}


@pytest.mark.parametrize("precision", [8, 4, 2, 1])
@pytest.mark.parametrize("function", RELU.values(), ids=RELU)
def test_relu_lets_gradients_through_exactly_where_plain_torch_does(
    function: Callable[[Tensor], Tensor], precision: int
) -> None:
    """A ReLU's own gradient is exact at every precision."""
    results = []
    for compressed in (False, True):
        x = normal(*LARGE).requires_grad_()
        engine = engine_for(nn.Linear(1, 1), precision)
        with engine.compress() if compressed else nullcontext():
            loss = (function(x) * 2).sum()
        assert not compressed or engine.finish_step().stored_as == {"signs": 1}
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_who_uses_the_result_gets_its_zeros(dtype: torch.dtype, precision: int, backend: str) -> None:
    """Exactly those, and everything else positive; of the values it gets codes."""
    model = Scale().to(dtype)
    engine = engine_for(model, precision, backend=backend)
    with engine.compress():
        relu = normal(256, 64).to(dtype).requires_grad_().relu()
        node: Any = model(relu).grad_fn
    found = node._saved_self
    assert torch.equal(found > 0, relu > 0)
    assert torch.equal(found == 0, relu == 0)
    assert engine.finish_step().stored_as == {"signs": 1, "rectified": 1}
    assert precision < 8 or (found - relu).abs().max() < 0.05


def test_two_users_share_the_values() -> None:
    """They are stored once, beside the signs."""
    model = Scale()
    engine = engine_for(model, 4)
    with engine.compress():
        relu = normal(*LARGE).requires_grad_().relu()
        _kept = model(relu) + model(relu)
    assert engine.finish_step().stored_as == {"signs": 1, "rectified": 1, "shared": 1}


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "fewer-positive": lambda result: result.sub_(0.5).clamp_(min=0),
    "more-positive": lambda result: result.add_(0.5),
    "negative": lambda result: result.sub_(0.5),
    "halved": lambda result: result.mul_(0.5),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_result_that_was_changed_is_stored_as_it_is_now(change: Callable[[Tensor], object], inplace: bool) -> None:
    """The ReLU keeps the signs that it saw, and who comes later gets those of its own; also where some are negative."""
    model = Scale()
    engine = engine_for(model, 8)
    x = normal(*LARGE).requires_grad_()
    with engine.compress():
        relu = F.relu(x * 1, inplace=inplace)
        with torch.no_grad():
            change(relu)
        scaled = model(relu)
    node: Any = scaled.grad_fn
    assert (node._saved_self - relu).abs().max() < 0.05
    scaled.sum().backward()
    assert torch.equal(x.grad, 1.5 * (x > 0))
    assert_empty(engine)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_relu_that_ran_before_the_scope_gives_values(released: bool, changed: bool) -> None:
    """Who saves its result in the scope is not taken for the ReLU, even where its own graph is gone."""
    model = Scale()
    engine = engine_for(model, 8)
    relu = (normal(*LARGE).requires_grad_() * 1).relu()
    if released:
        relu.sum().backward()
    if changed:
        relu.detach().mul_(2)
    with engine.compress():
        node: Any = model(relu).grad_fn
    assert engine.finish_step().stored_as == {"rectified": 1}
    assert (node._saved_self - relu).abs().max() < 0.05
    assert torch.equal(node._saved_self == 0, relu == 0)


def test_relu_that_ran_backward_in_an_earlier_scope_gives_values() -> None:
    """What it saved is gone, and it is not about to save again."""
    model = Scale()
    engine = engine_for(model, 8)
    with engine.compress():
        relu = normal(*LARGE).requires_grad_().relu()
    relu.sum().backward()
    engine.finish_step()
    with engine.compress():
        node: Any = model(relu).grad_fn
    assert engine.finish_step().stored_as == {"rectified": 1}
    assert (node._saved_self - relu).abs().max() < 0.05


def test_relu_of_another_engine_gives_values() -> None:
    """The other one's signs are left alone."""
    model = Scale()
    others, engine = engine_for(model, 8), engine_for(model, 8)
    with others.compress():
        relu = normal(*LARGE).requires_grad_().relu()
    with engine.compress():
        node: Any = model(relu).grad_fn
    assert (others.finish_step().stored_as, engine.finish_step().stored_as) == ({"signs": 1}, {"rectified": 1})
    assert (node._saved_self - relu).abs().max() < 0.05


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dropout": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)), LARGE),
    "in-place-on-a-view": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 8)), (4, 32, 64)),
    "twice": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.ReLU(), nn.Linear(64, 8)), LARGE),
    "pooled": (nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3)), (8, 8, 16, 16)),
    "flat": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)), (32, 8, 8, 8)),
    "small": (nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), (16, 8)),
}


def _loss_of(shape: tuple[int, ...]) -> Loss:
    def loss(model: nn.Module, step: int) -> Tensor:
        outputs = model(normal(*shape, seed=step))
        return (outputs * normal(*outputs.shape, seed=step + 1)).sum()

    return loss


@pytest.mark.parametrize(("model", "shape"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("precision", "bound"), [(8, 0.012), (4, 0.2)])
def test_gradient_of_a_model(model: nn.Module, shape: tuple[int, ...], precision: int, bound: float) -> None:
    """The error is that of the codes: no gradient passes where the ReLU lets none through, and signs are no values."""
    engine, loss_of = engine_for(model, precision), _loss_of(shape)
    plain = backward(model, loss_of)
    assert error(backward(model, loss_of, engine), plain) < bound
    assert_empty(engine)


@pytest.mark.parametrize("part", [lambda x: x[:, :32], lambda x: x[::2], lambda x: x.view(-1), lambda x: x.T])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_place_on_a_view_is_exact(part: Callable[[Tensor], Tensor], precision: int) -> None:
    """No graph shows the node of what wrote through a view, so that nothing is known of what it reads."""
    gradient = normal(256, 64, seed=1)
    engine = engine_for(nn.Linear(1, 1), precision)
    x = normal(256, 64).requires_grad_()
    with engine.compress():
        whole = x * 1
        part(whole).relu_()
    whole.backward(gradient)
    expected = gradient.clone()
    part(expected).masked_fill_(part(x) <= 0, 0)
    assert engine.finish_step().stored_as == {"raw": 1}
    assert torch.equal(x.grad, expected)
    assert_empty(engine)


def test_other_operator_in_place_on_a_view_is_exact() -> None:
    engine = engine_for(nn.Linear(1, 1), 8)
    x = normal(256, 64).requires_grad_()
    with engine.compress():
        whole = x * 1
        whole.view(-1).tanh_()
    whole.sum().backward()
    assert engine.finish_step().stored_as == {"raw": 1}
    torch.testing.assert_close(x.grad, 1 - x.tanh().square())


def test_not_finite_values_stay_as_they_are() -> None:
    """The ReLU needs signs only; who uses its result gets every bit."""
    model = Scale()
    engine = engine_for(model, 4)
    x = normal(*LARGE)
    x[3, 5], x[4, 6], x[5, 7] = torch.inf, torch.nan, -torch.inf
    x.requires_grad_()
    with engine.compress():
        relu = x.relu()
        scaled = model(relu)
    node: Any = scaled.grad_fn
    torch.testing.assert_close(node._saved_self, relu, rtol=0, atol=0, equal_nan=True)
    assert engine.finish_step().stored_as == {"signs": 1, "raw": 1}
    scaled.sum().backward()
    assert torch.equal(x.grad, 1.5 * ((x > 0) | x.isnan()))


def test_two_valued_result_is_a_mask() -> None:
    """Exact for everybody, as without a ReLU."""
    model = Scale()
    engine = engine_for(model, 4)
    with engine.compress():
        relu = normal(*LARGE).sign().requires_grad_().relu()
        node: Any = model(relu).grad_fn
    assert engine.finish_step().stored_as == {"bitmask": 1, "shared": 1}
    assert torch.equal(node._saved_self, relu)


def test_exact_mode_takes_no_signs() -> None:
    """The result is there for everybody, as it is."""
    model = Scale()
    engine = engine_for(model, "exact")
    seen = watch(engine)
    with engine.compress():
        _kept = model(normal(*LARGE).requires_grad_().relu())
    assert {saved.form for saved in seen} == {"raw", "parameter"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_may_run_backward_twice(precision: int) -> None:
    """Signs and values are there as often as they are asked for."""
    model, shape = MODELS["pooled"]
    engine = engine_for(model, precision)
    with engine.compress():
        loss = _loss_of(shape)(model, 0)
    results = []
    for retain in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        results.append(gradients(model))
    assert_same(*results)
    assert_empty(engine)


@pytest.mark.parametrize("inside", [False, True])
def test_second_derivative(inside: bool) -> None:
    """A gradient's gradient passes the ReLU where the first one did."""
    results = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        engine = engine_for(model, 8 if compressed else "exact")
        x = normal(256, 64).requires_grad_()

        def penalty(loss: Tensor, x: Tensor = x) -> Tensor:
            return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

        with engine.compress():
            loss = model(x).square().sum()
            squares = penalty(loss) if inside else None
        (penalty(loss) if squares is None else squares).backward()
        results.append(gradients(model)[:-1])
    assert error(*reversed(results)) < 0.03


def test_graph_that_dies_leaves_nothing() -> None:
    """Neither pages nor tensors, without a collector."""
    model, shape = MODELS["pooled"]
    engine = engine_for(model, 4)
    gc.collect()
    gc.disable()
    try:
        with engine.compress():
            loss = _loss_of(shape)(model, 0)
        assert engine.held_bytes
        del loss
        assert_empty(engine)
    finally:
        gc.enable()


def test_signs_survive_the_loss_of_every_plane() -> None:
    """Under pressure the values go first."""
    model = Scale()
    engine = engine_for(model, 4)
    x = normal(256, 256).requires_grad_()
    with engine.compress():
        loss = model(x.relu()).sum()
    header, signs = 1, 2
    engine.set_memory_budget((header + signs) * PAGE_BYTES)
    assert engine.finish_step().dropped_planes == 3
    loss.backward()
    assert torch.equal(x.grad, 1.5 * (x > 0))
    assert_empty(engine)


@pytest.mark.parametrize("name", MODELS)
def test_rehearsal(name: str) -> None:
    """Exact activations give the plain gradient bit by bit, also through signs; 8 bits are close."""
    model, shape = MODELS[name]
    model.eval()
    engine = engine_for(model, 8)
    plain = backward(model, _loss_of(shape))
    with engine.probe_pass(lambda: _loss_of(shape)(model, 0)) as rehearsal:
        assert_same([gradient for gradient in rehearsal.gradients({}) if gradient is not None], plain)
        assert rehearsal.compare({site: 8 for site, _ in rehearsal.activations}).error < 0.02
    model.train()
    assert_empty(engine)
