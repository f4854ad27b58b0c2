"""Training through Lightning's Trainer: what DAF changes in a run, and what it must not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from transformers import Trainer

from daf_core import ActivationEngine, DAFConfig
from daf_core.rewrites.registry import GELU, OperatorRewrites
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.hf_runs import MakeTrainer, daf_records, differing, gpt2, lora, resnet, roberta, run
from tests.integrations.hf_runs import last_step as hf_last_step
from tests.integrations.lightning_runs import (
    METRICS,
    MODULES,
    PACKAGES,
    STEPS,
    Classifier,
    fit,
    left_behind,
    loader,
    strategy_of,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize("package", PACKAGES)
def test_exact_mode_changes_no_bit_of_twenty_steps(tmp_path: Path, package: str) -> None:
    """In either package; adapters, dropout, evaluation in between."""
    plain, compressed = MODULES[package](), MODULES[package]()
    before, options = weights(compressed), {"max_steps": 20, "val_check_interval": 8}
    strategy = strategy_of(package)(precision="exact")
    fit(tmp_path, plain, package, **options)
    trainer = fit(tmp_path, compressed, package, strategy=strategy, **options)
    assert differing(weights(compressed), weights(plain)) == []
    assert differing(weights(compressed), before), "nothing was trained"
    assert compressed.losses == plain.losses
    assert len(plain.losses) == 20
    assert compressed.validations == plain.validations > 1
    assert strategy.last_step is not None
    assert strategy.last_step.raw_bytes > 500_000
    assert left_behind(compressed, trainer) == []


@pytest.mark.parametrize("model", [roberta, gpt2, resnet])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_exact_mode_changes_no_bit(tmp_path: Path, model: Any, options: dict[str, Any]) -> None:
    plain, compressed = Classifier(model()), Classifier(model())
    fit(tmp_path, plain, **options)
    trainer = fit(tmp_path, compressed, strategy=DAFStrategy(precision="exact"), **options)
    assert differing(weights(compressed), weights(plain)) == []
    assert compressed.losses == plain.losses
    assert left_behind(compressed, trainer) == []


class TestFourBits:
    @pytest.mark.parametrize("model", [lora, roberta, gpt2, resnet])
    def test_hold_the_bytes_of_an_engine_of_ones_own(self, tmp_path: Path, model: Any) -> None:
        # An engine by itself leaves the loss of language models as it is, and GELU.
        strategy = DAFStrategy(DAFConfig(precision=4, audit_every=None, chunked_loss=False))
        fit(tmp_path, Classifier(model()), strategy=strategy)
        rewritten = model()
        OperatorRewrites(rewritten, {GELU}).apply()
        expected = engine_step(rewritten, torch.float32)
        assert strategy.last_step is not None
        assert strategy.last_step.held_bytes == pytest.approx(expected.held_bytes, rel=0.01)
        assert strategy.last_step.raw_bytes == pytest.approx(expected.raw_bytes, rel=0.01)
        assert strategy.last_step.ratio > 2

    def test_hold_the_bytes_of_transformers_trainer(self, tmp_path: Path, make_trainer: MakeTrainer) -> None:
        strategy, callback = DAFStrategy(precision=4), DAFCallback(precision=4)
        fit(tmp_path, Classifier(), strategy=strategy)
        trainer: Trainer = make_trainer(callback)
        run(trainer)
        assert strategy.last_step is not None
        assert strategy.last_step.held_bytes == pytest.approx(hf_last_step(callback).held_bytes, rel=0.01)
        assert strategy.last_step.raw_bytes == pytest.approx(hf_last_step(callback).raw_bytes, rel=0.01)

    def test_hold_the_bytes_of_a_model_in_half_precision(self, tmp_path: Path) -> None:
        """Lightning makes bfloat16 the default type while training_step runs."""
        strategy = DAFStrategy(precision=4, audit_every=1)
        fit(tmp_path, Classifier(), strategy=strategy, precision="bf16-true")
        expected = engine_step(lora(), torch.bfloat16)
        assert strategy.last_step is not None
        assert strategy.last_step.held_bytes == pytest.approx(expected.held_bytes, rel=0.01)
        assert strategy.last_step.gradient_error is not None

    def test_train_about_as_well(self, tmp_path: Path) -> None:
        plain, compressed = Classifier(), Classifier()
        fit(tmp_path, plain)
        fit(tmp_path, compressed, strategy=DAFStrategy(precision=4))
        assert compressed.losses == pytest.approx(plain.losses, rel=0.02)
        assert differing(weights(compressed), weights(plain))


def engine_step(model: nn.Module, dtype: torch.dtype) -> Any:
    """Returns the statistics of a step with an engine that is used by hand."""
    model = model.to(dtype)
    engine = ActivationEngine(model, DAFConfig(precision=4))
    batch = next(iter(loader(model)))
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    with engine.compress():
        loss = model(**batch).loss
    loss.backward()
    engine.close()
    return engine.finish_step()


class TestSteps:
    @pytest.mark.parametrize("accumulated", [1, 2])
    def test_are_optimizer_steps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], accumulated: int) -> None:
        fit(tmp_path, Classifier(), strategy=DAFStrategy(), accumulate_grad_batches=accumulated)
        shown = capsys.readouterr().out
        assert f"│ steps                             │ {STEPS} " in shown
        assert shown.index("DAF stores") < shown.index("┃ saved activations")
        assert shown.count("┃ saved activations") == 1

    def test_raw_bytes_are_of_one_forward_pass(self, tmp_path: Path) -> None:
        found: list[int] = []
        for accumulated in (1, 2):
            strategy = DAFStrategy(precision=4)
            fit(tmp_path, Classifier(), strategy=strategy, accumulate_grad_batches=accumulated)
            assert strategy.last_step is not None
            found.append(strategy.last_step.raw_bytes)
        assert found[0] == found[1]


class TestMetrics:
    @pytest.mark.parametrize(("every", "rows"), [(1, STEPS), (2, STEPS // 2)])
    def test_are_in_the_log_beside_the_loss(self, tmp_path: Path, every: int, rows: int) -> None:
        logger = CSVLogger(tmp_path)
        trainer = fit(tmp_path, Classifier(), strategy=DAFStrategy(), logger=logger, log_every_n_steps=every)
        with open(Path(logger.log_dir, "metrics.csv")) as file:
            logged = [row for row in csv.DictReader(file) if row["loss"]]
        assert len(logged) == rows
        for row in logged:
            assert all(float(row[name]) > 0 for name in METRICS)
            assert float(row["daf/ratio"]) == pytest.approx(float(row["daf/raw_mb"]) / float(row["daf/held_mb"]), 1e-4)
        assert trainer.callback_metrics.keys() >= METRICS

    def test_show_the_ratio_in_the_progress_bar(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        bar = TQDMProgressBar()
        trainer = fit(tmp_path, Classifier(), strategy=DAFStrategy(), enable_progress_bar=True, callbacks=[bar])
        assert "daf/ratio" in trainer.progress_bar_metrics
        assert "daf/ratio=" in capsys.readouterr().out

    def test_keep_away_from_a_trainer_that_logs_nothing(self, tmp_path: Path) -> None:
        """Lightning warns of every log that is tried there."""
        options = {"barebones": True, "enable_checkpointing": None, "logger": None, "enable_progress_bar": None}

        class Silent(Classifier):
            def log(self, *args: Any, **kwargs: Any) -> None:
                assert args[0] in ("loss", "validation")

        quiet = {"enable_model_summary": None, "log_every_n_steps": None, "num_sanity_val_steps": None}
        fit(tmp_path, Silent(), strategy=DAFStrategy(), **options, **quiet)

    def test_leave_those_of_the_user_alone(self, tmp_path: Path) -> None:
        """Lightning resets what was logged in a hook when another one begins to log in the first batch."""

        class Logs(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                pl_module.log("gradient", 1.0)

            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                pl_module.log("after", float(trainer.global_step), on_step=True, on_epoch=True)

        found = []
        for strategy in ("auto", DAFStrategy(precision="exact")):
            options: dict[str, Any] = {
                "callbacks": [Logs()],
                "max_steps": -1,
                "max_epochs": 2,
                "limit_train_batches": 3,
            }
            metrics = fit(tmp_path, Classifier(), strategy=strategy, **options).callback_metrics
            found.append({name: value for name, value in metrics.items() if not name.startswith("daf/")})
        assert found[0] == found[1]
        assert "after_epoch" in found[0]


def test_nothing_to_compress_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loss is computed in a hook of Lightning that DAF does not cover."""

    class Elsewhere(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return next(value for value in self.parameters() if value.requires_grad).sum()

    fit(tmp_path, Elsewhere(), strategy=DAFStrategy(audit_every=None))
    [warning] = daf_records(caplog)
    assert "LightningModule.training_step" in warning.message
