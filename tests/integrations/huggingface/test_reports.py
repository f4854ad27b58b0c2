"""What a run with DAF says: in the Trainer's log, on standard output, and in warnings."""

from __future__ import annotations

import inspect
import json
import logging

import pytest
import torch
from transformers import Trainer, TrainingArguments

from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    METRICS,
    STEPS,
    MakeTrainer,
    Recorder,
    Relay,
    begin_by_hand,
    daf_records,
    differing,
    end_by_hand,
    last_step,
    left_behind,
    lora,
    roberta,
    rows_for,
    run,
    weights,
)


class TestLog:
    def test_has_the_figures_where_it_has_a_training_loss_and_nowhere_else(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback(), eval_strategy="steps", eval_steps=1, logging_steps=2, max_steps=4)
        run(trainer)
        with_loss = [entry for entry in trainer.state.log_history if "loss" in entry]
        others = [entry for entry in trainer.state.log_history if "loss" not in entry]
        assert len(with_loss) == 2
        assert len(others) == 4 + 1
        assert all(entry.keys() >= METRICS for entry in with_loss)
        assert not any(name.startswith("daf/") for entry in others for name in entry)

    def test_has_plain_numbers(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback())
        run(trainer)
        entry = trainer.state.log_history[0]
        assert {type(entry[name]) for name in METRICS} == {float}
        assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history

    def test_has_the_figures_of_the_steps(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback()
        trainer = make_trainer(callback)
        run(trainer)
        entry, step = trainer.state.log_history[STEPS - 1], last_step(callback)
        assert entry["daf/raw_mb"] == step.raw_bytes / 1e6
        assert entry["daf/held_mb"] == step.held_bytes / 1e6
        assert entry["daf/ratio"] == step.ratio
        assert entry["daf/pack_ms"] == step.pack_seconds * 1e3
        assert entry["daf/unpack_ms"] == step.unpack_seconds * 1e3
        totals = callback.state()["attributes"]["totals"]
        assert (totals["raw_bytes"], totals["held_bytes"]) == (step.raw_bytes, step.held_bytes)

    def test_averages_the_time_over_the_steps_since_the_last_entry(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback()
        trainer = make_trainer(callback, logging_steps=2, max_steps=4)
        run(trainer)
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        totals = callback.state()["attributes"]["totals"]
        assert len(entries) == 2
        assert sum(2 * entry["daf/pack_ms"] for entry in entries) == pytest.approx(totals["pack_seconds"] * 1e3)
        assert sum(2 * entry["daf/unpack_ms"] for entry in entries) == pytest.approx(totals["unpack_seconds"] * 1e3)

    def test_reaches_callbacks_that_report_before_daf_is_asked(self, make_trainer: MakeTrainer) -> None:
        """TensorBoard's and the like come before the user's own callbacks."""
        before, after = Recorder(), Recorder()
        run(make_trainer(before, DAFCallback(), after))
        for recorder in (before, after):
            assert recorder.logged[0].keys() >= METRICS


class TestState:
    def test_can_be_saved_before_training(self) -> None:
        state = DAFCallback(precision="exact", memory_budget="1MB").state()
        assert json.loads(json.dumps(state)) == state
        assert state["attributes"]["totals"]["steps"] == 0

    def test_makes_the_same_callback_again(self) -> None:
        callback = DAFCallback(precision=2, rounding="stochastic", memory_budget="1MiB", seed=7)
        again = DAFCallback(**callback.state()["args"])
        assert again.config == callback.config

    def test_last_step_is_none_before_the_first(self) -> None:
        assert DAFCallback().last_step is None


class TestOutput:
    def test_is_one_line_before_and_one_table_after(
        self, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer = make_trainer(DAFCallback(memory_budget="40MB"))
        trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        capsys.readouterr()
        run(trainer)
        lines = capsys.readouterr().out.splitlines()
        start = [number for number, line in enumerate(lines) if line.startswith("DAF stores saved activations")]
        loss = [number for number, line in enumerate(lines) if "'loss'" in line]
        table = [number for number, line in enumerate(lines) if "┃ saved activations" in line]
        assert len(start) == 2, "the line at the start, and again as the table's title"
        assert len(table) == 1
        assert start[0] < loss[0] < loss[-1] < start[1] < table[0]
        assert "as many bits as each place needs, nearest; budget 40 MB for a step; PeftModel" in lines[start[0]]
        assert f"{trained:,} of " in lines[start[0]]
        assert any(line.startswith("│ steps ") and f" {STEPS} " in line for line in lines)

    @pytest.mark.parametrize(("zero", "expected"), [(True, 1), (False, 0)])
    def test_is_the_first_process_alone(
        self,
        arguments: TrainingArguments,
        capsys: pytest.CaptureFixture[str],
        zero: bool,
        expected: int,
    ) -> None:
        callback = DAFCallback()
        begin_by_hand(callback, arguments, lora(), zero=zero)
        assert capsys.readouterr().out.count("DAF stores") == expected
        end_by_hand(callback, arguments, zero=zero)
        assert capsys.readouterr().out.count("┃ saved activations") == expected

    def test_leaves_the_progress_bar_alone(self, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
        run(make_trainer(DAFCallback(), disable_tqdm=False))
        output = capsys.readouterr()
        assert f"{STEPS}/{STEPS}" in output.err
        assert "DAF" not in output.err
        assert output.out.count("┃ saved activations") == 1


class TestWithoutATrainer:
    def test_covers_the_models_forward_and_warns(
        self, arguments: TrainingArguments, caplog: pytest.LogCaptureFixture
    ) -> None:
        callback, model = DAFCallback(), roberta()
        signature = inspect.signature(model.forward)
        begin_by_hand(callback, arguments, model)

        [warning] = daf_records(caplog)
        assert warning.levelno == logging.WARNING
        for part in ("did not find the Trainer", "forward", "compute_loss_func", "nothing is logged"):
            assert part in warning.message
        assert "forward" in vars(model)
        assert inspect.signature(model.forward) == signature

        rows = rows_for(model, count=8)
        batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        model(**batch).loss.backward()
        callback.on_optimizer_step(arguments, None, None)
        assert last_step(callback).ratio > 4

        end_by_hand(callback, arguments)
        assert "forward" not in vars(model)
        assert inspect.signature(model.forward) == signature

    def test_puts_back_a_forward_that_was_replaced_before(self, arguments: TrainingArguments) -> None:
        callback, model = DAFCallback(), roberta()
        own = model.forward
        model.forward = own
        begin_by_hand(callback, arguments, model)
        assert model.forward is not own
        end_by_hand(callback, arguments)
        assert vars(model)["forward"] is own

    def test_exact_mode_changes_no_bit(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(precision="exact")
        plain, relayed = make_trainer(), make_trainer(Relay(callback))
        run(plain)
        run(relayed)
        assert differing(weights(relayed), weights(plain)) == []
        assert last_step(callback).raw_bytes > 500_000
        assert left_behind(relayed) == []

    def test_another_trainer_among_the_callers_is_left_alone(self, make_trainer: MakeTrainer) -> None:
        """Only a Trainer that has the callback among its own is taken for the one that calls."""
        callback, seen = DAFCallback(), list[bool]()

        class Watched(Trainer):
            def training_step(self, *args: object, **kwargs: object) -> torch.Tensor:
                seen.append("compute_loss" in vars(self))
                return super().training_step(*args, **kwargs)

        run(make_trainer(Relay(callback), trainer=Watched))
        assert seen == [False] * STEPS
