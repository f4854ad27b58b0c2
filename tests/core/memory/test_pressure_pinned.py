"""Whole models on what is treated like a GPU: activations move to main memory, and no bit of a gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from daf_core import ActivationEngine
from daf_core.memory import devices
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.memory.tiers.disk import SpillFile
from daf_core.memory.tiers.pinned import HostMemory
from tests.core.books import used_slots
from tests.core.harness import LARGE, Scale, assert_empty, assert_same, engine_for, normal, pager_of, watch_held
from tests.core.late_copies import copies_of, like_gpu
from tests.core.pressure import (
    MODELS,
    PRECISIONS,
    assert_sound,
    backward,
    forward,
    gradients,
    least_budget,
    make_model,
)

__all__ = ["like_gpu"]

pytestmark = pytest.mark.usefixtures("like_gpu")


def host_of(engine: ActivationEngine) -> HostMemory:
    memory = pager_of(engine)._spill
    assert isinstance(memory, HostMemory)
    return memory


def kept(precision: Any) -> dict[str, Any]:
    """Options that leave nothing to drop."""
    return {} if precision == "exact" else {"min_precision": precision}


@pytest.mark.parametrize("share", [0.9, 0.6])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_moving_changes_no_bit(name: str, precision: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those of the same precision without a budget, step after step, and the budget is kept."""
    model, loss_of = make_model(name)
    free = engine_for(model, precision, memory_budget="1GB", **kept(precision))
    expected = [backward(free, model, loss_of, step) for step in range(2)]
    budget, seen = int(share * free.finish_step().held_bytes), watch_held(monkeypatch)
    engine = engine_for(model, precision, memory_budget=budget, **kept(precision))
    for step in range(2):
        assert_same(backward(engine, model, loss_of, step), expected[step])
        assert_sound(engine)
        assert_empty(engine)
        statistics = engine.finish_step()
        assert statistics.dropped_bytes == 0
        assert statistics.spilled_bytes > 0
        assert used_slots(host_of(engine)) == 0
    assert max(seen) <= budget


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["oldest-first", "newest-first"])
@pytest.mark.parametrize("name", MODELS)
def test_two_graphs_at_once_change_no_bit(name: str, order: tuple[int, int]) -> None:
    """Two forward passes, then their backwards in either order: gradients as without a budget."""
    model, loss_of = make_model(name)

    def accumulated(engine: ActivationEngine) -> list[torch.Tensor]:
        model.zero_grad()
        losses: list[Any] = [forward(engine, model, loss_of, step) for step in range(2)]
        for index in order:
            losses[index].backward()
            losses[index] = None
            assert_sound(engine)
        return gradients(model)

    free = engine_for(model, 4, memory_budget="1GB", min_precision=4)
    expected = accumulated(free)
    budget = free.finish_step().held_bytes // 2
    engine = engine_for(model, 4, memory_budget=budget, min_precision=4)
    assert_same(accumulated(engine), expected)
    assert engine.finish_step().spilled_bytes > 0
    assert_empty(engine)


@pytest.mark.parametrize("name", MODELS)
def test_graph_that_never_runs_backward_leaves_nothing(name: str) -> None:
    """Copies that nobody waits for any more harm no later pass."""
    model, loss_of = make_model(name)
    free = engine_for(model, 8, memory_budget="1GB", min_precision=8)
    expected = backward(free, model, loss_of)
    engine = engine_for(model, 8, memory_budget=free.finish_step().held_bytes * 2 // 3, min_precision=8)
    for step in range(3):
        forward(engine, model, loss_of, step)
        assert_empty(engine)
    assert_same(backward(engine, model, loss_of), expected)
    assert_empty(engine)
    assert used_slots(host_of(engine)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_planes_are_dropped_before_anything_moves(name: str) -> None:
    """Where precision may be given up it is, as on a CPU; what then still does not fit moves, instead of an error."""
    model, loss_of = make_model(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daf_core.memory.devices.host_memory_of", lambda device, page_bytes: None)
        dropping = least_budget.__wrapped__(name, 8)  # one that is kept was measured with the memory of the host
    assert least_budget(name, 8) < dropping
    engine = engine_for(model, 8, memory_budget=dropping * 3 // 2)
    backward(engine, model, loss_of)
    assert engine.finish_step().dropped_bytes > 0
    engine = engine_for(model, 8, memory_budget=least_budget(name, 8) + PAGE_BYTES)
    backward(engine, model, loss_of)
    assert engine.finish_step().spilled_bytes > 0
    assert_empty(engine)


def test_smaller_budget_drops_of_a_large_activation_what_it_may() -> None:
    """One that is larger than the budget as it is need not move."""
    model = Scale()
    engine = engine_for(model, 8, memory_budget="1MB")
    with engine.compress():
        loss = model(normal(*LARGE).requires_grad_()).sum()
    held = engine.held_bytes
    engine.set_memory_budget(held // 2)
    statistics = engine.finish_step()
    assert (statistics.dropped_bytes > 0, statistics.spilled_bytes) == (True, 0)
    loss.backward()


def test_last_activations_are_copied_without_a_wait() -> None:
    """What nobody waits for in a forward pass is on its way when backward begins."""
    model, loss_of = make_model("perceptron")
    free = engine_for(model, 8, memory_budget="1GB", min_precision=8)
    backward(free, model, loss_of)
    engine = engine_for(model, 8, memory_budget=free.finish_step().held_bytes // 2, min_precision=8)
    loss = forward(engine, model, loss_of)
    assert copies_of(host_of(engine)).queue
    loss.backward()


def test_spill_folder_comes_first(tmp_path: Path) -> None:
    engine = engine_for(Scale(), "exact", memory_budget="1MB", spill_dir=tmp_path)
    assert isinstance(pager_of(engine)._spill, SpillFile)


def test_rehearsal_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its activations lie on small pages, and few rows of a batch are to fit beside the others."""
    model, loss_of = make_model("encoder")
    engine = engine_for(model, 4, memory_budget="1MB")
    page_bytes: list[int] = []
    monkeypatch.setattr(devices, "host_memory_of", lambda device, size: page_bytes.append(size))
    with engine.probe_pass(lambda: loss_of(model, 0)):
        assert page_bytes == []
    forward(engine, model, loss_of)
    assert page_bytes == [PAGE_BYTES]
