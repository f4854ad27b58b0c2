"""A Lightning run's life with DAF: failures, second runs, checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from daf_core import NothingToTrainError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFStrategy
from tests.integrations.hf_runs import differing, raise_at_pass
from tests.integrations.lightning_runs import BATCH, STEPS, Classifier, fit, left_behind, loader, trainer_for, weights

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:Be aware that when using `ckpt_path`",  # the run that goes on saves nothing
)

ROOT = Path(__file__).resolve().parents[3]
EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2}


def block_of(module: Classifier) -> torch.nn.Module:
    return module.model.base_model.model.roberta.encoder.layer[1]


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "ending"),
        [(RuntimeError("broken"), RuntimeError), (KeyboardInterrupt(), SystemExit), (SystemExit(1), SystemExit)],
        ids=["RuntimeError", "KeyboardInterrupt", "SystemExit"],
    )
    def test_in_mid_forward_leave_nothing_and_a_module_that_can_train(
        self, tmp_path: Path, error: BaseException, ending: type[BaseException]
    ) -> None:
        module, strategy, before = Classifier(), DAFStrategy(precision="exact"), signal.getsignal(signal.SIGINT)
        healed = raise_at_pass(block_of(module), 2, error)
        trainer = trainer_for(tmp_path, strategy=strategy, enable_progress_bar=False)
        with pytest.raises(ending):
            trainer.fit(module, loader(module.model), loader(module.model, count=BATCH))
        signal.signal(signal.SIGINT, before)  # Lightning ignores further interrupts
        healed.remove()
        assert left_behind(module, trainer) == []
        trainer = fit(tmp_path, module, strategy=DAFStrategy(precision="exact"))
        assert len(module.losses) == 1 + STEPS
        assert left_behind(module, trainer) == []

    def test_of_the_model_itself_are_daf_errors(self, tmp_path: Path) -> None:
        module = Classifier()
        module.model.requires_grad_(False)
        trained = torch.nn.Parameter(torch.zeros(1))
        module.configure_optimizers = lambda: torch.optim.SGD([trained], lr=1.0)
        with pytest.raises(NothingToTrainError, match="Classifier has no parameter that requires a gradient"):
            fit(tmp_path, module, strategy=DAFStrategy())
        assert innermost_hooks() is None


class TestSecondRun:
    def test_of_a_trainer_goes_on_and_counts_anew(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        module, strategy = Classifier(), DAFStrategy(precision="exact")
        trainer = fit(tmp_path, module, strategy=strategy)
        trainer.fit_loop.epoch_loop.max_steps = STEPS + 2
        trainer.fit(module, loader(module.model), loader(module.model, count=BATCH))
        assert len(module.losses) == STEPS + 2
        shown = capsys.readouterr().out
        assert [f"│ steps                       │ {steps} " in shown for steps in (STEPS, 2)] == [True, True]
        assert left_behind(module, trainer) == []

    def test_evaluation_alone_needs_no_session(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        module = Classifier()
        trainer = trainer_for(tmp_path, strategy=DAFStrategy())
        trainer.validate(module, loader(module.model, count=BATCH), verbose=False)
        assert module.validations == 1
        assert "DAF" not in capsys.readouterr().out


class TestCheckpoints:
    def test_hold_plain_values_that_a_plain_trainer_leaves_alone(self, tmp_path: Path) -> None:
        whole, path = Classifier(), tmp_path / "half.ckpt"
        saved_at(tmp_path, whole, path, strategy=DAFStrategy(precision="exact"))
        saved = torch.load(path, weights_only=True)
        assert saved["daf"]["totals"]["steps"] == 2
        assert saved["daf"]["engine_state"]["auditor"]["step"] == 3
        assert saved["state_dict"].keys() == whole.state_dict().keys()
        plain = Classifier()
        fit(tmp_path, plain, ckpt_path=path, **EPOCHS)
        assert plain.losses == whole.losses[2:]
        assert differing(weights(plain), weights(whole)) == []

    def test_of_weights_alone_hold_nothing_of_daf(self, tmp_path: Path) -> None:
        trainer = fit(tmp_path, Classifier(), strategy=DAFStrategy())
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        assert "daf" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)

    @pytest.mark.parametrize("weights_only", [True, False])
    @pytest.mark.parametrize("options", [{}, {"precision": 4}, {"max_gradient_error": 0.1}], ids=str)
    def test_resume_with_what_was_learned(self, tmp_path: Path, options: dict[str, Any], weights_only: bool) -> None:
        options = {**options, "audit_every": 1}
        whole, path = Classifier(), tmp_path / "half.ckpt"
        first = DAFStrategy(**options)
        saved_at(tmp_path, whole, path, strategy=first)
        resumed, second = Classifier(), DAFStrategy(**options)
        trainer = trainer_for(tmp_path, strategy=second, **EPOCHS)
        data = loader(resumed.model), loader(resumed.model, count=BATCH)
        trainer.fit(resumed, *data, ckpt_path=path, weights_only=weights_only)
        assert resumed.losses == whole.losses[2:]
        assert differing(weights(resumed), weights(whole)) == []
        states = [strategy._daf_session.state() for strategy in (first, second)]
        assert states[0]["engine_state"] == states[1]["engine_state"]
        assert states[0]["totals"]["steps"] == states[1]["totals"]["steps"] == 6
        assert states[0]["totals"]["audits"] == states[1]["totals"]["audits"]

    def test_that_are_evaluated_are_not_resumed_from(self, tmp_path: Path) -> None:
        path = tmp_path / "half.ckpt"
        saved_at(tmp_path, Classifier(), path, strategy=DAFStrategy())
        module, strategy = Classifier(), DAFStrategy()
        trainer = trainer_for(tmp_path, strategy=strategy)
        data = loader(module.model, count=BATCH)
        trainer.validate(module, data, ckpt_path=path, verbose=False)
        trainer.fit(module, loader(module.model), data)
        assert strategy._daf_session.totals.steps == STEPS

    def test_are_loaded_before_the_module_is_attached(self, tmp_path: Path) -> None:
        path = tmp_path / "half.ckpt"
        saved_at(tmp_path, Classifier(), path, strategy=DAFStrategy())
        trainer = trainer_for(tmp_path, strategy=DAFStrategy())
        trainer._checkpoint_connector.resume_start(path)
        module = Classifier()
        trainer.validate(module, loader(module.model, count=BATCH), ckpt_path=path, verbose=False)
        trainer.fit(module, loader(module.model), loader(module.model, count=BATCH))
        assert trainer.strategy._daf_session.totals.steps == STEPS

    def test_of_a_killed_run_resume_to_the_losses_of_a_whole_one(self, tmp_path: Path) -> None:
        whole = Classifier()
        fit(tmp_path, whole, strategy=DAFStrategy(precision=4, audit_every=1), **EPOCHS)
        child = subprocess.run(
            [sys.executable, "-m", "tests.integrations.lightning_killed_run", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
        resumed = Classifier()
        fit(
            tmp_path,
            resumed,
            strategy=DAFStrategy(precision=4, audit_every=1),
            ckpt_path=tmp_path / "last.ckpt",
            **EPOCHS,
        )
        assert resumed.losses == whole.losses[4:]


def saved_at(folder: Path, module: Classifier, path: Path, **options: Any) -> None:
    """Trains three epochs and keeps the checkpoint of the first at `path`."""
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    fit(folder, module, callbacks=[keep], enable_checkpointing=True, **EPOCHS, **options)
    (folder / "epoch=0.ckpt").rename(path)
