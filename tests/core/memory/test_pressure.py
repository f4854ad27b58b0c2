"""Whole models under a budget, from generous to the least: the step runs, the budget holds, nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from daf_core import ActivationBudgetError
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_kernels import planes_for
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    assert_same,
    engine_for,
    error,
    gradients,
    normal,
    pager_of,
    watch,
    watch_held,
)
from tests.core.pressure import MODELS, assert_sound, backward, forward, least_budget, make_model, peak_of


@pytest.mark.parametrize("share", [1.0, 0.99, 0.7, 0.4, 0.1, 0.0])
@pytest.mark.parametrize("precision", [8, 4, 1])
@pytest.mark.parametrize("name", MODELS)
def test_any_budget_is_kept(name: str, precision: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the peak down to the least: never more is held, the numbers stay finite, every page comes back."""
    least, peak = least_budget(name, precision), peak_of(name, precision)
    budget = int(least + share * (peak - least))
    model, loss_of = make_model(name)
    engine, seen = engine_for(model, precision, memory_budget=budget), watch_held(monkeypatch)
    for step in range(2):
        loss = forward(engine, model, loss_of, step)
        assert_sound(engine)
        loss.backward()
        assert_sound(engine)
        assert all(number.isfinite().all() for number in [loss, *gradients(model)])
        del loss
        assert_empty(engine)
        statistics = engine.finish_step()
        assert max(seen) == statistics.held_bytes <= budget
        assert (statistics.dropped_planes > 0) == (statistics.dropped_bytes > 0) == (share < 1)
        seen.clear()


@pytest.mark.parametrize("name", MODELS)
def test_error_falls_as_the_budget_grows(name: str) -> None:
    """More room gives better gradients, from means alone to all planes."""
    model, loss_of = make_model(name)
    expected = backward(engine_for(model, "exact"), model, loss_of)
    least, peak = least_budget(name, 8), peak_of(name, 8)
    budgets = [least, (least + peak) // 2, peak]
    errors = [
        error(backward(engine_for(model, 8, memory_budget=budget), model, loss_of), expected) for budget in budgets
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 < errors[0]


@pytest.mark.parametrize("options", [{}, {"spills": True}], ids=["drop", "spill"])
@pytest.mark.parametrize("name", MODELS)
def test_a_byte_less_than_the_least_is_an_error(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """It says what was needed and allowed, names the ways out, and leaves nothing."""
    folder = {"spill_dir": tmp_path} if options else {}
    least = least_budget(name, 4, **folder)
    model, loss_of = make_model(name)
    engine = engine_for(model, 4, memory_budget=least - 1, **folder)
    way = "set min_precision" if options else "set spill_dir"
    with pytest.raises(ActivationBudgetError, match=f"Raise memory_budget, {way}, or train on") as raised:
        forward(engine, model, loss_of)
    assert raised.value.allowed == least - 1 < raised.value.needed <= least
    del raised
    assert_empty(engine)


@pytest.mark.parametrize("least", [8, 4, 2, 1, 0])
@pytest.mark.parametrize("name", MODELS)
def test_min_precision_is_respected(name: str, least: Any) -> None:
    """The tightest budget takes every plane but those, of every activation."""
    budget = least_budget(name, 8, min_precision=least)
    model, loss_of = make_model(name)
    engine = engine_for(model, 8, memory_budget=budget, min_precision=least)
    planes: list[PlanesActivation] = []
    watch(engine, lambda packed: _collect_planes(getattr(packed, "stored", None), planes))
    forward(engine, model, loss_of).backward()
    kept = planes_for(least) if least else 0
    assert min(stored.lease.planes for stored in planes) == kept
    assert engine.finish_step().dropped_planes == sum(4 - stored.lease.planes for stored in planes)


def _collect_planes(stored: Any, into: list[PlanesActivation]) -> None:
    """Keeps the planes inside a stored activation, once: what is shared comes again."""
    planes = stored.values if isinstance(stored, ReluOutputActivation) else stored
    if isinstance(planes, PlanesActivation) and not any(planes is other for other in into):
        into.append(planes)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_drops(name: str, rounding: Any) -> None:
    """Two runs of two steps in the same budget give the same gradients, bit by bit, and the same statistics."""
    budget, results = (least_budget(name, 8) + peak_of(name, 8)) // 2, []
    for _ in range(2):
        model, loss_of = make_model(name)
        engine = engine_for(model, 8, memory_budget=budget, rounding=rounding, seed=5)
        numbers = [*backward(engine, model, loss_of, 0), *backward(engine, model, loss_of, 1)]
        statistics = engine.finish_step()
        results.append((numbers, statistics.dropped_planes, statistics.dropped_bytes, statistics.held_bytes))
    assert_same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][1] > 0


@pytest.mark.parametrize("spills", [False, True], ids=["drop", "spill"])
@pytest.mark.parametrize("name", MODELS)
def test_retain_graph_gives_the_same_gradients_again(name: str, spills: bool, tmp_path: Path) -> None:
    """Backward drops nothing: what was left after forward is there as often as it is asked for."""
    model, loss_of = make_model(name)
    folder = tmp_path if spills else None
    engine = engine_for(model, 4, memory_budget=peak_of(name, 4) * 3 // 4, spill_dir=folder)
    loss = forward(engine, model, loss_of)
    results = []
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        results.append(gradients(model))
        assert_sound(engine)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert_empty(engine)


@pytest.mark.parametrize("spills", [False, True], ids=["drop", "spill"])
def test_graph_that_never_runs_backward(spills: bool, tmp_path: Path) -> None:
    """It shares the budget while it lives, and gives everything back with its last reference."""
    model, loss_of = make_model("perceptron")
    folder = tmp_path if spills else None
    engine = engine_for(model, 4, memory_budget=peak_of("perceptron", 4) * 3 // 4, spill_dir=folder)
    expected = backward(engine, model, loss_of)
    skipped = forward(engine, model, loss_of, 7)
    backward(engine, model, loss_of)
    assert_sound(engine)
    assert engine.held_bytes > 0 or spills
    del skipped
    assert_empty(engine)
    assert_same(backward(engine, model, loss_of), expected)


@pytest.mark.parametrize("spills", [False, True], ids=["drop", "spill"])
def test_exception_in_the_middle_of_forward(spills: bool, tmp_path: Path) -> None:
    """Somebody else's error leaves nothing behind, and the next step is as if it had not been."""
    model, loss_of = make_model("encoder")
    options = {"memory_budget": peak_of("encoder", 4) // 2, "spill_dir": tmp_path if spills else None}
    expected = backward(engine_for(model, 4, **options), model, loss_of)
    engine = engine_for(model, 4, **options)
    hook = model[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(engine, model, loss_of)
    hook.remove()
    assert_sound(engine)
    assert_empty(engine)
    assert_same(backward(engine, model, loss_of), expected)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("spills", [False, True], ids=["drop", "spill"])
@pytest.mark.parametrize("name", MODELS)
def test_step_runs_again_with_a_larger_budget(name: str, spills: bool, tmp_path: Path) -> None:
    """After the error the same engine with more room gives what a fresh one with that much gives."""
    folder = {"spill_dir": tmp_path} if spills else {}
    least, enough = least_budget(name, 4, **folder), peak_of(name, 4) * 9 // 10
    model, loss_of = make_model(name)
    expected = backward(engine_for(model, 4, memory_budget=enough, **folder), model, loss_of)
    engine = engine_for(model, 4, memory_budget=least - 1, **folder)
    with pytest.raises(ActivationBudgetError):
        forward(engine, model, loss_of)
    assert_sound(engine)
    assert_empty(engine)
    engine.set_memory_budget(enough)
    assert_same(backward(engine, model, loss_of), expected)
    assert_empty(engine)


@pytest.mark.parametrize("name", MODELS)
def test_budget_that_falls_between_forward_and_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held shrinks at once and is never more again; one that is too small changes nothing."""
    model, loss_of = make_model(name)
    engine, seen = engine_for(model, 8), watch_held(monkeypatch)
    loss = forward(engine, model, loss_of)
    held, budget = engine.held_bytes, (least_budget(name, 8) + engine.held_bytes) // 2
    seen.clear()
    with pytest.raises(ActivationBudgetError):
        engine.set_memory_budget(1)
    assert (engine.held_bytes, pager_of(engine).budget) == (held, None)
    engine.set_memory_budget(budget)
    assert held > engine.held_bytes
    assert engine.held_bytes <= budget
    assert_sound(engine)
    loss.backward()
    assert max(seen, default=0) <= budget
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    del loss
    assert_empty(engine)


def _gradient(value: float, **options: Any) -> tuple[Tensor, dict[str, int]]:
    """Returns the gradient of a scale whose input holds one special value, and what it was stored as."""
    model, x = Scale(), normal(*LARGE)
    x[3, 5] = value
    engine = engine_for(model, 4, **options)
    with engine.compress():
        loss = model(x).sum()
    loss.backward()
    assert model.weight.grad is not None
    return model.weight.grad, engine.finish_step().stored_as


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_not_finite_activations_in_a_tight_budget(value: float, tmp_path: Path) -> None:
    """Where the exact values do not fit the gradient is NaN, for a gradient scaler to see; in a file they fit."""
    room, tight = 9 * PAGE_BYTES, 5 * PAGE_BYTES
    gradient, stored_as = _gradient(value, memory_budget=room)
    assert stored_as == {"raw": 1}
    assert torch.equal(gradient.isnan(), torch.tensor(value).isnan())
    gradient, stored_as = _gradient(value, memory_budget=tight)
    assert stored_as == {"planes": 1}
    assert gradient.isnan()
    gradient, stored_as = _gradient(value, memory_budget=room, spill_dir=tmp_path)
    assert stored_as == {"verbatim": 1}
    assert torch.equal(gradient.isnan(), torch.tensor(value).isnan())


def test_not_finite_activation_too_large_even_for_the_way_to_the_file(tmp_path: Path) -> None:
    """A spill folder makes no error of what is none without it."""
    gradient, stored_as = _gradient(float("inf"), memory_budget=5 * PAGE_BYTES, spill_dir=tmp_path)
    assert stored_as == {"planes": 1}
    assert gradient.isnan()
