"""Whole models with a spill folder: whatever the budget, no bit of a gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from tests.core.harness import (
    LARGE,
    Loss,
    Scale,
    assert_empty,
    assert_same,
    engine_for,
    gradients,
    normal,
    outside_bytes,
    pager_of,
    spill_all,
    watch_held,
)
from tests.core.pressure import (
    MODELS,
    PRECISIONS,
    assert_sound,
    backward,
    forward,
    least_budget,
    make_model,
    make_normalized,
    peak_of,
)


@pytest.mark.parametrize("name", MODELS)
def test_spilling_needs_less_than_dropping_nothing(name: str, tmp_path: Path) -> None:
    """The least budget falls with each thing that may be given up."""
    nothing, planes = least_budget(name, 4, min_precision=4), least_budget(name, 4)
    assert least_budget(name, 4, min_precision=0, spill_dir=tmp_path) < planes < nothing == peak_of(name, 4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_budget_that_falls_with_a_spill_folder_loses_nothing(name: str, precision: Any, tmp_path: Path) -> None:
    """Half of what is held, or all but its largest part, moves to the file after forward and comes back as it was."""
    model, loss_of = make_model(name)
    expected = backward(engine_for(model, precision), model, loss_of)
    engine = engine_for(model, precision, memory_budget="1GB", spill_dir=tmp_path)
    loss = forward(engine, model, loss_of)
    engine.set_memory_budget(max(engine.held_bytes // 2, outside_bytes(engine) + _largest(engine)))
    assert_sound(engine)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), expected)
    assert engine.finish_step().spilled_bytes > 0
    del loss
    assert_empty(engine)


def _largest(engine: ActivationEngine) -> int:
    """Returns the bytes of the largest activation on pages: with less, backward could not read it back."""
    return pager_of(engine)._index.largest * PAGE_BYTES


@pytest.mark.parametrize("share", [0.9, 0.6])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_spilling_changes_no_bit(
    name: str, precision: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those of the same precision without a budget, step after step, and the budget is kept."""
    model, loss_of = make_model(name)
    free = engine_for(model, precision)
    expected = [backward(free, model, loss_of, step) for step in range(2)]
    budget, seen = int(share * peak_of(name, precision, spill_dir=tmp_path)), watch_held(monkeypatch)
    engine = engine_for(model, precision, memory_budget=budget, spill_dir=tmp_path)
    for step in range(2):
        assert_same(backward(engine, model, loss_of, step), expected[step])
        assert_sound(engine)
        assert_empty(engine)
        statistics = engine.finish_step()
        assert (statistics.dropped_planes, statistics.dropped_bytes) == (0, 0)
        assert statistics.spilled_bytes > 0
    assert max(seen) <= budget


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["oldest-first", "newest-first"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_two_graphs_at_once_change_no_bit(name: str, precision: Any, order: Any, tmp_path: Path) -> None:
    """Two forward passes, then their backwards in either order: gradients as without a budget."""
    model, loss_of = make_model(name)
    expected = _accumulated(engine_for(model, precision), model, loss_of, order)
    engine = engine_for(model, precision, memory_budget=peak_of(name, precision), spill_dir=tmp_path)
    assert_same(_accumulated(engine, model, loss_of, order), expected)
    assert engine.finish_step().spilled_bytes > 0
    assert_empty(engine)


def _accumulated(engine: ActivationEngine, model: nn.Module, loss_of: Loss, order: tuple[int, int]) -> list[Tensor]:
    model.zero_grad()
    losses: list[Tensor | None] = [forward(engine, model, loss_of, step) for step in range(2)]
    for index in order:
        loss, losses[index] = losses[index], None
        assert loss is not None
        loss.backward()
        del loss
        assert_sound(engine)
    return gradients(model)


BESIDE = {"normalized": 256, "resnet": 128, "encoder": 1024}
"""Bytes of the statistics that a node saves beside its input: batch norm of 32 and 16 channels, layer norm of 128 rows,
from whose input and statistics its result is derived again."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [*MODELS, "normalized"])
def test_budget_that_forward_fits_in_is_enough_for_backward(
    name: str, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error there is too late. Only small raw tensors, saved after the same node's input, need room beside it."""
    monkeypatch.setitem(MODELS, "normalized", make_normalized())
    budget = least_budget(name, precision, spill_dir=tmp_path) + BESIDE.get(name, 0)
    model, loss_of = make_model(name)
    expected = backward(engine_for(model, precision), model, loss_of)
    for more in (0, PAGE_BYTES, 4 * PAGE_BYTES):
        engine = engine_for(model, precision, memory_budget=budget + more, spill_dir=tmp_path)
        assert_same(backward(engine, model, loss_of), expected)


def test_relu_that_forward_had_room_for_is_read_back(tmp_path: Path) -> None:
    """Its planes fill the budget, and so did its bits when the planes were in the file."""
    engine = engine_for(nn.Linear(1, 1), 4, memory_budget=4 * PAGE_BYTES, spill_dir=tmp_path)
    x = normal(*LARGE).requires_grad_()
    with engine.compress():
        loss = x.relu().sum()
    loss.backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_budget_below_what_backward_must_read_back_is_refused(tmp_path: Path) -> None:
    """A spilled activation needs room again: that is known when the budget is set, wherever the activation lies."""
    model = Scale()
    engine = engine_for(model, "exact", memory_budget="1GB", spill_dir=tmp_path)
    x = normal(*LARGE)
    with engine.compress():
        loss = model(x).sum()
    for _ in range(2):
        with pytest.raises(ActivationBudgetError) as raised:
            engine.set_memory_budget(8 * PAGE_BYTES - 1)
        assert (raised.value.needed, raised.value.allowed) == (8 * PAGE_BYTES, 8 * PAGE_BYTES - 1)
        assert pager_of(engine).budget == 1_000_000_000
        spill_all(engine)
    engine.set_memory_budget(8 * PAGE_BYTES)
    loss.backward()
    assert torch.equal(model.weight.grad, x.sum())
