"""`DAFTrainer`: a Trainer with DAF inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from daf_core import ConfigError, DAFConfig
from daf_integrations import DAFCallback, DAFTrainer, DAFTrainerMixin
from tests.integrations.hf_runs import QUICK, differing, last_step, left_behind, lora, losses, rows_for, run, weights
from tests.integrations.planned import AMPLE


def trainer_of(kind: type[Trainer], folder: Path, **options: Any) -> Any:
    arguments = TrainingArguments(output_dir=str(folder), **QUICK)
    return kind(lora(), arguments, train_dataset=rows_for(lora()), **options)


def callback_of(trainer: Trainer) -> DAFCallback:
    [found] = [each for each in trainer.callback_handler.callbacks if isinstance(each, DAFCallback)]
    return found


@pytest.mark.parametrize("config", [{"precision": 4}, DAFConfig(precision=4)])
def test_trains_with_what_it_is_given(config: Any, tmp_path: Path) -> None:
    trainer = trainer_of(DAFTrainer, tmp_path, daf=config)
    run(trainer)
    assert callback_of(trainer).config == DAFConfig(precision=4)
    assert last_step(callback_of(trainer)).ratio > 3
    assert left_behind(trainer) == []


def test_changes_nothing_else(tmp_path: Path) -> None:
    plain, exact = trainer_of(Trainer, tmp_path), trainer_of(DAFTrainer, tmp_path, daf={"precision": "exact"})
    run(plain)
    run(exact)
    assert losses(exact) == losses(plain)
    assert differing(weights(exact), weights(plain)) == []
    assert "DAFCallback" in exact.state.stateful_callbacks


def test_takes_a_callback_that_is_there(tmp_path: Path) -> None:
    given = DAFCallback(precision=2)
    assert callback_of(trainer_of(DAFTrainer, tmp_path, callbacks=[given])) is given
    with pytest.raises(ConfigError, match="both daf and a DAFCallback"):
        trainer_of(DAFTrainer, tmp_path, callbacks=[DAFCallback], daf={"precision": 4})


def test_says_what_is_wrong_with_its_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'precision'"):
        trainer_of(DAFTrainer, tmp_path, daf={"precisoin": 4})


def test_goes_before_other_trainers(tmp_path: Path) -> None:
    class Own(Trainer):
        pass

    class Mixed(DAFTrainerMixin, Own):
        pass

    trainer = trainer_of(Mixed, tmp_path, daf={"precision": "exact", "memory_budget": AMPLE})
    run(trainer)
    assert last_step(callback_of(trainer)).raw_bytes > 0


def test_a_trainer_that_is_there_already_takes_a_callback(tmp_path: Path) -> None:
    trainer = trainer_of(Trainer, tmp_path)
    run(trainer)
    trainer.add_callback(DAFCallback(precision=4))
    run(trainer)
    assert last_step(callback_of(trainer)).ratio > 3
    assert "daf/ratio" in trainer.state.log_history[-2]
    trainer.remove_callback(DAFCallback)
    run(trainer)
    assert "daf/ratio" not in trainer.state.log_history[-2]
