"""The memory budget is hard: it is never exceeded, and running into it loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine, DAFConfig
from daf_core.autograd.torch_private import innermost_hooks
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pages.pool import PAGE_BYTES
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
    watch_held,
)


def _held(name: str, precision: Any) -> int:
    model, loss = make_model(name)
    engine = engine_for(model, precision)
    backward(model, loss, engine)
    return engine.finish_step().held_bytes


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize("name", MODELS)
def test_step_fits_into_exactly_what_it_holds(name: str, precision: Any) -> None:
    """A budget of the peak is enough and changes nothing: nothing is given up before it must be."""
    model, loss = make_model(name)
    needed = _held(name, precision)
    expected = backward(model, loss, engine_for(model, precision))
    engine = engine_for(model, precision, memory_budget=needed)
    assert_same(backward(model, loss, engine), expected)
    statistics = engine.finish_step()
    assert (statistics.dropped_planes, statistics.dropped_bytes, statistics.held_bytes) == (0, 0, needed)


@pytest.mark.parametrize("name", MODELS)
def test_exact_step_that_lacks_a_byte_is_refused(name: str) -> None:
    """Where nothing may be dropped or spilled, the error says what is needed."""
    model, loss = make_model(name)
    needed = _held(name, "exact")
    with pytest.raises(ActivationBudgetError) as raised:
        backward(model, loss, engine_for(model, "exact", memory_budget=needed - 1))
    assert raised.value.allowed == needed - 1 < raised.value.needed <= needed


@pytest.mark.parametrize("name", MODELS)
def test_lossy_step_that_lacks_a_byte_drops_planes(name: str) -> None:
    """It trains on at a lower precision, inside the budget."""
    model, loss = make_model(name)
    budget = _held(name, 4) - 1
    engine = engine_for(model, 4, memory_budget=budget)
    assert all(gradient.isfinite().all() for gradient in backward(model, loss, engine))
    statistics = engine.finish_step()
    assert statistics.dropped_planes > 0
    assert 0 < statistics.held_bytes <= budget
    assert statistics.dropped_bytes % PAGE_BYTES == 0 < statistics.dropped_bytes
    assert_empty(engine)


@pytest.mark.parametrize("name", MODELS)
def test_least_precision_refuses_what_would_need_a_lower_one(name: str) -> None:
    """With every plane kept, a byte less than the peak is an error, as in exact mode."""
    model, loss = make_model(name)
    needed = _held(name, 4)
    with pytest.raises(ActivationBudgetError) as raised:
        backward(model, loss, engine_for(model, 4, min_precision=4, memory_budget=needed - 1))
    assert raised.value.allowed == needed - 1 < raised.value.needed <= needed


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_step_that_fails_never_exceeds_the_budget(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment of a step that ends in an error are more bytes held than allowed."""
    model, loss = make_model("transformer")
    budget = int(share * _held("transformer", "exact"))
    engine, seen = engine_for(model, "exact", memory_budget=budget), watch_held(monkeypatch)
    with pytest.raises(ActivationBudgetError):
        backward(model, loss, engine)
    assert len(seen) > 1 or share < 0.1
    assert max(seen, default=0) <= budget


def test_step_can_be_retried_after_the_error() -> None:
    """The error leaves no hook and no page; with another budget or a smaller batch the same model trains."""
    model, loss = make_model("transformer")
    expected = backward(model, loss, engine_for(model, 4))
    engine = engine_for(model, 4, memory_budget="100KB")
    with pytest.raises(ActivationBudgetError, match=r"memory_budget allows 100 KB\."):
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
    """Its bits fit and the header of who uses it does not: the bits are given back."""
    model = Scale()
    engine = engine_for(model, 4, memory_budget=PAGE_BYTES)
    x = normal(*LARGE).requires_grad_()
    with pytest.raises(ActivationBudgetError) as raised, engine.compress():
        model(x.relu())
    assert (raised.value.needed, raised.value.allowed) == (2 * PAGE_BYTES, PAGE_BYTES)
    del raised
    assert_empty(engine)


@pytest.mark.parametrize(("pages", "dropped"), [(5, 0), (4, 1), (3, 2), (2, 3)])
def test_relu_gives_up_its_planes_for_its_bits(pages: int, dropped: int) -> None:
    """Of a header, three planes and a page of bits, exactly as many planes go as do not fit."""
    model = Scale()
    engine = engine_for(model, 4, memory_budget=pages * PAGE_BYTES)
    x = normal(*LARGE).requires_grad_()
    with engine.compress():
        y = model(x.relu())
    assert engine.leased_pages == pages
    assert engine.finish_step().dropped_planes == dropped
    y.sum().backward()
    assert torch.equal(x.grad, 1.5 * (x > 0).float())


def test_error_names_the_ways_out() -> None:
    """What was needed, what is allowed and each thing that can be changed."""
    error = ActivationBudgetError(3_000_000, 1_000_000, ["set spill_dir", "lower min_precision"])
    assert (error.needed, error.allowed) == (3_000_000, 1_000_000)
    ways = "Raise memory_budget, set spill_dir, lower min_precision, or train on smaller batches or shorter texts"
    assert all(part in str(error) for part in ("3 MB", "1 MB", ways))


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"precision": 4}, "set spill_dir, "),
        ({"precision": "auto"}, "set spill_dir, "),
        ({"precision": 4, "min_precision": 2}, "set spill_dir, lower min_precision, "),
        ({"precision": 4, "spill_dir": "spilled"}, "set min_precision, "),
        ({"precision": 4, "spill_dir": "spilled", "min_precision": 2}, "lower min_precision, "),
        ({"precision": 4, "spill_dir": "spilled", "min_precision": 0}, ""),
        ({"precision": "exact"}, "set spill_dir, set precision to a number of bits, "),
        ({"precision": "exact", "spill_dir": "spilled"}, "set precision to a number of bits, "),
    ],
)
def test_the_error_of_a_step_names_what_is_left_to_change(options: dict[str, Any], ways: str, tmp_path: Path) -> None:
    """A single activation that does not fit, whatever is dropped or spilled."""
    if "spill_dir" in options:
        options = {**options, "spill_dir": tmp_path}
    model = Scale()
    engine = engine_for(model, memory_budget=1000, **options)
    with pytest.raises(ActivationBudgetError, match=f"Raise memory_budget, {ways}or train on"), engine.compress():
        model(normal(*LARGE))


def test_parameters_do_not_count_against_the_budget() -> None:
    """A budget bounds activations, not the model."""
    model = nn.Linear(256, 256)
    engine = engine_for(model, 4, memory_budget=2048)
    with engine.compress():
        loss = model(normal(1, 256).requires_grad_()).sum()
    loss.backward()
    assert_empty(engine)


def test_a_device_without_pages_makes_no_room() -> None:
    """A number on the CPU that a model on a GPU saves has a budget of its own, which lossy activations cannot use."""
    pagers = DevicePagers(DAFConfig(memory_budget="1MB"))
    assert pagers.total_budget is None
    with pagers.on(torch.device("cpu")).writing(1):
        pagers.on(torch.device("meta")).hold(8)
        assert pagers.total_budget == 1_000_000
