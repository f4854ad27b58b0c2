"""The memory budget is hard: it is never exceeded, and running into it loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine
from daf_core.memory.pool import PagePool
from daf_core.torch_internals import innermost_hooks
from tests.core.harness import (
    LARGE,
    MODELS,
    Scale,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    make_model,
    normal,
)


def _held(name: str, precision: Any) -> int:
    model, loss = make_model(name)
    engine = engine_for(model, precision)
    backward(model, loss, engine)
    return engine.finish_step().held_bytes


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize("name", MODELS)
def test_step_fits_into_exactly_what_it_holds(name: str, precision: Any) -> None:
    """A budget of the peak is enough and changes nothing; a byte less is refused."""
    model, loss = make_model(name)
    needed = _held(name, precision)
    expected = backward(model, loss, engine_for(model, precision))
    assert_same(backward(model, loss, engine_for(model, precision, memory_budget=needed)), expected)
    with pytest.raises(ActivationBudgetError) as raised:
        backward(model, loss, engine_for(model, precision, memory_budget=needed - 1))
    assert raised.value.allowed == needed - 1 < raised.value.needed <= needed


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_held_bytes_never_exceed_the_budget(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment of a step that fails are more bytes held than allowed."""
    model, loss = make_model("transformer")
    budget = int(share * _held("transformer", 4))
    engine, seen = engine_for(model, 4, memory_budget=budget), [0]
    _record_held(monkeypatch, seen)
    with pytest.raises(ActivationBudgetError):
        backward(model, loss, engine)
    assert 0 < max(seen) <= budget or share < 0.1
    assert max(seen) <= budget


def _record_held(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    lease, hold = PagePool.lease, PagePool.hold

    def recorded(method: Any) -> Any:
        def call(pool: PagePool, size: int) -> Any:
            try:
                return method(pool, size)
            finally:
                seen.append(pool.held_bytes)

        return call

    monkeypatch.setattr(PagePool, "lease", recorded(lease))
    monkeypatch.setattr(PagePool, "hold", recorded(hold))


def test_step_can_be_retried_after_the_error() -> None:
    """The error leaves no hook and no page; with another budget or a smaller batch the same model trains."""
    model, loss = make_model("transformer")
    expected = backward(model, loss, engine_for(model, 4))
    engine = engine_for(model, 4, memory_budget="100KB")
    with pytest.raises(ActivationBudgetError, match=r"memory_budget allows 0\.1 MB"):
        backward(model, loss, engine)
    assert innermost_hooks() is None
    assert_empty(engine)
    assert engine.finish_step().held_bytes <= 100_000
    assert_same(backward(model, loss, engine_for(model, 4, memory_budget="100MB")), expected)
    with engine.compress():
        small = model(torch.zeros(1, 4, dtype=torch.int64)).sum()
    small.backward()
    assert_empty(engine)


def _raw(x: Tensor) -> Tensor:
    return x.double()


def _narrow(x: Tensor) -> Tensor:
    return (x * 1000).long()


def _masked(x: Tensor) -> Tensor:
    return (x > 0).float()


@pytest.mark.parametrize(
    ("make", "precision"),
    [(_raw, 4), (_masked, 4), (lambda x: x, 4), (lambda x: x, "exact")],
    ids=["float64", "mask", "planes", "raw"],
)
def test_every_form_counts_against_the_budget(make: Any, precision: Any) -> None:
    """No form slips past it."""
    model = Scale()
    _assert_refused(engine_for(model, precision, memory_budget=1000), lambda: model(make(normal(*LARGE))))


def test_narrow_integers_count_against_the_budget() -> None:
    """Nor do indices."""
    x = normal(*LARGE).requires_grad_()
    index = _narrow(normal(*LARGE)).remainder(64)
    _assert_refused(engine_for(Scale(), 4, memory_budget=1000), lambda: x.gather(1, index))


def _assert_refused(engine: ActivationEngine, forward: Any) -> None:
    with pytest.raises(ActivationBudgetError) as raised, engine.compress():
        forward()
    assert raised.value.needed > 1000
    del raised
    assert_empty(engine)


def test_relu_that_runs_out_between_its_two_leases_leaves_nothing() -> None:
    """Its planes fit and the bits beside them do not: the planes are given back."""
    model = nn.Linear(1, 1)
    engine = engine_for(model, 4, memory_budget=4 * 4096)
    x = normal(*LARGE).requires_grad_()
    with pytest.raises(ActivationBudgetError), engine.compress():
        x.relu()
    assert_empty(engine)
    assert engine_for(model, 4, memory_budget=5 * 4096).config.budget_bytes == 20480


def test_parameters_do_not_count_against_the_budget() -> None:
    """A budget bounds activations, not the model."""
    model = nn.Linear(256, 256)
    engine = engine_for(model, 4, memory_budget=2048)
    with engine.compress():
        loss = model(normal(1, 256).requires_grad_()).sum()
    loss.backward()
    assert_empty(engine)
