"""DAF's figures arrive in TensorBoard, beside those of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.hf_runs import STEPS as HF_STEPS
from tests.integrations.hf_runs import MakeTrainer
from tests.integrations.lightning_runs import METRICS, STEPS, Classifier, fit

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def scalars(folder: Path) -> dict[str, list[float]]:
    """Reads the scalars of the only run in a folder."""
    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_of_the_hugging_face_trainer(
    tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make_trainer(DAFCallback(precision=4), report_to="tensorboard").train()
    found = scalars(tmp_path / "board")
    assert {f"train/{name}" for name in METRICS} <= found.keys()
    assert len(found["train/daf/ratio"]) == HF_STEPS
    assert min(found["train/daf/ratio"]) > 2


def test_of_lightning(tmp_path: Path) -> None:
    fit(tmp_path, Classifier(), strategy=DAFStrategy(precision=4), logger=TensorBoardLogger(tmp_path / "board"))
    found = scalars(tmp_path / "board")
    assert found.keys() >= METRICS
    assert len(found["daf/ratio"]) == STEPS
    assert min(found["daf/ratio"]) > 2
