"""Manual optimization in Lightning: backward passes inside of training_step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from daf_core import AuditError
from daf_core.autograd.torch_private import in_backward
from daf_integrations import DAFStrategy
from tests.integrations.hf_runs import daf_records, differing
from tests.integrations.lightning_runs import METRICS, left_behind, trainer_for, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

MANUAL = "with manual optimization"


class Manual(LightningModule):
    """Runs backward and two optimizers itself, through checkpointed and plain layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3)]
        self.model, self.losses = nn.Sequential(*layers), list[float]()
        self.automatic_optimization = False
        self.reentrant = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            hidden = self.model[:2](batch["inputs"])
            hidden = checkpoint(self.model[2:4], hidden, use_reentrant=self.reentrant)
            loss = nn.functional.cross_entropy(self.model[4](hidden), batch["labels"])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[part].parameters(), lr=0.1) for part in (0, 4)]

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(0)
        rows = [{"inputs": torch.randn(64, generator=random), "labels": number % 3} for number in range(512)]
        return torch.utils.data.DataLoader(rows, batch_size=128)

    def fit(self, folder: Path, **options: Any) -> Any:
        trainer = trainer_for(folder, **options)
        torch.manual_seed(0)
        trainer.fit(self)
        return trainer


def test_exact_mode_changes_no_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, compressed = Manual(), Manual()
    plain.fit(tmp_path)
    strategy = DAFStrategy(precision="exact")
    trainer = compressed.fit(tmp_path, strategy=strategy)
    assert differing(weights(compressed), weights(plain)) == []
    assert trainer.callback_metrics.keys() >= METRICS
    assert left_behind(compressed, trainer) == []
    assert daf_records(caplog) == []


def test_a_batch_is_a_step_and_raw_bytes_are_of_one_pass(tmp_path: Path) -> None:
    """Each of the two backward passes frees what was saved for it."""
    strategy, module = DAFStrategy(precision=4, audit_every=None), Manual()
    module.fit(tmp_path, strategy=strategy)
    assert strategy.last_step is not None
    assert strategy._daf_session.totals.steps == len(module.losses) == 2
    once = 128 * (64 + 256 + 256 + 256 + 3) * 4
    assert strategy.last_step.raw_bytes == pytest.approx(once, rel=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_recomputes_is_not_packed(tmp_path: Path, reentrant: bool) -> None:
    module, strategy = Manual(), DAFStrategy(precision=4, audit_every=None)
    module.reentrant, recomputed = reentrant, list[int]()
    module.model[2].register_forward_pre_hook(lambda *_: recomputed.append(in_backward()))
    module.fit(tmp_path, strategy=strategy)
    assert strategy.last_step is not None
    assert recomputed == [False, True] * 4
    stored = sum(strategy.last_step.stored_as.values())
    module = Manual()
    module.fit(tmp_path, strategy=(other := DAFStrategy(precision=4, audit_every=None)))
    assert other.last_step is not None
    assert stored == sum(other.last_step.stored_as.values())


def test_has_no_audits_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Manual().fit(tmp_path, strategy=DAFStrategy(audit_every=1))
    [warning] = daf_records(caplog)
    assert warning.levelno == logging.WARNING
    assert MANUAL in warning.message
    assert "Training goes on without audits" in warning.message


def test_is_refused_where_a_bound_must_be_kept(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=f"{MANUAL}.*max_gradient_error cannot be kept"):
        Manual().fit(tmp_path, strategy=DAFStrategy(max_gradient_error=0.1))
