"""Loops of one's own: what prepare covers, when a step ends, and that the model stays the one it was."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

import daf_integrations as daf
from daf_core import AuditError, ConfigError, DAFConfig, HooksActiveError, NothingToTrainError, UnsupportedDeviceError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback
from daf_integrations.loop import training
from tests.integrations.hf_runs import (
    METRICS,
    MakeTrainer,
    daf_records,
    differing,
    gpt2,
    last_step,
    lora,
    roberta,
    rows_for,
    run,
)
from tests.integrations.loop_runs import adam, batches, collate, loss_outside, own_loss, train, weights_of

NO_MODELS = {
    "name": r"'roberta-base'; make or load one, and give that: "
    r"AutoModelForSequenceClassification\.from_pretrained\('roberta-base'\) loads one with a classifier",
    "none": "None; make or load one, and give that",
    "class": r"<class '.*Linear'>; make or load one, and give that",
    "state": "dict; make or load one, and give that",
    "optimizer": "AdamW?; give the model that it trains; the optimizer stays as it is",
    "loader": "DataLoader; give the model; what loads its batches stays as it is",
    "accelerator": r"Accelerator; give the model, before or after accelerator\.prepare",
    "trainer": r"Trainer; give the Trainer callbacks=\[DAFCallback\(precision=4\)\]",
    "lightning": r"Trainer; give the Trainer strategy=DAFStrategy\(precision=4\)",
}


@pytest.fixture(autouse=True)
def no_earlier_models() -> Iterator[None]:
    """Forgets the models of other tests, which the garbage collector may not have found yet."""
    yield
    training._trainings.clear()
    training._exit_summaries.clear()


def one_step(model: nn.Module, loss_of: Any = own_loss) -> dict[str, float]:
    train(model, 1, loss_of)
    return daf.metrics(model)


def steps_of(model: nn.Module) -> int:
    return daf.state_dict(model)["totals"]["steps"]


class TestNumbers:
    def test_exact_mode_changes_no_bit_in_twenty_steps(self) -> None:
        plain, compressed = lora(), daf.prepare(lora(), precision="exact")
        assert train(plain, 20) == train(compressed, 20)
        assert differing(weights_of(plain), weights_of(compressed)) == []
        assert steps_of(compressed) == 20
        assert daf.metrics(compressed)["daf/ratio"] > 1

    def test_bytes_are_those_of_the_trainer(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(precision=4, audit_every=None)
        run(make_trainer(callback, max_steps=1))
        found = one_step(daf.prepare(lora(), precision=4, audit_every=None))
        assert found["daf/held_mb"] == pytest.approx(last_step(callback).held_bytes / 1e6, rel=0.01)
        assert found["daf/raw_mb"] == pytest.approx(last_step(callback).raw_bytes / 1e6, rel=0.01)
        assert found["daf/ratio"] > 5

    def test_in_a_distributed_wrapper_and_compiled_they_are_the_same(self, tmp_path: Path) -> None:
        expected = one_step(daf.prepare(lora(dropout=0.0), precision=4, audit_every=None))["daf/raw_mb"]
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(lora(dropout=0.0), find_unused_parameters=True)
            assert daf.prepare(wrapped, precision=4) is wrapped
            assert one_step(wrapped)["daf/raw_mb"] == expected
        finally:
            torch.distributed.destroy_process_group()
        compiled = daf.prepare(torch.compile(lora(dropout=0.0), backend="aot_eager"), precision=4, audit_every=None)
        assert one_step(compiled)["daf/ratio"] > 3

    @pytest.mark.parametrize("precision", [4, "auto"])
    def test_resumes_to_the_losses_of_a_whole_run(self, precision: Any) -> None:
        whole = daf.prepare(lora(), precision=precision)
        optimizer = adam(whole)
        train(whole, 4, optimizer=optimizer)
        checkpoint = copy.deepcopy([whole.state_dict(), optimizer.state_dict()])
        learned = json.dumps(daf.state_dict(whole))
        expected = train(whole, 4, optimizer=optimizer, skip=4)

        resumed = lora()
        resumed.load_state_dict(checkpoint[0])
        daf.prepare(resumed, precision=precision)
        daf.load_state_dict(resumed, json.loads(learned))
        optimizer = adam(resumed)
        optimizer.load_state_dict(checkpoint[1])
        assert train(resumed, 4, optimizer=optimizer, skip=4) == expected
        assert steps_of(resumed) == 8


class TestSteps:
    def test_metrics_are_those_since_the_last_call(self) -> None:
        model = daf.prepare(lora(), precision=4)
        assert daf.metrics(model) == {}
        train(model, 3)
        assert daf.metrics().keys() >= METRICS
        assert all(isinstance(value, float) for value in daf.metrics(model).values())
        assert daf.metrics(model) == {}
        assert "DAF held at most" in daf.summary()

    @pytest.mark.parametrize(("encoding", "line"), [("utf-8", "\u2503"), ("cp1252", "|"), (None, "\u2503")])
    def test_the_summary_can_be_printed(self, monkeypatch: pytest.MonkeyPatch, encoding: str | None, line: str) -> None:
        """What Windows writes to a file is cp1252; a program without a console has no output."""
        model = daf.prepare(lora(), precision=4)
        train(model, 1)
        output = None if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", output)
        text = daf.summary(model)
        print(text)
        assert line in text

    def test_accumulated_batches_are_one_step(self) -> None:
        model = daf.prepare(lora(), precision=4)
        optimizer = adam(model)
        model.train()
        for batch in batches(model, 4):
            own_loss(model, batch).backward()
        optimizer.step()
        assert steps_of(model) == 1

    def test_two_optimizers_of_one_model_end_one_step(self) -> None:
        model = daf.prepare(roberta(), precision=4)
        body, head = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.roberta, model.classifier))
        model.train()
        for batch in batches(model, 2):
            own_loss(model, batch).backward()
            body.step()
            head.step()
        assert steps_of(model) == 2

    def test_optimizers_of_other_models_end_none(self) -> None:
        model, other = daf.prepare(roberta(), precision=4), daf.prepare(roberta(), precision=4)
        model.train()
        [batch] = batches(model, 1)
        own_loss(model, batch).backward()
        adam(other).step()
        assert steps_of(model) == 0
        adam(model).step()
        assert (steps_of(model), steps_of(other)) == (1, 0)

    def test_a_step_that_the_scaler_skips_counts_with_the_next(self) -> None:
        model = daf.prepare(roberta(), precision=4)
        optimizer, scaler = adam(model), torch.amp.GradScaler("cpu")
        model.train()
        for factor, batch in zip((float("inf"), 1.0), batches(model, 2), strict=True):
            scaler.scale(own_loss(model, batch) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert steps_of(model) == 1

    def test_passes_in_evaluation_count_for_nothing(self) -> None:
        model = daf.prepare(roberta(dropout=0.0), precision=2, rounding="stochastic")
        with_evaluation = roberta(dropout=0.0)
        daf.prepare(with_evaluation, precision=2, rounding="stochastic")
        [batch] = batches(model, 1)
        with_evaluation.eval()
        with_evaluation(**batch).loss.backward()
        with_evaluation.train()
        with torch.no_grad():
            with_evaluation(**batch)
        with_evaluation.zero_grad()
        assert train(model, 2) == train(with_evaluation, 2)
        assert differing(weights_of(model), weights_of(with_evaluation)) == []


class TestAudits:
    def test_run_where_the_model_returns_its_loss(self, caplog: pytest.LogCaptureFixture) -> None:
        model = daf.prepare(lora())
        train(model, 4)
        found = daf.metrics(model)
        assert 0 < found["daf/gradient_error"] < 1
        assert found["daf/audit_ms"] > 0
        assert daf_records(caplog) == []

    @pytest.mark.parametrize("as_tuple", [True, False])
    def test_find_the_loss_in_other_forms(self, as_tuple: bool) -> None:
        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = lora()

            def forward(self, **batch: Tensor) -> Any:
                output = self.model(**batch)
                return (output.loss, output.logits) if as_tuple else output.loss

        model = daf.prepare(Wrapped())
        for batch in batches(lora(), 3):
            output = model(**batch)
            (output[0] if as_tuple else output).backward()
            adam(model).step()
        assert "daf/gradient_error" in daf.metrics(model)

    def test_are_said_once_not_to_run_where_it_does_not(self, caplog: pytest.LogCaptureFixture) -> None:
        model = daf.prepare(lora())
        train(model, 3, loss_outside)
        [record] = daf_records(caplog)
        assert "the model returns no loss" in record.message
        assert "goes on without audits" in record.message
        assert "daf/gradient_error" not in daf.metrics(model)
        assert daf.summary(model).count("4.1 MB") == 1

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_go_on_after_a_batch_that_fails(self, bad: int, caplog: pytest.LogCaptureFixture) -> None:
        """In an audit, and then in its own forward pass, which a loop may skip."""
        model, number = daf.prepare(lora(), audit_every=1), -1

        def refuse(*_: object) -> None:
            if number == bad:
                raise ValueError("a bad batch")

        model.base_model.model.classifier.register_forward_pre_hook(refuse)
        for number, batch in enumerate(batches(model, 5)):
            if number == bad:
                with pytest.raises(ValueError, match="a bad batch"):
                    model(**batch)
                continue
            daf.metrics(model)
            model(**batch).loss.backward()
            adam(model).step()
        assert daf.metrics(model)["daf/audit_ms"] > 0
        assert daf_records(caplog) == []

    def test_a_bound_that_cannot_be_kept_is_refused(self) -> None:
        model = daf.prepare(lora(), max_gradient_error=0.05)
        with pytest.raises(AuditError, match=r"the model returns no loss.*max_gradient_error cannot be kept"):
            train(model, 1, loss_outside)
        assert innermost_hooks() is None
        with pytest.raises(AuditError, match=r"scope of its own.*max_gradient_error cannot be kept"), daf.scope(model):
            pass

    def test_a_bound_is_kept_where_the_loss_is_returned(self) -> None:
        model = daf.prepare(lora(dropout=0.0), max_gradient_error=0.05)
        train(model, 3)
        assert daf.metrics(model)["daf/gradient_error"] <= 0.05


class TestScope:
    def test_covers_a_loss_outside_of_the_model(self) -> None:
        def in_scope(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with daf.scope():
                logits = model(input_ids=batch["input_ids"]).logits
                return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].view(-1))

        def bare(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            logits = model(input_ids=batch["input_ids"]).logits
            return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].view(-1))

        first = daf.prepare(gpt2(), precision=4, audit_every=None)
        without = one_step(first, bare)
        training._trainings.clear()
        second = daf.prepare(gpt2(), precision=4, audit_every=None)
        log_softmax = 4 * 8 * 64 * 200 / 1e6
        assert one_step(second, in_scope)["daf/raw_mb"] - without["daf/raw_mb"] >= log_softmax
        assert steps_of(second) == 1

    def test_does_nothing_where_daf_is_off(self) -> None:
        with daf.scope():
            assert innermost_hooks() is None
        assert daf.metrics() == {}
        assert daf.summary() == "DAF is not active"
        assert daf.state_dict(roberta()) == {}
        daf.load_state_dict(roberta(), {})

    def test_of_which_model_has_to_be_said_where_there_are_several(self) -> None:
        models = [daf.prepare(roberta(), precision=4) for _ in range(2)]
        with pytest.raises(ConfigError, match="2 models are prepared"), daf.scope():
            pass
        with daf.scope(models[0]):
            pass

    def test_of_one_model_does_not_take_another_ones_weights(self) -> None:
        """They would be compressed as if they were activations."""
        model, other = daf.prepare(roberta(), precision=4), daf.prepare(roberta(), precision=4)
        model.train(), other.train()
        [batch] = batches(model, 1)
        with pytest.raises(HooksActiveError), daf.scope(model):
            other(**batch)
        assert innermost_hooks() is None


class TestModel:
    def test_looks_as_before(self) -> None:
        model = roberta()
        names, signature = list(model.state_dict()), inspect.signature(model.forward)
        daf.prepare(model, precision=4)
        assert inspect.signature(model.forward) == signature
        assert list(model.state_dict()) == names
        assert type(model) is type(roberta())

    def test_a_deep_copy_runs_without_daf(self) -> None:
        model = daf.prepare(roberta(dropout=0.0), precision=1)
        model.train()
        copied = copy.deepcopy(model)
        assert copied.forward.__self__ is copied
        [batch] = batches(model, 1)
        own_loss(copied, batch).backward()
        plain = roberta(dropout=0.0).train()
        own_loss(plain, batch).backward()
        for one, other in zip(copied.parameters(), plain.parameters(), strict=True):
            assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
        adam(copied).step()
        assert steps_of(model) == 0

    def test_can_be_saved_whole(self) -> None:
        model = daf.prepare(roberta(), precision=4)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert differing(weights_of(loaded), weights_of(model)) == []
        assert "forward" not in vars(loaded) or loaded.forward.__self__ is loaded
        loaded(**collate(rows_for(model, 2))).loss.backward()

    def test_preparing_again_replaces_the_configuration(self) -> None:
        model = daf.prepare(lora(), precision=8, audit_every=None)
        eight = one_step(model)
        daf.prepare(model, DAFConfig(precision=2, audit_every=None))
        two = one_step(model)
        assert two["daf/held_mb"] < 0.5 * eight["daf/held_mb"]
        assert two["daf/raw_mb"] == eight["daf/raw_mb"]

    def test_errors(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'precision'"):
            daf.prepare(lora(), precison=4)
        with pytest.raises(ConfigError, match="not both; got a DAFConfig and precision"):
            daf.prepare(lora(), DAFConfig(), precision=4)
        with pytest.raises(NothingToTrainError):
            daf.prepare(lora().requires_grad_(False))
        with pytest.raises(UnsupportedDeviceError, match="DataParallel"):
            daf.prepare(nn.DataParallel(roberta()))

    @pytest.mark.parametrize("config", [4, "daf.yaml", optim.SGD([torch.zeros(1)], 0.1)], ids=repr)
    def test_what_is_no_configuration(self, config: Any) -> None:
        with pytest.raises(ConfigError, match=r"is no configuration; give options by name, as in precision=4"):
            daf.prepare(lora(), config)

    @pytest.mark.parametrize(("given", "message"), NO_MODELS.items(), ids=str)
    def test_what_is_no_model(self, given: str, message: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        model = {
            "name": lambda: "roberta-base",
            "none": lambda: None,
            "class": lambda: nn.Linear,
            "state": lambda: daf.state_dict(lora()),
            "optimizer": lambda: adam(lora()),
            "loader": lambda: DataLoader([1]),
            "accelerator": Accelerator,
            "trainer": make_trainer,
            "lightning": lambda: lightning.Trainer(logger=False, default_root_dir=tmp_path, barebones=True),
        }[given]()
        for take in (daf.prepare, daf.state_dict, lambda wrong: daf.step(wrong, {})):
            with pytest.raises(ConfigError, match=rf"^a model is a torch\.nn\.Module, got {message}$"):
                take(model)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_in_a_pass_leaves_no_hooks(self, error: type[BaseException]) -> None:
        model = daf.prepare(roberta(), precision=4)

        def fail(*_: object) -> None:
            raise error

        handle = model.classifier.register_forward_pre_hook(fail)
        with pytest.raises(error):
            train(model, 1)
        assert innermost_hooks() is None
        handle.remove()
        train(model, 1)
        assert steps_of(model) == 1


class TestEnding:
    def test_warns_of_a_run_in_which_nothing_was_compressed(self, caplog: pytest.LogCaptureFixture) -> None:
        model = daf.prepare(roberta(), precision=4)
        inner = roberta()
        inner.load_state_dict(model.state_dict())
        optimizer = adam(model)
        for _ in range(4):
            optimizer.step()
        training.print_exit_summaries()
        early, late = daf_records(caplog)
        assert early.levelno == late.levelno == logging.WARNING
        assert "compressed nothing in 3 optimizer steps" in early.message
        assert "compressed nothing in the whole run" in late.message

    def test_says_why_a_run_without_an_optimizer_has_no_figures(self, caplog: pytest.LogCaptureFixture) -> None:
        model = daf.prepare(roberta(), precision=4)
        for batch in batches(model, 2):
            own_loss(model, batch).backward()
        training.print_exit_summaries()
        (said,) = daf_records(caplog)
        assert said.levelno == logging.WARNING
        assert "compressed nothing" not in said.message
        assert "and none did" in said.message

    def test_a_forked_process_leaves_it_to_its_parent(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        daf.prepare(roberta(), precision=4)
        with monkeypatch.context() as child:
            child.setattr(training.os, "getpid", lambda: -1)
            training.print_exit_summaries()
        assert daf_records(caplog) == []

    def test_says_nothing_of_a_run_that_went_well(
        self, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(daf.prepare(roberta(), precision=4), 1)
        training.print_exit_summaries()
        assert daf_records(caplog) == []
        assert capsys.readouterr().out == ""
