"""A budget that follows the free memory, and budgets that are changed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from daf_core import ActivationBudgetError, ActivationEngine, DAFConfig
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.memory.system import available
from tests.core.harness import (
    LARGE,
    Loss,
    Scale,
    assert_empty,
    engine_for,
    gradients,
    normal,
    outside_bytes,
    pager_of,
)
from tests.core.pressure import assert_sound, backward, forward, least_budget, make_model, peak_of


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that a device says are free, beside the reserve."""
    free = [1 << 30]
    reserve = available.LEAST_RESERVE
    monkeypatch.setattr(available, "device_memory", lambda device: (2 << 30, free[0] + reserve))
    return free


def test_auto_budget_follows_shrinking_memory(free_memory: list[int]) -> None:
    """It is lowered before the next forward pass, which then drops; held activations count as free for themselves."""
    model, loss_of = make_model("perceptron")
    engine = engine_for(model, 8, memory_budget="auto")
    roomy = backward(engine, model, loss_of)
    assert engine.finish_step().dropped_planes == 0
    assert pager_of(engine).budget == 1 << 30
    limit, own = (least_budget("perceptron", 8) + peak_of("perceptron", 8)) // 2, pager_of(engine).pool.resident_bytes
    assert 0 < own <= engine.reserved_bytes
    free_memory[0] = limit - own
    tight = backward(engine, model, loss_of)
    statistics = engine.finish_step()
    assert statistics.dropped_planes > 0
    assert statistics.held_bytes <= pager_of(engine).budget == limit
    assert all(gradient.isfinite().all() for gradient in tight)
    assert len(tight) == len(roomy)


def test_auto_budget_gives_up_what_is_held(free_memory: list[int]) -> None:
    """A pass that begins while another is held drops planes of that one."""
    model, loss_of = make_model("perceptron")
    config = DAFConfig(precision=8, memory_budget="auto", pool_growth=PAGE_BYTES)
    engine = ActivationEngine(model, config)
    loss = forward(engine, model, loss_of)
    held = engine.held_bytes
    free_memory[0] = -(held // 4)
    with engine.compress():
        pass
    assert engine.held_bytes <= held - held // 4 + PAGE_BYTES
    assert_sound(engine)
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


def test_auto_budget_that_leaves_too_little_is_an_error_before_the_pass(free_memory: list[int]) -> None:
    """It names what the earlier activations need, and the scope is left in order."""
    model, loss_of = make_model("perceptron")
    engine = engine_for(model, 8, memory_budget="auto")
    loss = forward(engine, model, loss_of)
    free_memory[0] = -(1 << 30)
    with pytest.raises(ActivationBudgetError), engine.compress():
        raise AssertionError("the pass has begun")
    del loss
    free_memory[0] = 1 << 30
    assert_empty(engine)
    engine.set_memory_budget(None)
    backward(engine, model, loss_of)


def test_auto_budget_is_never_more_than_there_is(free_memory: list[int]) -> None:
    """Memory that the pool has reserved but never written to is free already, and counts once."""
    engine = engine_for(Scale(), 4, memory_budget="auto", pool_growth="10GB")
    for _ in range(3 * available.PATIENCE):
        with engine.compress():
            Scale()(normal(*LARGE)).sum().backward()
        engine.finish_step()
    budget = pager_of(engine).budget
    assert budget is not None
    assert budget <= free_memory[0] + 16 * PAGE_BYTES


def test_budget_can_be_given_in_words(free_memory: list[int]) -> None:
    """As in the configuration."""
    model, loss_of = make_model("perceptron")
    engine = engine_for(model, 8)
    loss = forward(engine, model, loss_of)
    for budget, expected in (("2 MiB", 2 << 20), ("3MB", 3_000_000), (None, None), (1 << 25, 1 << 25)):
        engine.set_memory_budget(budget)
        assert pager_of(engine).budget == expected
    engine.set_memory_budget("auto")
    assert pager_of(engine).budget == free_memory[0] + pager_of(engine).pool.resident_bytes + outside_bytes(engine)
    loss.backward()


def test_auto_budget_is_raised_after_enough_roomy_steps(free_memory: list[int]) -> None:
    """Several passes in a step count once, and the pass after the last of the steps has the room."""
    model, loss_of = make_model("perceptron")
    engine = engine_for(model, 8, memory_budget="auto")
    low = _step(engine, model, loss_of)
    free_memory[0] *= 2
    for _ in range(available.PATIENCE):
        assert (_step(engine, model, loss_of), _step(engine, model, loss_of)) == (low, low)
        engine.finish_step()
    assert _step(engine, model, loss_of) == free_memory[0] + pager_of(engine).pool.resident_bytes


def _step(engine: ActivationEngine, model: nn.Module, loss_of: Loss) -> int | None:
    """Returns the budget of a forward and a backward pass."""
    backward(engine, model, loss_of)
    return pager_of(engine).budget


@pytest.mark.parametrize("between", [None, 1 << 20])
@pytest.mark.parametrize("free", [1 << 28, 1 << 31], ids=["less", "more"])
def test_auto_budget_that_was_given_up_begins_anew(free: int, between: int | None, free_memory: list[int]) -> None:
    """Set again, it is what is available then, not what was available before."""
    model, loss_of = make_model("perceptron")
    engine = engine_for(model, 8, memory_budget="auto")
    backward(engine, model, loss_of)
    engine.set_memory_budget(between)
    free_memory[0] = free
    backward(engine, model, loss_of)
    assert pager_of(engine).budget == between
    engine.set_memory_budget("auto")
    assert pager_of(engine).budget == free + pager_of(engine).pool.resident_bytes


@pytest.mark.parametrize("budget", [0, -1, "lots", True, 1.5])
def test_wrong_budget_is_refused(budget: Any) -> None:
    """With the configuration's own message; the budget stays as it was."""
    engine = engine_for(Scale(), 4, memory_budget=1 << 20)
    with pytest.raises(ValueError, match=r"^memory_budget=.* is not a size; .* or \"auto\"$"):
        engine.set_memory_budget(budget)
    assert pager_of(engine).budget == 1 << 20
