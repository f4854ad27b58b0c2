"""Audits of a Trainer's run: they are logged, disturb nothing, and are given up rather than training."""

from __future__ import annotations

import logging
from queue import SimpleQueue
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import Trainer

from daf_core import ActivationEngine, AuditError
from daf_core.precision.policy import PrecisionPolicy
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    BATCH,
    STEPS,
    MakeModel,
    MakeTrainer,
    checkpointed,
    daf_records,
    differing,
    gpt2,
    last_step,
    left_behind,
    lora,
    losses,
    resnet,
    roberta,
    run,
    weights,
)
from tests.integrations.huggingface.test_lifecycle import checkpoint, saved_state

AUDITED = {"daf/gradient_error", "daf/gradient_cosine"}

BOUND: dict[str, Any] = {"max_gradient_error": 0.1}


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which audits were taken, in their order."""
    seen, audit = list[int](), ActivationEngine.audit

    def record(engine: ActivationEngine, *args: Any) -> Any:
        seen.append(engine._auditor._step)
        return audit(engine, *args)

    monkeypatch.setattr(ActivationEngine, "audit", record)
    return seen


def _entries(trainer: Trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def _engine_state(trainer: Trainer, step: int) -> dict[str, Any]:
    return saved_state(trainer, step)["attributes"]["engine_state"]


class TestLog:
    @pytest.mark.parametrize("model", [lora, roberta, gpt2, resnet])
    def test_has_the_error_after_the_first_audit(self, make_trainer: MakeTrainer, model: MakeModel) -> None:
        """The audit of the first step has no pass before it; that of the third is in the log from then on."""
        trainer = make_trainer(DAFCallback(audit_every=100), model=model(), max_steps=5)
        run(trainer)
        entries = _entries(trainer)
        assert [entry.keys() >= AUDITED for entry in entries] == [False, False, True, True, True]
        assert {entry["daf/gradient_error"] for entry in entries[2:]} == {entries[2]["daf/gradient_error"]}
        assert 0 < entries[2]["daf/gradient_error"] < 1
        assert 0.5 < entries[2]["daf/gradient_cosine"] <= 1.0001
        assert [entry["daf/audit_ms"] > 0 for entry in entries] == [True, False, True, False, False]

    @pytest.mark.parametrize("options", [{"precision": "exact"}, {"audit_every": None}])
    def test_has_none_without_audits(self, make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
        """Neither an error nor time spent on one."""
        trainer = make_trainer(DAFCallback(**options))
        run(trainer)
        assert not any(AUDITED & entry.keys() for entry in _entries(trainer))
        assert {entry["daf/audit_ms"] for entry in _entries(trainer)} == {0.0}

    def test_has_the_error_that_was_measured_last(self, make_trainer: MakeTrainer) -> None:
        """And the table at the end, with fewer bits a larger one."""
        errors: list[float] = []
        for precision in (8, 4, 2):
            callback = DAFCallback(precision=precision, audit_every=1)
            trainer = make_trainer(callback)
            run(trainer)
            errors.append(_entries(trainer)[-1]["daf/gradient_error"])
            measured = last_step(callback).gradient_error
            assert measured is not None
            assert measured.error == errors[-1] == callback.state()["attributes"]["totals"]["gradient_error"]
        assert errors == sorted(errors)
        assert errors[0] * 4 < errors[-1]

    def test_table_has_the_error(self, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
        """Only where one was measured."""
        for audit_every, expected in ((1, 1), (None, 0)):
            run(make_trainer(DAFCallback(audit_every=audit_every)))
            assert capsys.readouterr().out.count("gradient error, measured last") == expected


@pytest.mark.parametrize("model", [lora, roberta, gpt2, resnet])
@pytest.mark.parametrize("precision", ["exact", 8])
def test_audits_change_no_bit_of_a_run(make_trainer: MakeTrainer, model: MakeModel, precision: Any) -> None:
    """Weights, running statistics and losses are the same, dropout included; the loss is that of the whole batch."""
    runs: list[Trainer] = []
    for audit_every in (1, None):
        trainer = make_trainer(DAFCallback(precision=precision, audit_every=audit_every), model=model())
        run(trainer)
        runs.append(trainer)
    audited, plain = runs
    assert differing(weights(audited), weights(plain)) == []
    assert losses(audited) == losses(plain)
    assert left_behind(audited) == []


@pytest.mark.parametrize("accumulated", [1, 3])
def test_step_is_audited_once(make_trainer: MakeTrainer, audits: list[int], accumulated: int) -> None:
    """Of the parts of an accumulated batch the first."""
    arguments: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 4}
    run(make_trainer(DAFCallback(audit_every=2), **arguments, max_steps=4))
    assert audits == [1, 2, 3, 4]


def test_evaluation_is_not_audited(make_trainer: MakeTrainer, audits: list[int]) -> None:
    """Before training and in between; a step's audit is not used up by it."""
    run(make_trainer(DAFCallback(audit_every=1), eval_on_start=True, eval_strategy="steps", eval_steps=1))
    assert audits == [1, 2, 3]


def test_audit_takes_an_eighth_of_the_rows(make_trainer: MakeTrainer) -> None:
    """The loss is computed by the Trainer's own method, on a part of the batch and then on all of it."""
    seen: SimpleQueue[int] = SimpleQueue()  # a list would be put back after the audit

    class Watched(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.put(len(inputs["input_ids"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    run(make_trainer(DAFCallback(audit_every=100), trainer=Watched, per_device_train_batch_size=16))
    assert [seen.get() for _ in range(seen.qsize())] == [2, 16, 16, 2, 16]


class TestLowCosine:
    def test_is_a_warning_with_numbers(
        self, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Said once, as long as it stays low; training goes on."""
        monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 0)
        trainer = make_trainer(
            DAFCallback(audit_every=1, chunked_loss=False), model=gpt2(), max_steps=4, learning_rate=0.03
        )
        run(trainer)
        [warning] = daf_records(caplog)
        first = _entries(trainer)[1]
        assert warning.levelno == logging.WARNING
        assert first["daf/gradient_cosine"] < 0.5
        assert f"by {100 * first['daf/gradient_error']:.0f}% of its length" in warning.message
        assert f"between them is {first['daf/gradient_cosine']:.2f}" in warning.message
        assert "Raise memory_budget or precision" in warning.message
        assert len(losses(trainer)) == 4

    @pytest.mark.parametrize("precision", [8, "auto"])
    def test_is_not_said_of_a_good_one(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, precision: Any
    ) -> None:
        """Runs with the usual options are quiet."""
        run(make_trainer(DAFCallback(precision=precision, audit_every=1)))
        assert daf_records(caplog) == []


class PartsFail(Trainer):
    """Takes batches of one size alone, as models with a contrastive loss or a fixed shape do."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training and len(inputs["input_ids"]) != BATCH:
            raise ValueError("a batch has eight rows")
        return super().compute_loss(model, inputs, *args, **kwargs)


class TestLossThatTakesWholeBatchesAlone:
    def test_is_trained_without_audits(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, audits: list[int]
    ) -> None:
        """One warning says why, and no further audit is tried; weights are those of a run without."""
        trainers = [make_trainer(DAFCallback(audit_every=every, precision=8), trainer=PartsFail) for every in (1, None)]
        for trainer in trainers:
            run(trainer)
        [warning] = daf_records(caplog)
        assert "a batch has eight rows" in warning.message
        assert "Training goes on without audits; audit_every=None turns them off" in warning.message
        assert audits == [1]
        assert differing(weights(trainers[0]), weights(trainers[1])) == []
        assert left_behind(trainers[0]) == []

    def test_is_an_error_where_a_bound_must_be_kept(self, make_trainer: MakeTrainer) -> None:
        """It leaves no hooks."""
        with pytest.raises(AuditError, match="max_gradient_error cannot be kept") as raised:
            run(make_trainer(DAFCallback(**BOUND), trainer=PartsFail))
        assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model", [lora, roberta])
def test_checkpointed_layers_are_measured_or_a_warning_is_given(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, model: MakeModel, reentrant: bool
) -> None:
    """Never is an error reported that leaves out their parameters: in two bits it is small, and not zero."""
    how = checkpointed(use_reentrant=reentrant)
    trainer = make_trainer(DAFCallback(precision=2, audit_every=1), model=model(), **how)
    run(trainer)
    measured = _entries(trainer)[-1].get("daf/gradient_error")
    assert len(losses(trainer)) == STEPS
    if measured is None:
        [warning] = daf_records(caplog)
        assert "cannot measure the error of the gradient" in warning.message
    else:
        assert measured > 1e-4


@pytest.mark.parametrize("model", [lora, gpt2, resnet])
def test_bound_is_kept(make_trainer: MakeTrainer, model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    """Measured errors stay below it, without a warning, in fewer bytes than plain training keeps."""
    callback = DAFCallback(**BOUND, audit_every=2)
    trainer = make_trainer(callback, model=model(), max_steps=8, learning_rate=1e-3)
    run(trainer)
    entries = _entries(trainer)
    assert all(0 < entry["daf/gradient_error"] <= 0.1 for entry in entries)
    assert last_step(callback).ratio > 1.5
    assert daf_records(caplog) == []


class TestCheckpoints:
    @pytest.mark.parametrize("options", [{}, BOUND, {"memory_budget": "4MB", "budget_covers": "activations"}])
    def test_resume_with_what_was_learned(self, make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
        """The engine's state is in trainer_state.json; the steps that follow plan, measure and train the same."""
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "dataloader_num_workers": 0}
        whole = make_trainer(DAFCallback(**options, audit_every=1), **saving)
        run(whole)
        expected, halfway = _engine_state(whole, 4), _engine_state(whole, 2)
        assert halfway["policy"]["errors"]
        assert halfway["policy"]["plan"]
        assert halfway["auditor"]["step"] == 3, "the next one"
        resumed = make_trainer(DAFCallback(**options, audit_every=1), **saving)
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        assert _engine_state(resumed, 4) == expected
        assert differing(weights(resumed), weights(whole)) == []
        for mine, others in zip(_entries(resumed), _entries(whole), strict=True):
            assert mine["daf/gradient_error" if "daf/gradient_error" in others else "loss"] > 0
            assert {name: mine.get(name) for name in AUDITED} == {name: others.get(name) for name in AUDITED}

    @pytest.mark.parametrize("restore", [False, True])
    def test_are_gone_on_from_with_and_without_restored_callbacks(
        self, make_trainer: MakeTrainer, restore: bool
    ) -> None:
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(), **saving)
        run(whole)
        resumed = make_trainer(DAFCallback(), **saving, restore_callback_states_from_checkpoint=restore)
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        assert _engine_state(resumed, 4) == _engine_state(whole, 4)
        assert differing(weights(resumed), weights(whole)) == []

    def test_of_options_that_learn_nothing_are_followed_by_a_calibration(self, make_trainer: MakeTrainer) -> None:
        """Else what is learned would wait for the next audit, up to a hundred steps away."""
        saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 5}
        fixed = make_trainer(DAFCallback(precision=4), **saving)
        run(fixed)
        resumed = make_trainer(DAFCallback(), **saving)
        run(resumed, resume_from_checkpoint=str(checkpoint(fixed, 4)))
        assert not _engine_state(fixed, 4)["policy"]["errors"]
        assert _engine_state(resumed, 5)["policy"]["errors"]

    def test_of_a_lossy_run_go_on_exactly_where_that_is_asked_for(self, make_trainer: MakeTrainer) -> None:
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        lossy = make_trainer(DAFCallback(), **saving)
        run(lossy)
        folder = str(checkpoint(lossy, 2))
        exact, plain = make_trainer(DAFCallback(precision="exact"), **saving), make_trainer(**saving)
        for trainer in (exact, plain):
            run(trainer, resume_from_checkpoint=folder)
        assert differing(weights(exact), weights(plain)) == []

    def test_second_run_learns_anew(self, make_trainer: MakeTrainer) -> None:
        """What one run has learned is not taken into the next of the same callback."""
        trainer = make_trainer(DAFCallback(audit_every=1), save_strategy="steps", save_steps=STEPS)
        states: list[dict[str, Any]] = []
        for _ in range(2):
            run(trainer)
            states.append(_engine_state(trainer, STEPS)["auditor"])
        assert [state["step"] for state in states] == [STEPS + 1, STEPS + 1]


class TestBudget:
    def test_that_follows_the_memory_is_unaffected(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Audits are taken, nothing is dropped where there is enough, and the run is quiet."""
        callback = DAFCallback(memory_budget="auto", budget_covers="activations", audit_every=1)
        trainer = make_trainer(callback)
        run(trainer)
        assert _entries(trainer)[-1].keys() >= AUDITED
        assert last_step(callback).dropped_planes == 0
        assert daf_records(caplog) == []
        assert left_behind(trainer) == []

    def test_that_an_eighth_does_not_fit_in_is_audited_with_less(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Smaller parts are tried until one fits."""
        lengths: SimpleQueue[tuple[int, ...]] = SimpleQueue()  # a list would be put back after the audit

        def watch(module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
            lengths.put(tuple(keywords["input_ids"].shape))

        model = lora()
        watched = model.register_forward_pre_hook(watch, with_kwargs=True)
        callback = DAFCallback(memory_budget=250_000, budget_covers="activations", audit_every=1)
        run(make_trainer(callback, model=model, max_steps=2))
        watched.remove()
        found = [lengths.get() for _ in range(lengths.qsize())]
        assert found == [(2, 32), (2, 16), (BATCH, 64), (2, 16), (BATCH, 64)]
        assert daf_records(caplog) == []
