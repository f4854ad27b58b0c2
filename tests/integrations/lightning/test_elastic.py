"""Elastic training by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from daf_core import ConfigError
from daf_core.plan.policies import OFF
from daf_integrations import DAFStrategy
from tests.integrations.elastic_runs import (
    BLOCKS,
    ELASTIC,
    STEPS,
    adapters,
    classifier,
    count_time,
    trained,
    with_gradient,
)
from tests.integrations.hf_runs import raise_at_pass
from tests.integrations.lightning_runs import PACKAGES, Steps, left_behind, loader, strategy_of, trainer_for
from tests.integrations.planned import AMPLE

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:Be aware that when using `ckpt_path`",  # the run that goes on saves nothing
)


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)


class Watching(Steps):
    """Notes what each step trains, and looks at what it changes."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model or adapters())
        self.trained: list[frozenset[str]] = []
        self.evaluated: set[frozenset[str]] = set()
        self.held: list[int] = []
        self.plans: list[Any] = []
        self._before: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trained.append(with_gradient(self.model))
        self._before = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._before:
            return
        after = self.model.named_parameters()
        assert {name for name, value in after if not torch.equal(value, self._before[name])} <= self.trained[-1]
        self._before = {}
        strategy: Any = self.trainer.strategy
        self.held.append(strategy.last_step.held_bytes)
        runner = strategy._daf_session.runner
        self.plans.append(None if runner is None else runner.plan)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.evaluated.add(trained(self.model))


class Module(Watching, lightning.pytorch.LightningModule):
    """For `lightning.pytorch`."""


class OtherModule(Watching, pytorch_lightning.LightningModule):
    """For `pytorch_lightning`."""


MODULES: dict[str, Any] = {"lightning.pytorch": Module, "pytorch_lightning": OtherModule}


def fit(folder: Path, module: Any, package: str = "lightning.pytorch", ckpt_path: Any = None, **options: Any) -> Any:
    trainer = trainer_for(
        folder, package, **{"strategy": strategy_of(package)(**ELASTIC), "max_steps": STEPS, **options}
    )
    torch.manual_seed(0)
    trainer.fit(module, loader(module.model), loader(module.model, count=8), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1e-2, "val_check_interval": 4}]
)
def test_what_is_off_does_not_change(
    package: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module looks at it; between steps everything is trained that was before."""
    module = MODULES[package](classifier())
    before = trained(module.model)
    trainer = fit(tmp_path, module, package, **options)
    assert len(module.trained) == STEPS
    assert {before} < set(module.trained)
    assert module.evaluated == {before}
    parts = [held for held, names in zip(module.held, module.trained, strict=True) if names < before]
    assert max(parts) < 0.8 * max(module.held)
    assert {"daf/elastic_depth", "daf/elastic_share"} <= trainer.callback_metrics.keys()
    assert "blocks that built a graph, a step" in capsys.readouterr().out
    assert trained(module.model) == before
    assert left_behind(module, trainer) == []


@pytest.mark.parametrize("saved", [1, 8])
def test_goes_on_from_a_checkpoint(saved: int, tmp_path: Path) -> None:
    whole, resumed = Module(classifier()), Module(classifier())
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
    options = {"max_steps": 2 * STEPS, "limit_train_batches": saved}
    fit(tmp_path, whole, callbacks=[keep], enable_checkpointing=True, **options)
    fit(tmp_path, resumed, ckpt_path=tmp_path / f"step={saved}.ckpt", **options)
    assert len(whole.trained[saved - 1]) < len(trained(resumed.model))
    assert resumed.trained == whole.trained[saved:]
    assert resumed.losses == whole.losses[saved:]


class TestErrors:
    @pytest.mark.parametrize("step", [1, 6])
    def test_in_a_step_that_trains_a_part(self, step: int, tmp_path: Path) -> None:
        module = Module()
        before = trained(module.model)
        handle = raise_at_pass(module.model.base_model.model.transformer.h[0], step, ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            fit(tmp_path, module)
        handle.remove()
        assert trained(module.model) == before
        assert left_behind(module, trainer_for(tmp_path)) == []

    def test_of_manual_optimization(self, tmp_path: Path) -> None:
        module = Module()
        module.automatic_optimization = False
        with pytest.raises(ConfigError, match="elastic training is not possible with manual optimization"):
            fit(tmp_path, module)


class Skipping(Module):
    """Has no loss for some batches, as is allowed: of some it does not even run the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_batches_may_be_skipped(tmp_path: Path) -> None:
    module = Skipping()
    before = trained(module.model)
    trainer = fit(tmp_path, module, max_steps=2 * STEPS)
    assert {before} < set(module.trained)
    assert trained(module.model) == before
    assert 0.4 < trainer.callback_metrics["daf/elastic_share"] <= 1


def test_plans_of_whole_steps_leave_out_what_builds_no_graph(tmp_path: Path) -> None:
    module = Module()
    fit(tmp_path, module, strategy=DAFStrategy(**ELASTIC, memory_budget=AMPLE))
    full = max(module.trained, key=len)
    peaks = {names: plan.forecast.peak_bytes for names, plan in zip(module.trained, module.plans, strict=True)}
    for names, plan in zip(module.trained, module.plans, strict=True):
        off = [f".h.{block}." not in "".join(names) for block in range(BLOCKS)]
        assert [block is OFF for block in plan.blocks] == off
        assert names == full or peaks[names] < peaks[full]
    assert len(peaks) > 1
