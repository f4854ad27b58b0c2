"""Lightning runs whose steps keep a memory budget."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Accuracy

from daf_core import ConfigError, MicroBatchError, ProfileError
from daf_integrations import DAFStrategy
from tests.integrations.hf_parts import classifier, made, masked
from tests.integrations.hf_runs import daf_records, differing, roberta
from tests.integrations.lightning_parts_runs import Texts, fit, largest
from tests.integrations.lightning_runs import Classifier, left_behind, weights
from tests.integrations.lightning_runs import fit as fit_classifier
from tests.integrations.planned import AMPLE, OutOfMemory, Where, in_parts


def exact() -> Any:
    return DAFStrategy(precision="exact", memory_budget=AMPLE)


class Measured(Texts):
    """Counts rows, and has a metric that adds up over batches."""

    def __init__(self) -> None:
        super().__init__(made(classifier))
        self.accuracy = Accuracy("multiclass", num_classes=3)
        self.rows = 0
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.rows += len(batch["labels"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", output.loss, on_step=True, on_epoch=True)
        self.seen.append(len(batch["labels"]))
        return output.loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))


def numbers(trainer: Any) -> dict[str, float]:
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value for name, value in found.items() if not name.startswith("daf/")}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_run_again(
    where: Where, accumulation: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, logs, metrics and what the module counts are those of a run that had enough."""
    plain, failing = Measured(), Measured()
    options = {"accumulate_grad_batches": accumulation, "max_steps": 3}
    expected = fit(tmp_path, plain, **options)
    failure = OutOfMemory(failing.model.get_input_embeddings(), where, lambda: failing.global_step == 1)
    found = fit(tmp_path, failing, strategy=exact(), **options)
    assert failure.raised == 1
    [warning] = [record for record in daf_records(caplog) if record.levelno == logging.WARNING]
    assert "out of memory" in warning.message
    assert found.global_step == expected.global_step == 3
    assert failing.rows == plain.rows
    assert sum(failing.seen) == plain.rows
    assert failing.outputs == pytest.approx(plain.outputs, rel=1e-5)
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-5)
    assert largest(weights(failing), weights(plain)) < 1e-6
    assert failing.after == pytest.approx(plain.after, rel=1e-4)
    assert left_behind(failing, found) == []


def test_one_piece_is_bit_identical(tmp_path: Path) -> None:
    """With dropout; and logs are those of the module, with the options that it gave."""
    plain, budgeted = Classifier(roberta()), Classifier(roberta())
    expected = fit_classifier(tmp_path, plain)
    with in_parts(1):
        found = fit_classifier(tmp_path, budgeted, strategy=exact())
    assert budgeted.losses == plain.losses
    assert numbers(found) == numbers(expected)
    assert differing(weights(budgeted), weights(plain)) == []


class Skipping(Texts):
    """Has no loss for every second batch, as is allowed."""

    def __init__(self) -> None:
        super().__init__(made(masked))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_batches_may_be_skipped_where_they_are_in_one_piece(tmp_path: Path) -> None:
    plain, budgeted = Skipping(), Skipping()
    fit(tmp_path, plain)
    with in_parts(1):
        fit(tmp_path, budgeted, strategy=exact())
    assert differing(weights(budgeted), weights(plain)) == []
    with in_parts(2), pytest.raises(MicroBatchError, match="returned no loss for a part"):
        fit(tmp_path, Skipping(), strategy=exact())


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_a_budget_that_needs_parts_names_what_skipped_batches_can_do(tmp_path: Path) -> None:
    """Whose loss is looked at before any part of one runs."""

    class SkippingFirst(Skipping):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx + 1)

    strategy = DAFStrategy(precision="exact", memory_budget="100KB", audit_every=None)
    with pytest.raises(ProfileError, match=r"returned no loss .*where batches are skipped, pass budget_covers"):
        fit(tmp_path, SkippingFirst(), strategy=strategy)


def test_a_compiled_network_is_refused(tmp_path: Path) -> None:
    """What its graphs take cannot be measured."""
    module = Texts(made(masked))
    module.model = torch.compile(module.model, backend="eager")
    with pytest.raises(ConfigError, match=r'is compiled.*budget_covers="activations"'):
        fit(tmp_path, module, strategy=exact())


def test_losses_are_measured_as_they_are_stored(tmp_path: Path) -> None:
    """Audits run beside steps in parts."""
    module = Texts(made(masked))
    with in_parts(2):
        trainer = fit(tmp_path, module, strategy=DAFStrategy(precision=8, memory_budget=AMPLE, audit_every=1))
    assert "daf/audit_ms" in trainer.callback_metrics


class Spread(nn.Module):
    """Around a module, as sharding wrappers are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_spread_parameters_are_refused(tmp_path: Path) -> None:
    """Each process has only a share of each."""

    class Sharded(type(exact())):
        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.model = Spread(self.model)

    with pytest.raises(ConfigError, match=r"Sharded spreads each parameter.*budget_covers"):
        fit(tmp_path, Texts(made(masked)), strategy=Sharded(precision="exact", memory_budget=AMPLE))
