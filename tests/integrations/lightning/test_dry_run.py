"""Audits of a Lightning run: they are logged, leave no trace, and are given up rather than training."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from daf_integrations import DAFStrategy
from tests.integrations.hf_runs import BATCH, daf_records, differing
from tests.integrations.lightning_runs import STEPS, Classifier, fit, left_behind, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*`dataloader_iter`")


class Counting(Classifier):
    """Keeps losses, counts and metrics of its own, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.outputs, self.calls = MulticlassAccuracy(3), list[Tensor](), 0
        self.accuracies: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        output = self.model(**batch)
        self.outputs.append(output.loss.detach())
        self.calls += 1
        self.accuracy(output.logits, batch["labels"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"loss": output.loss}, on_step=True, on_epoch=True)
        self.losses.append(float(output.loss.detach()))
        return {"loss": output.loss}


class TestAudits:
    @pytest.mark.parametrize("precision", ["exact", 8])
    def test_leave_no_trace(self, tmp_path: Path, precision: Any) -> None:
        """In weights, metrics, logs, counters and lists."""
        found = []
        for audit_every in (1, None):
            module, strategy = Counting(), DAFStrategy(precision=precision, audit_every=audit_every)
            trainer = fit(tmp_path, module, strategy=strategy, max_steps=-1, max_epochs=1, limit_train_batches=STEPS)
            metrics = {name: value for name, value in trainer.callback_metrics.items() if not name.startswith("daf/")}
            found.append((weights(module), metrics, module.losses, module.outputs, module.calls))
            assert left_behind(module, trainer) == []
        assert differing(found[0][0], found[1][0]) == []
        assert found[0][1:] == found[1][1:]
        assert found[0][4] == STEPS
        assert found[0][1].keys() >= {"accuracy", "loss_epoch"}

    def test_are_measured_once_a_step(self, tmp_path: Path) -> None:
        trainer = fit(
            tmp_path, Classifier(), strategy=(strategy := DAFStrategy(audit_every=1)), accumulate_grad_batches=2
        )
        assert strategy._daf_session.totals.audits == STEPS - 1, "the first has no pass before it"
        assert 0 < trainer.callback_metrics["daf/gradient_error"] < 1

    def test_take_an_eighth_of_the_rows(self, tmp_path: Path) -> None:
        seen: SimpleQueue[int] = SimpleQueue()  # a list would be put back after the audit
        module = Classifier()
        module.model.register_forward_pre_hook(
            lambda _, args, options: seen.put(len(options["input_ids"])) if module.training else None,
            with_kwargs=True,
        )
        fit(tmp_path, module, strategy=DAFStrategy(audit_every=100), max_steps=2)
        assert [seen.get() for _ in range(seen.qsize())] == [2, BATCH, BATCH]

    def test_keep_a_bound(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        strategy = DAFStrategy(max_gradient_error=0.1, audit_every=2)
        trainer = fit(tmp_path, Classifier(), strategy=strategy)
        assert 0 < trainer.callback_metrics["daf/gradient_error"] <= 0.1
        assert daf_records(caplog) == []

    def test_are_given_up_where_a_batch_cannot_be_cut(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """An iterator of batches would lose one to every audit."""

        class Iterates(Classifier):
            def training_step(self, dataloader_iter: Any) -> Tensor:
                batch, _, _ = next(dataloader_iter)
                loss = self.model(**batch).loss
                self.losses.append(float(loss.detach()))
                return loss

        plain, compressed = Iterates(), Iterates()
        fit(tmp_path, plain)
        fit(tmp_path, compressed, strategy=DAFStrategy(precision=8, audit_every=1))
        [warning] = daf_records(caplog)
        assert "has no tensors in mappings, lists or tuples" in warning.message
        assert compressed.losses == pytest.approx(plain.losses, rel=0.02)

    def test_are_given_up_where_there_is_no_loss(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class WholeBatchesAlone(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step(batch, batch_idx) if len(batch["labels"]) == BATCH else None

        fit(tmp_path, WholeBatchesAlone(), strategy=DAFStrategy(audit_every=1))
        [warning] = daf_records(caplog)
        assert "training_step returned no loss for a part of the batch" in warning.message
