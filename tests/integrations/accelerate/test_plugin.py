"""Accelerate's own loops with DAF switched on by the environment: the loops know nothing of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from torch import nn
from typing_extensions import override

import daf_integrations as daf
from daf_core import AuditError, ConfigError
from daf_integrations import DAFCallback
from daf_integrations.accelerate.plugin import install
from daf_integrations.loop import training
from daf_integrations.loop.training import training_of
from tests.integrations.elastic_runs import BLOCKS, ELASTIC, classifier, count_time, trained
from tests.integrations.hf_runs import (
    METRICS,
    STEPS,
    MakeTrainer,
    daf_records,
    differing,
    last_step,
    lora,
    losses,
    roberta,
    run,
    weights,
)
from tests.integrations.loop_runs import adam, loader_for, loss_outside, own_loss, weights_of


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in singletons, and writes its settings into the environment."""

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        training._trainings.clear()
        training._exit_summaries.clear()

    for name in ("prepare", "prepare_model", "__init__"):
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    reset()
    yield
    reset()


@pytest.fixture
def switch_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches DAF on as the environment of a launched process does."""

    def switch(**options: Any) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", json.dumps(options))
        install(Accelerator)

    return switch


class Loop:
    """An Accelerate loop that can be saved and resumed."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, adam(model), loader_for(model, 160))

    def train(self, stop: int, start: int = 0, loss_of: Any = own_loss) -> list[float]:
        torch.manual_seed(start)
        self.model.train()
        losses = []
        for number, batch in enumerate(self.loader):
            if start <= number < stop:
                with self.accelerator.accumulate(self.model):
                    loss = loss_of(self.model, batch)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses


def steps_of(model: nn.Module) -> int:
    return daf.state_dict(model)["totals"]["steps"]


class TestNumbers:
    @pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
    def test_exact_mode_changes_no_bit_in_twenty_steps(self, switch_on: Any, mixed_precision: str) -> None:
        plain = Loop(lora(), mixed_precision=mixed_precision)
        expected = plain.train(20)
        assert training_of(plain.model) is None
        AcceleratorState._reset_state(True)
        switch_on(precision="exact")
        compressed = Loop(lora(), mixed_precision=mixed_precision)
        assert compressed.train(20) == expected
        assert differing(weights_of(plain.model), weights_of(compressed.model)) == []
        assert steps_of(compressed.model) == 20
        assert daf.metrics(compressed.model)["daf/ratio"] > 1

    def test_bytes_are_those_of_the_trainer(self, switch_on: Any, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(precision=4, audit_every=None)
        run(make_trainer(callback, max_steps=1))
        AcceleratorState._reset_state(True)
        switch_on(precision=4, audit_every=None)
        loop = Loop(lora())
        loop.train(1)
        found = daf.metrics(loop.model)
        assert found["daf/held_mb"] == pytest.approx(last_step(callback).held_bytes / 1e6, rel=0.01)
        assert found["daf/raw_mb"] == pytest.approx(last_step(callback).raw_bytes / 1e6, rel=0.01)

    def test_accumulated_batches_are_one_step(self, switch_on: Any) -> None:
        switch_on(precision=4)
        loop = Loop(lora(), gradient_accumulation_steps=2)
        loop.train(4)
        assert steps_of(loop.model) == 2


class TestModels:
    def test_without_anything_to_train_or_for_evaluation_stay_plain(self, switch_on: Any) -> None:
        switch_on(precision=4)
        accelerator = Accelerator(cpu=True)
        assert training_of(accelerator.prepare(roberta().requires_grad_(False))) is None
        assert training_of(accelerator.prepare_model(roberta(), evaluation_mode=True)) is None
        assert training_of(accelerator.prepare_model(roberta())) is not None

    @pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
    def test_can_be_unwrapped(self, switch_on: Any, mixed_precision: str) -> None:
        switch_on(precision=4)
        model = roberta()
        names = list(model.state_dict())
        loop = Loop(model, mixed_precision=mixed_precision)
        loop.train(1)
        for keep in (True, False):
            unwrapped = loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=keep)
            assert unwrapped is model
            assert list(unwrapped.state_dict()) == names
        with torch.no_grad():
            unwrapped(input_ids=torch.ones(1, 8, dtype=torch.long))

    def test_that_the_script_has_prepared_keep_its_options(self, switch_on: Any, capsys: Any) -> None:
        switch_on(precision=2, rounding="stochastic")
        model = daf.prepare(roberta(), precision=8)
        loop = Loop(model)
        loop.train(1)
        assert steps_of(loop.model) == 1
        # Single options of the script go before those of the environment, which says the rest.
        assert "DAF active via Accelerate: DAF stores saved activations in 8 bits, stoch" in capsys.readouterr().out


class TestOutput:
    def test_begins_with_a_line_and_ends_with_a_table(self, switch_on: Any, capsys: Any) -> None:
        switch_on(precision=4)
        loop = Loop(lora())
        assert capsys.readouterr().out.count("DAF active via Accelerate: DAF stores saved activations in 4 bits") == 1
        loop.accelerator.prepare(loop.model)
        loop.train(2)
        assert capsys.readouterr().out == ""
        training.print_exit_summaries()
        training.print_exit_summaries()
        assert capsys.readouterr().out.count("saved activations    ") == 1

    def test_a_run_without_compression_ends_with_a_warning(
        self, switch_on: Any, caplog: pytest.LogCaptureFixture, capsys: Any
    ) -> None:
        switch_on(precision=4)
        loop = Loop(lora())
        for batch in loop.loader:
            loop.model.base_model(**batch).loss.backward()
            loop.optimizer.step()
        capsys.readouterr()
        training.print_exit_summaries()
        assert "the whole run" in daf_records(caplog)[-1].message
        assert capsys.readouterr().out == ""

    def test_metrics_go_into_the_log(self, switch_on: Any) -> None:
        switch_on(precision=4)
        logged: list[dict[str, Any]] = []

        class Tracker(GeneralTracker):
            name, requires_logging_directory = "recorder", False

            @property
            def tracker(self) -> None: ...

            @override
            def store_init_configuration(self, values: dict[str, Any]) -> None: ...

            @override
            def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
                logged.append(values)

        loop = Loop(lora(), log_with=Tracker())
        loop.accelerator.init_trackers("test")
        [loss] = loop.train(1)
        loop.accelerator.log({"loss": loss, **daf.metrics(loop.model)}, step=1)
        loop.accelerator.end_training()
        assert logged[0].keys() >= {"loss", *METRICS}


class TestCheckpoints:
    @pytest.mark.parametrize("options", [{"precision": 4}, {}, {"max_gradient_error": 0.05}], ids=str)
    def test_resume_to_the_losses_of_a_whole_run(self, switch_on: Any, tmp_path: Path, options: Any) -> None:
        switch_on(**options)
        whole = Loop(lora())
        whole.train(4)
        whole.accelerator.save_state(str(tmp_path))
        expected = whole.train(8, start=4)
        AcceleratorState._reset_state(True)
        resumed = Loop(lora())
        resumed.accelerator.load_state(str(tmp_path))
        assert resumed.train(8, start=4) == expected
        assert steps_of(resumed.model) == 8

    def test_load_with_and_without_daf(self, switch_on: Any, tmp_path: Path) -> None:
        plain = Loop(lora())
        plain.train(2)
        plain.accelerator.save_state(str(tmp_path / "plain"))
        AcceleratorState._reset_state(True)
        plain_files = {file.name for file in (tmp_path / "plain").iterdir()}

        switch_on(precision="exact")
        compressed = Loop(lora())
        compressed.accelerator.load_state(str(tmp_path / "plain"))
        assert steps_of(compressed.model) == 0
        expected = compressed.train(4, start=2)
        compressed.accelerator.save_state(str(tmp_path / "daf"))
        assert {file.name for file in (tmp_path / "daf").iterdir()} == {*plain_files, "daf_states_0.json"}

        plain.accelerator.load_state(str(tmp_path / "plain"))
        assert plain.train(4, start=2) == expected
        plain.accelerator.load_state(str(tmp_path / "daf"))


class TestTrainer:
    """Scripts with the Trainer go through Accelerator.prepare as well."""

    def test_is_covered(self, switch_on: Any, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(precision=4, audit_every=None)
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
        by_callback = make_trainer(callback, **evaluated)
        run(by_callback)
        switch_on(precision=4, audit_every=None)
        by_environment = make_trainer(**evaluated)
        run(by_environment)
        found = training_of(by_environment.model)
        assert found is not None
        assert steps_of(by_environment.model) == STEPS
        assert found.session.last_step is not None
        assert found.session.last_step.held_bytes == pytest.approx(last_step(callback).held_bytes, rel=0.01)
        assert losses(by_environment) == losses(by_callback)
        assert differing(weights(by_environment), weights(by_callback)) == []
        run(by_environment)
        assert steps_of(by_environment.model) == 2 * STEPS

    def test_with_the_callback_has_one_scope(
        self, switch_on: Any, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, capsys: Any
    ) -> None:
        alone = make_trainer(DAFCallback(precision=2, rounding="stochastic"))
        run(alone)
        switch_on(precision=1, rounding="stochastic")
        both = make_trainer(DAFCallback(precision=2))
        run(both)
        assert losses(both) == losses(alone)
        assert differing(weights(both), weights(alone)) == []
        [record] = daf_records(caplog)
        assert "compressed by another DAF scope" in record.message
        capsys.readouterr()
        training.print_exit_summaries()
        assert capsys.readouterr().out == ""
        assert len(daf_records(caplog)) == 1


class TestErrors:
    def test_a_bad_option_ends_the_run_before_it_begins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"precison": 4}')
        with pytest.raises(ConfigError, match="ACCELERATE_DAF_CONFIG: unknown option 'precison'; did you mean"):
            install(Accelerator)

    def test_a_bound_that_cannot_be_kept_is_refused(self, switch_on: Any) -> None:
        switch_on(max_gradient_error=0.05)
        with pytest.raises(AuditError, match="max_gradient_error cannot be kept"):
            Loop(lora()).train(1, loss_of=loss_outside)


def test_elastic_training_goes_on_from_a_checkpoint(
    switch_on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulated batches, from a step that trained the head alone."""
    count_time(monkeypatch)
    switch_on(**ELASTIC)
    whole = Loop(classifier(), gradient_accumulation_steps=2)
    before = trained(whole.model)
    head = whole.train(12)
    assert trained(whole.model) == before
    whole.accelerator.save_state(tmp_path)
    tail = whole.train(20, 12)
    assert daf.metrics(whole.model)["daf/elastic_depth"] < BLOCKS
    AcceleratorState._reset_state(True)
    resumed = Loop(classifier(), gradient_accumulation_steps=2)
    resumed.accelerator.load_state(tmp_path)
    assert resumed.train(20, 12) == tail != head
    assert steps_of(resumed.model) == steps_of(whole.model) == 10
