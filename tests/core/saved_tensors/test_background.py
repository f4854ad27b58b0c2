"""What is packed in the background is what would be packed at once, whatever the clock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, DAFConfig, ModifiedInPlaceError
from daf_core.memory.books import PagerAccount
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.precision.policy import PrecisionPolicy
from daf_core.saved_tensors.pending import PackJob
from tests.core import pressure
from tests.core.books import check_pager
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    assert_same,
    engine_for,
    gradients,
    make_model,
    normal,
    pager_of,
    train,
)
from tests.core.paces import PACES


@pytest.mark.parametrize("precision", [8, 4, 2, 1, "auto"])
@pytest.mark.parametrize("name", ["transformer", "convnet", "rnn"])
def test_same_training(name: str, precision: Any, sent: list[PackJob]) -> None:
    """Losses, gradients, weights and torch's random numbers of three steps, bit by bit."""
    model, loss = make_model(name)
    expected = train(model, loss, DAFConfig(precision=precision, packing="device"))
    assert not sent
    assert_same(train(model, loss, DAFConfig(precision=precision, packing="workers")), expected)
    assert len(sent) >= 3


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_same_training_at_any_pace(rounding: Any) -> None:
    """Random numbers of rounding belong to the site and the pass, not to the thread that draws them."""
    model, loss = make_model("transformer")
    expected = train(model, loss, DAFConfig(precision=4, rounding=rounding, packing="device"))
    for _ in range(2):
        assert_same(train(model, loss, DAFConfig(precision=4, rounding=rounding, packing="workers")), expected)


def _assert_same_steps(name: str, **options: Any) -> list[PagerAccount]:
    expected, expected_done, expected_stored = pressure.steps(name, 3, packing="device", **options)
    found, done, stored = pressure.steps(name, 3, packing="workers", **options)
    assert_same(found, expected)
    assert done == expected_done
    assert stored == expected_stored
    return done


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("share", [0.4, 0.7, 0.95, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("name", pressure.MODELS)
def test_same_drops_under_a_budget(name: str, share: float) -> None:
    """The same planes are given up, and the same bytes held at most, with little room in flight or much."""
    budget = max(int(share * pressure.peak_of(name, 8)), pressure.least_budget(name, 8))
    done = _assert_same_steps(name, precision=8, memory_budget=budget)
    assert all(step.peak_bytes <= budget for step in done)
    assert share >= 1.0 or done[0].dropped_planes > 0


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("share", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("name", pressure.MODELS)
def test_same_moves_to_the_spill_file(name: str, share: float, tmp_path: Path) -> None:
    """And the same bytes are written to the file."""
    options = {"precision": 4, "spill_dir": str(tmp_path)}
    peak, least = pressure.peak_of(name, **options), pressure.least_budget(name, **options)
    done = _assert_same_steps(name, memory_budget=max(int(share * peak), least), **options)
    assert share >= 1.0 or done[0].spilled_bytes > 0


def test_budget_error_is_the_same() -> None:
    """What does not fit is refused with the same figures."""
    needed = []
    for packing in ("device", "workers"):
        model, loss_of = pressure.make_model("encoder")
        budget = pressure.least_budget("encoder", 8) - 1
        engine = engine_for(model, 8, packing=packing, memory_budget=budget)
        with pytest.raises(ActivationBudgetError) as raised:
            pressure.backward(engine, model, loss_of)
        needed.append((raised.value.needed, raised.value.allowed))
        del raised
        assert_empty(engine)
    assert needed[0] == needed[1]


def test_budget_may_change_inside_the_scope() -> None:
    """What is in flight is finished, and gives up the same planes."""
    results = []
    for packing in ("device", "workers"):
        model = Scale()
        engine = engine_for(model, 8, packing=packing)
        with engine.compress():
            outputs = [model(normal(*LARGE, seed=seed)) for seed in range(4)]
            engine.set_memory_budget(8 * PAGE_BYTES)
            assert engine.held_bytes <= 8 * PAGE_BYTES
        nodes: list[Any] = [output.grad_fn for output in outputs]
        results.append([node._saved_self for node in nodes])
    assert_same(results[1], results[0])


def _with(value: float) -> Tensor:
    values = normal(*LARGE)
    values[3, 5] = value
    return values


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("budget", [None, 64 << 10, "1GB"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite_is_kept_as_it_is(value: float, budget: Any, sent: list[PackJob]) -> None:
    """It is known late, and then the same is held and given back as if it had been known at once."""
    results, held, stored = [], [], []
    for packing in ("device", "workers"):
        model = Scale()
        engine = engine_for(model, 4, packing=packing, memory_budget=budget)
        with engine.compress():
            loss = model(_with(value)).sum() + model(normal(*LARGE, seed=1)).sum()
        held.append((engine.held_bytes, engine.leased_pages, engine.lossy_bytes))
        loss.backward()
        results += gradients(model)
        assert_empty(engine)
        check_pager(pager_of(engine))
        stored.append(engine.finish_step().stored_as)
    assert torch.equal(results[0], results[1]) or (results[0].isnan() and results[1].isnan())
    assert held[0] == held[1] == (4 * 128 * 64 + 4 * PAGE_BYTES, 4, 4 * PAGE_BYTES)
    assert stored[0] == stored[1] == {"raw": 1, "planes": 1}
    assert sent


def test_not_finite_is_exact_to_its_neighbours(tmp_path: Path) -> None:
    """The gradient of a logit masked with -inf is that of exact mode, on pages that can be spilled too."""
    for options in ({}, {"memory_budget": "1GB", "spill_dir": str(tmp_path)}):
        engine = engine_for(model := Scale(), 1, packing="workers", **options)
        values = _with(float("-inf"))
        with engine.compress():
            output: Any = model(values).grad_fn
        assert torch.equal(output._saved_self, values)
        assert engine.finish_step().stored_as == {"verbatim" if options else "raw": 1}


def test_not_finite_is_counted_as_exact() -> None:
    """Audits and plans get the site as what it is."""
    engine = engine_for(model := Scale(), 4, packing="workers")
    with engine.compress():
        loss = model(_with(float("inf"))).sum()
    assert list(engine._passes.last.precisions.values()) == [None]
    del loss
    with engine.compress():
        model(normal(*LARGE))
    assert list(engine._passes.last.precisions.values()) == [4]


def test_storage_that_is_kept_already_counts_once() -> None:
    """Two views of one storage that are both not finite hold it together."""
    x = torch.cat([_with(float("inf")), _with(float("nan"))])
    engine = engine_for(model := Scale(), 4, packing="workers")
    with engine.compress():
        loss = model(x[:128]).sum() + model(x[128:]).sum()
    assert engine.held_bytes == x.nbytes
    del loss
    assert_empty(engine)


def test_slopes_are_sent_off(monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """Codes for a GELU too; not finite inputs of one stay as they are."""
    monkeypatch.setattr(PrecisionPolicy, "codec", lambda policy, site: "slopes" if site.op == "leaf" else None)
    for value in (0.0, float("inf")):
        results, stored = [], []
        for packing in ("device", "workers"):
            x = _with(value).requires_grad_()
            engine = engine_for(nn.Linear(1, 1), "auto", packing=packing)
            with engine.compress():
                y = torch.nn.functional.gelu(x)
                loss = y.nan_to_num(0.0, 0.0, 0.0).sum()
            node: Any = y.grad_fn
            assert not value or torch.equal(node._saved_self, x)  # what is kept as it is can be read by anyone
            stored.append(engine.finish_step().stored_as)
            loss.backward()
            results.append(x.grad)
        assert torch.equal(*(found.nan_to_num(7.0) for found in results))
        assert stored[1] == stored[0]
        assert stored[0].keys() >= {"slopes" if value == 0 else "raw"}
    assert len(sent) == 4  # what replaces the infinity saves its input too


def test_result_of_a_relu_is_sent_off(sent: list[PackJob]) -> None:
    """Its signs are taken at once; if its values are not finite, those are kept and the signs are not."""
    for value in (1.0, float("inf")):
        held, stored, results = [], [], []
        for packing in ("device", "workers"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Scale())
            engine = engine_for(model, 4, packing=packing)
            with engine.compress():
                loss = model(_with(value)).nan_to_num(0.0, 0.0, 0.0).sum()
            held.append(engine.held_bytes)
            stored.append(engine.finish_step().stored_as)
            loss.backward()
            results.append(gradients(model))
        assert_same([g.nan_to_num() for g in results[1]], [g.nan_to_num() for g in results[0]])
        assert held[0] == held[1]
        assert stored[0] == stored[1]
        assert stored[0].get("rectified", 0) == (value == 1.0)
    assert sent


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("view", [False, True])
def test_change_in_place_after_saving_is_an_error(view: bool) -> None:
    """As in plain torch, and whether or not the worker had read it by then."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 8, packing="workers")
    with engine.compress():
        h = model(normal(128, 64))
        loss = h.sin().sum()
        with torch.no_grad():
            (h.detach().t()[:3] if view else h).mul_(2)
    with pytest.raises(ModifiedInPlaceError, match=r"shape \(128, 64\).*version 0 and is at version 1.* x = x \+ y"):
        loss.backward()
    del loss, h
    assert_empty(engine)


@pytest.mark.usefixtures("pace")
def test_change_in_place_is_an_error_inside_the_scope_too() -> None:
    """And only for who reads it after the change."""
    model = nn.Linear(64, 64)
    with engine_for(model, 8, packing="workers").compress():
        h = model(normal(128, 64))
        loss = h.sin().sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(ModifiedInPlaceError):
            loss.backward()


@pytest.mark.usefixtures("pace")
def test_change_in_place_after_the_scope_changes_nothing() -> None:
    """By then it is encoded: what is stored is a copy, as without workers."""
    results = []
    for change in (False, True):
        x = normal(*LARGE).requires_grad_()
        engine = engine_for(nn.Linear(1, 1), 8, packing="workers")
        with engine.compress():
            y = x.exp()
            loss = y.sum()
        with torch.no_grad():
            y.add_(10.0 * change)
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_metrics_say_what_workers_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time is apart from that of the thread that trains."""
    PACES["at-once"](monkeypatch)
    model = Scale()
    for packing in ("device", "workers"):
        engine = engine_for(model, 4, packing=packing)
        with engine.compress():
            model(normal(*LARGE))
        step = engine.finish_step()
        assert (step.worker_seconds > 0) == (packing == "workers")
        assert step.pack_seconds > 0
        assert engine.finish_step().worker_seconds == 0
