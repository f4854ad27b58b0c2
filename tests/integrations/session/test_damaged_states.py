"""Saved states that are damaged: an error when they are loaded, with all as it was, or training that goes on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import daf_integrations as daf
from daf_core import ElasticError, StateError
from daf_integrations import DAFCallback, DAFStrategy
from daf_integrations.accelerate.plugin import _announce
from daf_integrations.loop import training
from tests.integrations.elastic_runs import ELASTIC, adapters, count_time
from tests.integrations.hf_runs import MakeTrainer, left_behind, lora, run
from tests.integrations.lightning_runs import Classifier, fit
from tests.integrations.loop_runs import adam, batches

JUNK: list[Any] = [None, "", "3", -1, 1.5, math.nan, math.inf, 1e308, 10**400, True, [], {}, [None], [[]], {"a": 1}]
WALKS = 150


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times follow from what is run, and no model of another test is known."""
    count_time(monkeypatch)
    yield
    training._trainings.clear()
    training._exit_summaries.clear()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    model.train()
    for batch in batches(model, count):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(model: nn.Module) -> Any:
    return json.loads(json.dumps(daf.state_dict(model)))


def damaged(state: Any, random: Random) -> Any:
    """Returns a copy in which a value, however deep it lies, is another or missing."""
    node = whole = copy.deepcopy(state)
    while True:
        key = random.choice([*node] if isinstance(node, dict) else range(len(node)))
        if not (isinstance(node[key], dict | list) and node[key]) or random.random() < 0.2:
            break
        node = node[key]
    if random.random() < 0.2:
        del node[key]
    else:
        node[key] = random.choice(JUNK)
    return whole


def test_any_damage_is_refused_or_harmless() -> None:
    """Of budgets, audits, precisions and of what elastic training has measured."""
    model = daf.prepare(adapters(), **{**ELASTIC, "precision": "auto", "audit_every": 2})
    optimizer, random, refused = adam(model), Random(0), 0
    steps(model, optimizer, 9)
    good = saved(model)
    assert good["elastic_state"]["course"]["selection"]
    assert good["engine_state"]["policy"]["errors"]
    for _ in range(WALKS):
        wrong = damaged(good, random)
        try:
            daf.load_state_dict(model, wrong)
        except (StateError, ElasticError):
            refused += 1
            assert saved(model) == good
        else:
            steps(model, optimizer, 1)
            daf.load_state_dict(model, good)
    assert refused > WALKS / 2


WRONG: list[dict[str, Any]] = [
    *({"totals": totals} for totals in ([], None, {"steps": "3"}, {"steps": True}, {"steps": -1}, {"step": 3})),
    *({"totals": {name: math.nan}} for name in ("pack_seconds", "gradient_error", "raw_bytes")),
    *({"engine_state": state} for state in ([], 4, {}, "x")),
    *({"elastic_state": state} for state in ([], 4, "x")),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
class TestIsFound:
    def test_by_prepared_models(self, wrong: dict[str, Any]) -> None:
        model = daf.prepare(lora(), precision=4)
        steps(model, adam(model), 1)
        good = daf.state_dict(model)
        with pytest.raises(StateError, match=r"no saved (state|totals)"):
            daf.load_state_dict(model, {**good, **wrong})
        assert daf.state_dict(model) == good

    def test_by_the_callback_before_a_step(self, wrong: dict[str, Any], make_trainer: MakeTrainer) -> None:
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        whole = make_trainer(DAFCallback(precision=4), **options)
        run(whole)
        folder = Path(whole.args.output_dir) / "checkpoint-1"
        state = json.loads((folder / "trainer_state.json").read_text())
        state["stateful_callbacks"]["DAFCallback"]["attributes"].update(wrong)
        (folder / "trainer_state.json").write_text(json.dumps(state))
        trainer = make_trainer(DAFCallback(precision=4), **options)
        with pytest.raises(StateError, match=r"no saved (state|totals)"):
            run(trainer, resume_from_checkpoint=str(folder))
        assert trainer.state.global_step == 1
        assert left_behind(trainer) == []

    def test_by_lightning_before_anything_is_loaded(self, wrong: dict[str, Any], tmp_path: Path) -> None:
        trainer = fit(tmp_path, Classifier(), strategy=DAFStrategy(precision=4), max_steps=1)
        trainer.save_checkpoint(tmp_path / "good.ckpt")
        checkpoint = torch.load(tmp_path / "good.ckpt", weights_only=True)
        torch.save({**checkpoint, "daf": {**checkpoint["daf"], **wrong}}, tmp_path / "wrong.ckpt")
        other = Classifier()
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateError, match=r"no saved (state|totals)"):
            fit(tmp_path, other, strategy=DAFStrategy(precision=4), max_steps=2, ckpt_path=tmp_path / "wrong.ckpt")
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "4", "[4]", '[{"totals": []}]', "[" * 100_000], ids=lambda text: text[:9]
)
def test_a_damaged_file_of_accelerate_is_found(text: str, tmp_path: Path) -> None:
    """It is named where it is no list of states."""
    model = daf.prepare(lora(), precision=4)
    accelerator = Accelerator(cpu=True)
    _announce(accelerator, training.training_of(model))
    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    (tmp_path / "daf_states_0.json").write_text(text)
    with pytest.raises(StateError, match=r"no saved (state|totals)"):
        accelerator.load_state(str(tmp_path))
    assert daf.state_dict(prepared)["totals"]["steps"] == 0
    AcceleratorState._reset_state(True)
