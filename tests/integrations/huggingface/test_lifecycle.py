"""A Trainer's life with DAF: failures, second runs, checkpoints, and the many ways to hand over the callback."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Trainer, TrainerCallback

from daf_core import ConfigError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    BATCH,
    METRICS,
    STEPS,
    MakeTrainer,
    OwnStep,
    daf_records,
    differing,
    last_step,
    left_behind,
    lora,
    losses,
    raise_at_pass,
    run,
    steps_of,
    weights,
)

FAILURES = [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(1)]
EVENTS = {"epoch": "on_epoch_begin", "step": "on_step_end", "end": "on_train_end"}
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def block_of(trainer: Trainer) -> nn.Module:
    """A module in the middle of the model."""
    return trainer.model.base_model.model.roberta.encoder.layer[1]


class TestFailures:
    @pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
    def test_in_mid_forward_leave_no_hooks_and_a_trainer_that_can_train(
        self, make_trainer: MakeTrainer, error: BaseException
    ) -> None:
        callback = DAFCallback(precision="exact")
        trainer = make_trainer(callback)
        healed = raise_at_pass(block_of(trainer), 2, error)
        with pytest.raises(type(error)):
            run(trainer)
        assert innermost_hooks() is None

        healed.remove()
        run(trainer)
        assert left_behind(trainer) == []
        assert steps_of(callback) == STEPS

    @pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("place", ["loading", *EVENTS, "optimizer", "evaluation"])
    def test_elsewhere_in_an_epoch_give_the_model_back(
        self, make_trainer: MakeTrainer, error: BaseException, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No event says that a training has ended so."""
        callback = DAFCallback(precision=4, audit_every=None)
        trainer = make_trainer(callback, eval_strategy="steps", eval_steps=1)
        monkeypatch.setattr(trainer, "evaluate", lambda *_, **__: {})
        calls = itertools.count()

        def fails(*_: object, **__: object) -> dict[str, float]:
            if next(calls) == (place not in ("epoch", "end")):
                raise error
            return {}

        if place == "loading":
            collate = trainer.data_collator
            monkeypatch.setattr(trainer, "data_collator", lambda rows: (fails(), collate(rows))[1])
        elif place in EVENTS:
            event = type("Event", (TrainerCallback,), {EVENTS[place]: lambda *_, **__: (fails(), None)[1]})
            trainer.callback_handler.callbacks.insert(0, event())
        elif place == "optimizer":
            trainer.create_optimizer().register_step_post_hook(fails)
        else:
            monkeypatch.setattr(trainer, "evaluate", fails)
        with pytest.raises(type(error)):
            run(trainer)
        assert left_behind(trainer) == []
        assert innermost_hooks() is None
        run(trainer)
        assert steps_of(callback) == STEPS
        assert left_behind(trainer) == []

    @pytest.mark.parametrize("way", ["pop_callback", "remove_callback"])
    def test_a_callback_that_is_taken_away_gives_the_model_back(self, make_trainer: MakeTrainer, way: str) -> None:
        """The steps that come are those of a Trainer without it."""
        callback, other = DAFCallback(precision=4, audit_every=None), DAFCallback
        trainer, left = make_trainer(callback), list[Any]()

        class Taking(TrainerCallback):
            def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
                if state.global_step == 1:
                    getattr(trainer, way)(other)
                    left.append(left_behind(trainer))

        trainer.add_callback(Taking)
        run(trainer)
        assert left == [[]]
        assert left_behind(trainer) == []
        assert steps_of(callback) == 1

    def test_that_are_caught_in_an_epoch_end_nothing(
        self, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tracker that cannot be reached, say, in a Trainer that goes on without it."""
        trainer = make_trainer(DAFCallback(precision=4, audit_every=None))

        class Tracker(TrainerCallback):
            def on_log(self, *_: object, **__: object) -> None:
                raise ConnectionError

        trainer.add_callback(Tracker)
        write = trainer.log

        def tolerant(*args: Any, **kwargs: Any) -> None:
            with suppress(ConnectionError):
                write(*args, **kwargs)

        monkeypatch.setattr(trainer, "log", tolerant)
        run(trainer)
        assert len([entry for entry in trainer.state.log_history if entry.keys() >= METRICS]) == STEPS

    def test_the_next_trainer_of_a_callback_frees_the_one_that_failed(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(audit_every=None)
        failed, next_one = make_trainer(callback), make_trainer(callback)
        healed = raise_at_pass(block_of(failed), 1, RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            run(failed)
        healed.remove()
        run(next_one)
        assert left_behind(failed) == []
        assert left_behind(next_one) == []

    def test_evaluation_works_after_a_failure(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback(audit_every=None))
        healed = raise_at_pass(block_of(trainer), 1, RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            run(trainer)
        healed.remove()
        assert trainer.evaluate()["eval_loss"] > 0
        assert innermost_hooks() is None


class TestSmallerBatchAfterOutOfMemory:
    def test_begins_anew(self, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
        """Trainer calls on_train_begin again without on_train_end."""
        callback = DAFCallback()
        trainer = make_trainer(callback, auto_find_batch_size=True)
        failing = raise_at_pass(block_of(trainer), 2, RuntimeError(OUT_OF_MEMORY))
        run(trainer)
        failing.remove()
        assert trainer._train_batch_size < BATCH
        assert steps_of(callback) == STEPS
        assert left_behind(trainer) == []
        assert capsys.readouterr().out.count("saved activations    ") == 1


class TestSecondRun:
    def test_counts_anew_and_repeats_the_first(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(precision="exact")
        trainer, plain = make_trainer(callback), make_trainer()
        for _ in range(2):
            run(trainer)
            run(plain)
            assert steps_of(callback) == STEPS
            assert losses(trainer) == losses(plain)
            assert left_behind(trainer) == []
        assert differing(weights(trainer), weights(plain)) == []

    def test_one_callback_serves_two_trainers_in_turn(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback()
        first, second = make_trainer(callback), make_trainer(callback)
        for trainer in (first, second):
            run(trainer)
            assert steps_of(callback) == STEPS
            assert len([entry for entry in trainer.state.log_history if entry.keys() >= METRICS]) == STEPS
            assert left_behind(trainer) == []
        assert differing(weights(first), weights(second)) == []


class TestHandingOver:
    def test_as_a_class(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback)
        run(trainer)
        assert trainer.state.log_history[0].keys() >= METRICS

    @pytest.mark.parametrize("callback", [DAFCallback, DAFCallback(precision=8)], ids=["class", "instance"])
    def test_by_add_callback(self, make_trainer: MakeTrainer, callback: Any) -> None:
        trainer = make_trainer()
        trainer.add_callback(callback)
        run(trainer)
        assert trainer.state.log_history[0].keys() >= METRICS
        assert left_behind(trainer) == []

    def test_twice_is_refused(self, make_trainer: MakeTrainer) -> None:
        """One of them would see nothing, and say that the loss is computed elsewhere."""
        second = DAFCallback(precision=8)
        trainer = make_trainer(DAFCallback(precision=4), second)
        with pytest.raises(ConfigError, match=r"has 2 DAFCallbacks \(of precision 4 and 8\)"):
            run(trainer)
        assert left_behind(trainer) == []
        trainer.remove_callback(second)
        run(trainer)
        assert trainer.state.log_history[0].keys() >= METRICS

    def test_with_a_model_that_train_makes(self, make_trainer: MakeTrainer) -> None:
        """model_init replaces the model when training begins: the one that trains is followed."""
        callback = DAFCallback()
        trainer = make_trainer(callback)
        first, trainer.model_init = trainer.model, lambda: lora()
        run(trainer)
        assert trainer.model is not first
        assert last_step(callback).ratio > 4
        assert left_behind(trainer) == []


class TestCheckpoints:
    def test_hold_the_options_and_the_totals(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback(precision=8, memory_budget="4MB"), save_strategy="steps", save_steps=2)
        run(trainer)
        state = saved_state(trainer, 2)
        assert state["args"] == {
            "precision": 8,
            "max_gradient_error": None,
            "audit_every": 100,
            "rounding": "nearest",
            "memory_budget": 4_000_000,
            "budget_covers": "step",
            "min_precision": None,
            "spill_dir": None,
            "pool_growth": "adaptive",
            "seed": 0,
            "backend": "auto",
            "packing": "auto",
            "chunked_loss": "auto",
            "elastic": None,
            "plan_file": None,
        }
        assert state["attributes"]["totals"]["steps"] == 2
        assert state["attributes"]["totals"]["raw_bytes"] > 1e6

    @pytest.mark.parametrize("restore", [False, True])
    def test_resume_to_the_weights_of_an_uninterrupted_run(
        self, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], restore: bool
    ) -> None:
        """And count on, whether the Trainer makes callbacks anew or not."""
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(precision="exact"), **options)
        run(whole)
        expected = weights(whole)
        capsys.readouterr()

        resumed = make_trainer(
            DAFCallback(precision="exact"), **options, restore_callback_states_from_checkpoint=restore
        )
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        assert differing(weights(resumed), expected) == []
        assert losses(resumed) == losses(whole)
        assert re.search(r"│ steps +│ 4 ", capsys.readouterr().out)
        assert saved_state(resumed, 4)["attributes"]["totals"]["steps"] == 4
        assert left_behind(resumed) == []

    def test_a_run_after_a_resumed_one_counts_anew(self, make_trainer: MakeTrainer) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(), **options)
        run(whole)
        resumed = make_trainer(DAFCallback(), **options)
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        run(resumed)
        assert saved_state(resumed, 4)["attributes"]["totals"]["steps"] == 4

    def test_a_resumed_run_warns_as_well_where_nothing_is_covered(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(), **options)
        run(whole)
        resumed = make_trainer(DAFCallback(), trainer=OwnStep, **options, restore_callback_states_from_checkpoint=True)
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        [warning] = daf_records(caplog)
        assert "no activations in the first step" in warning.message

    def test_restored_callbacks_take_the_options_of_the_checkpoint(self, make_trainer: MakeTrainer) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(precision="exact"), **options)
        run(whole)
        resumed = make_trainer(DAFCallback(precision=2), **options, restore_callback_states_from_checkpoint=True)
        run(resumed, resume_from_checkpoint=str(checkpoint(whole, 2)))
        assert differing(weights(resumed), weights(whole)) == []
        assert saved_state(resumed, 4)["args"]["precision"] == "exact"

    def test_the_best_model_is_loaded_at_the_end(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        runs = []
        for name, callbacks in (("plain", []), ("daf", [DAFCallback(precision="exact")])):
            options["output_dir"] = str(tmp_path / name)
            trainer = make_trainer(*callbacks, **options, load_best_model_at_end=True, learning_rate=0.05)
            run(trainer)
            runs.append(trainer)
        plain, compressed = runs
        assert compressed.state.best_global_step == plain.state.best_global_step
        assert differing(weights(compressed), weights(plain)) == []
        assert left_behind(compressed) == []

    def test_of_a_run_without_the_callback_are_gone_on_from(self, make_trainer: MakeTrainer) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        plain = make_trainer(**options)
        run(plain)
        folder = str(checkpoint(plain, 2))
        callback = DAFCallback(precision="exact")
        run(make_trainer(callback))
        resumed = make_trainer(callback, **options)
        run(resumed, resume_from_checkpoint=folder)
        assert differing(weights(resumed), weights(plain)) == []
        assert saved_state(resumed, 4)["attributes"]["totals"]["steps"] == 2

    def test_load_without_the_callback(self, make_trainer: MakeTrainer) -> None:
        """A checkpoint is one of the Trainer's own: nothing of DAF is needed to go on."""
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        whole = make_trainer(DAFCallback(precision="exact"), **options)
        run(whole)
        plain = make_trainer(**options)
        run(plain, resume_from_checkpoint=str(checkpoint(whole, 2)))
        assert differing(weights(plain), weights(whole)) == []


def checkpoint(trainer: Trainer, step: int) -> Path:
    """Returns a copy of a checkpoint's folder, which the run that resumes from it may write over."""
    folder = Path(trainer.args.output_dir)
    return Path(shutil.copytree(folder / f"checkpoint-{step}", folder.parent / "copy" / f"checkpoint-{step}"))


def saved_state(trainer: Trainer, step: int) -> dict[str, Any]:
    """Returns what a checkpoint keeps of the callback."""
    text = (Path(trainer.args.output_dir) / f"checkpoint-{step}" / "trainer_state.json").read_text()
    return json.loads(text)["stateful_callbacks"]["DAFCallback"]
