"""Audits: when they are due, what they measure, how they steer, and what they leave behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine, AuditError, DAFConfig, GradientError, StateError
from daf_core.model.treatments import Treatments
from daf_core.precision.audit import Auditor
from daf_core.precision.policy import PrecisionPolicy
from tests.core.harness import (
    MODELS,
    Loss,
    assert_empty,
    assert_same,
    engine_for,
    gradients,
    integers,
    make_model,
    normal,
    trainable,
    watch_held,
)

KEPT = ((False, False), (True, False), (True, True))
"""Which of two blocks stay as they are, in steps of three kinds."""

BOUND: dict[str, Any] = {"max_gradient_error": 0.1}


def _steps_due(audit_every: int | None, steps: int) -> list[int]:
    config = DAFConfig(audit_every=audit_every)
    auditor = Auditor(config, PrecisionPolicy(config))
    due: list[int] = []
    for step in range(1, steps + 1):
        due += [step] if auditor.due else []
        auditor.finish_step()
    return due


@pytest.mark.parametrize(
    ("audit_every", "expected"),
    [
        (1, list(range(1, 351))),
        (7, sorted({1, 3, 10, 30, 100, 300, *range(7, 351, 7)})),
        (100, [1, 3, 10, 30, 100, 200, 300]),
        (1000, [1, 3, 10, 30, 100, 300]),
        (None, []),
    ],
)
def test_steps_that_are_audited(audit_every: int | None, expected: list[int]) -> None:
    """Every so many steps, and a few at the beginning, when gradients change most; never where they are turned off."""
    assert _steps_due(audit_every, 350) == expected


def _audited_step(
    engine: ActivationEngine, loss_of: Callable[[], Tensor], rows_of: Callable[[], Tensor] | None = None
) -> GradientError | None:
    """Runs a step up to its gradients, with the audit that is due, of some rows; returns what that has measured."""
    measured = engine.audit(rows_of or loss_of) if engine.audit_due else None
    with engine.compress():
        loss = loss_of()
    loss.backward()
    assert loss.isfinite()
    assert_empty(engine)
    return measured


def _train(
    model: nn.Module, loss_of: Loss, engine: ActivationEngine, steps: int, rows_of: Loss | None = None
) -> list[float]:
    """Trains with the audits that are due; returns the errors that they measured."""
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    torch.manual_seed(1)
    errors: list[float] = []
    for step in range(steps):
        _audited_step(engine, partial(loss_of, model, step), partial(rows_of or loss_of, model, step))
        assert all(gradient.isfinite().all() for gradient in gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        measured = engine.finish_step().gradient_error
        errors += [] if measured is None else [measured.error]
    return errors


@pytest.mark.parametrize("precision", ["exact", 8, "auto"])
def test_exact_mode_is_not_audited(precision: Any) -> None:
    """It has no error; fixed precisions have one."""
    assert engine_for(nn.Linear(1, 1), precision).audit_due == (precision != "exact")


@pytest.mark.parametrize("options", [{}, BOUND])
def test_step_is_audited_once(options: dict[str, Any]) -> None:
    """Accumulated gradients have several forward passes in a step, and one audit."""
    model, loss_of = make_model("mlp")
    engine = engine_for(model, "auto", audit_every=1, **options)
    for _ in range(4):
        due: list[bool] = []
        for part in range(3):
            due.append(engine.audit_due)
            _audited_step(engine, lambda part=part: loss_of(model, part))
        assert due == [True, False, False]
        engine.finish_step()


class TestMeasuredError:
    def test_is_of_the_pass_before(self) -> None:
        """At the precisions that were stored, not at those that are planned then."""
        model, loss_of = make_model("transformer")
        engine = engine_for(model, "auto", audit_every=1)
        for step in range(4):
            stored = engine._passes.last.precisions
            torch.manual_seed(step)
            with engine.probe_pass(lambda step=step: loss_of(model, step)) as rehearsal:
                expected = rehearsal.compare(stored) if stored else None
            torch.manual_seed(step)
            assert _audited_step(engine, lambda step=step: loss_of(model, step)) == expected
            assert engine.finish_step().gradient_error == expected
            assert (expected is None) == (step == 0)

    @pytest.mark.parametrize("options", [{}, BOUND])
    def test_is_none_where_nothing_is_stored_with_loss(self, options: dict[str, Any]) -> None:
        """As of tensors that are too small for codes; before the first pass, nobody knows that they are."""
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        engine = engine_for(model, "auto", audit_every=1, **options)
        for step in range(3):
            measured = _audited_step(engine, lambda: model(normal(4, 8)).sum())
            assert step == 0 or measured == GradientError(0.0, 1.0)
            engine.finish_step()

    def test_is_of_the_last_pass_of_its_kind(self) -> None:
        """Three kinds of steps take turns, as where training is elastic and keeps a budget."""
        model, loss_of = make_model("transformer")
        engine = engine_for(model, 4)
        whole, *parts = (Treatments({"blocks.0": first, "blocks.1": second}) for first, second in KEPT)
        for treatments in (whole, *parts, *parts):
            engine.treat(treatments)
            with engine.compress():
                loss = loss_of(model, 0)
            loss.backward()
            engine.finish_step()
        resumed = engine_for(model, 4)
        resumed.load_state_dict(json.loads(json.dumps(engine.state_dict(), sort_keys=True)))
        for each in (engine, resumed):
            each.treat(whole)
        assert _audit(resumed, model, loss_of) == (found := _audit(engine, model, loss_of))
        assert found.error > 0
        engine.treat(Treatments({"blocks.1": True}))
        assert engine.audit(lambda: loss_of(model, 0)) is None

    def test_is_of_the_planes_that_a_budget_has_left(self) -> None:
        """Not of those that were stored before others took their place."""
        model, loss_of = make_model("transformer")
        errors: list[float] = []
        for budget in (None, 400_000, 300_000):
            engine = engine_for(model, 8, memory_budget=budget)
            with engine.compress():
                loss = loss_of(model, 0)
            loss.backward()
            engine.set_memory_budget(None)
            errors.append(_audit(engine, model, loss_of).error)
        assert 0 < 2 * errors[0] < errors[1] < errors[2]

    def test_of_a_bound_is_known_before_the_first_pass(self) -> None:
        """Of what is planned, and within the bound."""
        model, loss_of = make_model("mlp")
        measured = _audit(engine_for(model, "auto", **BOUND), model, loss_of)
        assert 0 < measured.error <= 0.1
        assert measured.cosine == pytest.approx(1, abs=0.01)

    @pytest.mark.parametrize("precision", [8, 4, 2, 1])
    def test_is_that_of_training(self, precision: Any) -> None:
        """The error of the gradient that training takes on the same rows, to the last digits that float32 has."""
        model, loss_of = make_model("mlp")
        engine = engine_for(model, precision)
        plain = torch.autograd.grad(loss_of(model, 0), trainable(model))
        with engine.compress():
            loss = loss_of(model, 0)
        loss.backward()
        difference = sum(float((a - b).square().sum()) for a, b in zip(gradients(model), plain, strict=True))
        length = sum(float(b.square().sum()) for b in plain)
        assert _audit(engine, model, loss_of).error == pytest.approx((difference / length) ** 0.5, rel=1e-4)


def _audit(engine: ActivationEngine, model: nn.Module, loss_of: Loss) -> GradientError:
    measured = engine.audit(lambda: loss_of(model, 0))
    assert measured is not None
    return measured


@pytest.mark.parametrize(
    ("name", "bound"),
    [("transformer", 0.05), ("transformer", 0.1), ("mlp", 0.08), ("mlp", 0.1), ("convnet", 0.05), ("convnet", 0.1)],
)
def test_bound_is_kept_while_training(name: str, bound: float) -> None:
    """Of all audits of thirty steps 95% find an error below it, and from the fifth step on fewer bytes are held."""
    model, loss_of = make_model(name)
    engine = engine_for(model, "auto", audit_every=5, max_gradient_error=bound)
    errors = _train(model, loss_of, engine, 30)
    assert len(errors) == 8
    assert sum(error > bound for error in errors) <= 0.05 * len(errors)
    assert any(error > bound / 10 for error in errors[2:]), "precision is never lowered"
    assert None not in engine._passes.last.precisions.values()
    assert min(bits for bits in engine._passes.last.precisions.values() if bits is not None) < 8


def test_unsettled_steps_have_eight_bits() -> None:
    """What is found at the first step, with LoRA's second matrix at zero, says little of the second."""
    model, loss_of = make_model("transformer")
    engine = engine_for(model, "auto", audit_every=1, max_gradient_error=0.5)
    _train(model, loss_of, engine, 2)
    assert {bits for bits in engine._policy.plan.values() if bits is not None} == {8}


class TestBudget:
    def test_is_kept_by_an_audit_while_activations_are_held(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the step holds and what the audit holds together are never more than is allowed."""
        model, loss_of = make_model("transformer")
        free = self._needed(monkeypatch)
        engine = engine_for(model, 4, memory_budget=2 * free, audit_every=1)
        with engine.compress():
            loss = loss_of(model, 0)
        held, seen = engine.held_bytes, watch_held(monkeypatch)
        assert engine.audit(lambda: loss_of(model, 0)) is not None
        assert 0 < held < held + max(seen) <= 2 * free
        assert engine.held_bytes == held
        loss.backward()
        assert_empty(engine)

    def test_of_exactly_what_it_takes_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And a byte less is an error, after which the step can be trained and another audit be taken."""
        needed = self._needed(monkeypatch)
        model, loss_of = make_model("transformer")
        seen = watch_held(monkeypatch)
        engine = engine_for(model, "auto", memory_budget=needed)
        engine.audit(lambda: loss_of(model, 0))
        assert max(seen) == needed
        seen.clear()
        engine = engine_for(model, "auto", memory_budget=needed - 1)
        with pytest.raises(ActivationBudgetError) as raised:
            engine.audit(lambda: loss_of(model, 0))
        assert raised.value.allowed == needed - 1 < raised.value.needed
        del raised
        assert not engine._policy.calibrated
        _audited_step(engine, lambda: loss_of(model, 0))
        engine.audit(lambda: _few(model))
        assert engine._policy.calibrated
        assert max(seen) <= needed - 1

    def test_too_small_for_the_rows_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That leaves nothing installed and nothing held."""
        model, loss_of = make_model("transformer")
        engine, seen = engine_for(model, "auto", memory_budget=100_000), watch_held(monkeypatch)
        with pytest.raises(ActivationBudgetError):
            engine.audit(lambda: loss_of(model, 0))
        assert max(seen) <= 100_000
        assert_empty(engine)
        assert engine.finish_step().gradient_error is None

    @staticmethod
    def _needed(monkeypatch: pytest.MonkeyPatch) -> int:
        """Returns the most bytes that a first audit holds."""
        model, loss_of = make_model("transformer")
        with monkeypatch.context() as patch:
            seen = watch_held(patch)
            engine_for(model, "auto").audit(lambda: loss_of(model, 0))
        return max(seen)


def _few(model: nn.Module) -> Tensor:
    return model(integers(50, 1, 16)).square().mean()


class TestState:
    @pytest.mark.parametrize("options", [{}, BOUND, {"memory_budget": 600_000}])
    @pytest.mark.parametrize("steps", [1, 4, 12])
    def test_goes_on_in_another_engine(self, options: dict[str, Any], steps: int) -> None:
        """The same plan at once, and the same gradients, errors and plans in the steps that follow."""
        model, loss_of = make_model("mlp")
        engine = engine_for(model, "auto", audit_every=1, **options)
        _train(model, loss_of, engine, steps)
        resumed = engine_for(model, "auto", audit_every=1, **options)
        resumed.load_state_dict(json.loads(json.dumps(engine.state_dict())))
        assert resumed.state_dict() == engine.state_dict()
        assert resumed._policy.plan == engine._policy.plan
        assert resumed.audit_due == engine.audit_due
        found: list[list[Tensor]] = []
        for each in (engine, resumed):
            model.zero_grad()
            with each.compress():
                loss = loss_of(model, 0)
            loss.backward()
            found.append(gradients(model))
        assert_same(*found)
        assert engine.audit(lambda: loss_of(model, 1)) == resumed.audit(lambda: loss_of(model, 1))
        assert resumed.state_dict() == engine.state_dict()

    @pytest.mark.parametrize("state", [{}, {"policy": {}}, {"policy": 1, "auditor": 2}, {"policy": [], "auditor": {}}])
    def test_of_something_else_is_refused(self, state: Any) -> None:
        """With its name."""
        with pytest.raises(StateError, match="no saved state of an engine: it has no "):
            engine_for(nn.Linear(1, 1), "auto").load_state_dict(state)

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"step": 3},
            {"step": "x", "misses": []},
            {"step": 3, "misses": 4},
            {"step": 3, "misses": ["x"]},
            {"step": None, "misses": []},
            {"step": math.inf, "misses": []},
            {"step": 3, "misses": [math.nan]},
        ],
    )
    def test_of_broken_audits_is_refused(self, state: Any) -> None:
        """Numbers that are missing, or none."""
        engine = engine_for(nn.Linear(1, 1), "auto")
        with pytest.raises(StateError, match="no saved state"):
            engine.load_state_dict({**engine.state_dict(), "auditor": state})


class TestTrainingGoesOn:
    @pytest.mark.parametrize("name", MODELS)
    def test_with_no_bits_anywhere(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Means of scaling groups alone give finite losses, and the audit says what they are worth."""
        monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 0)
        model, loss_of = make_model(name)
        engine = engine_for(model, "auto", audit_every=1)
        _train(model, loss_of, engine, 3)
        measured = engine.audit(lambda: loss_of(model, 3))
        assert measured is not None
        assert set(engine._passes.last.precisions.values()) <= {0, None}
        assert measured.error > 0.1
        assert measured.cosine < (0.7 if name == "transformer" else 0.99)

    @pytest.mark.parametrize("options", [{}, BOUND, {"memory_budget": 500_000}])
    def test_with_texts_of_other_lengths(self, options: dict[str, Any]) -> None:
        """Each pass has another size, some too small for anything to be compressed."""
        model, _ = make_model("transformer")
        engine = engine_for(model, "auto", audit_every=2, **options)

        def loss_of(rows: int, model: nn.Module, step: int) -> Tensor:
            return model(integers(50, rows, (32, 1, 7, 48, 24)[step % 5], seed=step)).square().mean()

        assert len(_train(model, partial(loss_of, 3), engine, 10, partial(loss_of, 1))) >= 4

    @pytest.mark.parametrize("options", [{}, BOUND, {"memory_budget": 100_000}])
    def test_with_modules_that_run_twice_or_never(self, options: dict[str, Any]) -> None:
        """Sites come and go from step to step."""
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        engine = engine_for(layers, "auto", audit_every=1, **options)
        paths = [(0, 1, 2, 3), (0, 1, 1, 1), (0, 3), (2, 0, 2, 1)]

        def loss_of(rows: int, model: nn.Module, step: int) -> Tensor:
            x = normal(rows, 64, seed=step)
            for layer in paths[step % 4]:
                x = layers[layer](x).tanh()
            # All parameters get a gradient, of zero where they are not used.
            return x.square().mean() + 0 * sum(parameter.sum() for parameter in model.parameters())

        assert len(_train(layers, partial(loss_of, 128), engine, 9, partial(loss_of, 32))) >= 8

    @pytest.mark.parametrize("options", [{}, BOUND, {"memory_budget": 600_000}])
    def test_with_accumulated_gradients(self, options: dict[str, Any]) -> None:
        """One audit a step, of the last pass of the step before; nothing is held after any part."""
        model, loss_of = make_model("transformer")
        engine = engine_for(model, "auto", audit_every=1, **options)
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
        for step in range(3):
            parts = [partial(loss_of, model, 2 * step + part) for part in range(2)]
            measured = [_audited_step(engine, part, lambda: _few(model)) for part in parts]
            assert measured[1] is None
            assert (measured[0] is None) == (step == 0 and options != BOUND)
            assert engine.finish_step().gradient_error == measured[0]
            optimizer.step()
            optimizer.zero_grad()


def test_loss_without_a_graph_is_named() -> None:
    """As of losses that take their gradients themselves, and hand out a number."""
    model, _ = make_model("mlp")
    with pytest.raises(AuditError, match="return a value without a graph"):
        engine_for(model, 8).audit(lambda: torch.tensor(1.0, requires_grad=True))
