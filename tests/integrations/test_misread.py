"""Trainers whose steps can be run again go on where an operator reads what was stored for another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daf_integrations as daf
from daf_core import ReaderError
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.hf_parts import made, padded_rows, padded_trainer, tagger
from tests.integrations.hf_runs import daf_records, left_behind, run
from tests.integrations.lightning_parts_runs import BATCH, Texts, fit
from tests.integrations.loop_runs import collate
from tests.integrations.planned import OtherReader, in_parts

STEPS = 3
OPTIONS: dict[str, Any] = {"precision": 4, "memory_budget": "4500KB", "audit_every": None}
"""A budget that does without checkpoints, and not without codes."""

Losses = list[float]


@pytest.fixture(autouse=True)
def one_piece() -> Iterator[None]:
    with in_parts(1):
        yield


def _huggingface(folder: Path, compressed: bool) -> tuple[Losses, nn.Module]:
    model = made(tagger)
    trainer = padded_trainer(folder, model)
    reader = OtherReader(model.get_input_embeddings(), lambda: trainer.state.global_step >= 1)
    if compressed:
        trainer.add_callback(DAFCallback(**OPTIONS))
    run(trainer)
    reader.remove()
    assert left_behind(trainer) == []
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


def _lightning(folder: Path, compressed: bool) -> tuple[Losses, nn.Module]:
    module = Texts(made(tagger))
    OtherReader(module.model.get_input_embeddings(), lambda: module.global_step >= 1)
    fit(folder, module, max_steps=STEPS, **({"strategy": DAFStrategy(**OPTIONS)} if compressed else {}))
    return module.outputs, module.model


def _loop(_folder: Path, compressed: bool) -> tuple[Losses, nn.Module]:
    model, losses = made(tagger), Losses()
    OtherReader(model.get_input_embeddings(), lambda: len(losses) >= 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compressed:
        daf.prepare(model, **OPTIONS)
    rows = padded_rows(model, STEPS * BATCH)
    for step in range(STEPS):
        loss = daf.step(model, collate(rows[step * BATCH : (step + 1) * BATCH]))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if compressed:
        assert daf.state_dict(model)["totals"]["steps"] == STEPS
    return losses, model


@pytest.mark.parametrize("train", [_huggingface, _lightning, _loop])
def test_the_step_is_run_again(
    train: Callable[[Path, bool], tuple[Losses, nn.Module]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the first attempt is left: batches count once, and gradients are those of the step."""
    expected, plain = train(tmp_path, False)
    found, trained = train(tmp_path, True)
    [warning] = [record for record in daf_records(caplog) if record.levelno == logging.WARNING]
    assert "ErfBackward0 asks for" in warning.message
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=0.01)
    for one, other in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.01)


def test_a_step_of_a_trainer_s_own_raises(tmp_path: Path) -> None:
    """Where no budget covers steps, the trainer runs them, and no state from before is kept."""
    trainer = padded_trainer(tmp_path, made(tagger))
    reader = OtherReader(trainer.model.get_input_embeddings(), lambda: trainer.state.global_step >= 1)
    trainer.add_callback(DAFCallback(precision=4, audit_every=None))
    with pytest.raises(ReaderError, match="run the step again"):
        run(trainer)
    reader.remove()
    assert left_behind(trainer) == []
