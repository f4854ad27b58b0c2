"""Runs with one `plan_file` give the same weights, bit by bit: on clocks that disagree, and where one is resumed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import daf_integrations as daf
from daf_core import ConfigError, DAFConfig, timing
from daf_core.plan.plan_file import PlanFile
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations import lightning_runs
from tests.integrations.elastic_runs import CountingClock, classifier
from tests.integrations.hf_runs import MakeTrainer, lora, run, weights
from tests.integrations.lightning_runs import Classifier, fit
from tests.integrations.loop_runs import adam, batches, weights_of

BUDGET: dict[str, Any] = {"memory_budget": "1MB"}
ELASTIC: dict[str, Any] = {"elastic": {"time": 0.7, "refresh": 4}}
STEPS, SAVED = 9, 6

Weights = dict[str, Tensor]


class Machine:
    """Trains on a machine whose backward passes take so long."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, accumulation: int = 1, make: Callable[[float], nn.Module] = classifier
    ) -> None:
        self._monkeypatch, self._accumulation, self._make = monkeypatch, accumulation, make

    def clock(self, backward: float) -> None:
        self._monkeypatch.setattr(timing, "synchronized_time", CountingClock(backward))

    def run(self, backward: float, **options: Any) -> Weights:
        """Trains without interruption."""
        self.clock(backward)
        model = daf.prepare(self._make(0.1), **options)
        self._train(model, adam(model), 0, STEPS)
        return weights_of(model)

    def resumed(self, backward: float, then: float, **options: Any) -> Weights:
        """Trains, and goes on from a checkpoint with another clock."""
        self.clock(backward)
        before = daf.prepare(self._make(0.1), **options)
        optimizer = adam(before)
        self._train(before, optimizer, 0, SAVED)
        saved = copy.deepcopy([before.state_dict(), optimizer.state_dict()])
        learned = json.dumps(daf.state_dict(before), sort_keys=True)
        self._train(before, optimizer, SAVED, SAVED + 2)  # killed there
        self.clock(then)
        model = self._make(0.1)
        model.load_state_dict(saved[0])
        daf.prepare(model, **options)
        daf.load_state_dict(model, json.loads(learned))
        optimizer = adam(model)
        optimizer.load_state_dict(saved[1])
        self._train(model, optimizer, SAVED, STEPS)
        return weights_of(model)

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, start: int, end: int) -> None:
        model.train()
        first, last = start * self._accumulation, end * self._accumulation
        for number, batch in list(enumerate(batches(model, last)))[first:]:
            torch.manual_seed(number)
            daf.step(model, batch)
            if (number + 1) % self._accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [
        (1, {"memory_budget": "700KB", "precision": 4, "rounding": "stochastic"}),
        (2, {**ELASTIC, "precision": "exact"}),
        (2, {**BUDGET, **ELASTIC, "audit_every": 3}),
    ],
    ids=["budget", "elastic", "both"],
)
def test_the_clock_decides_without_a_file_alone(
    accumulation: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine, path = Machine(monkeypatch, accumulation), str(tmp_path / "plan.json")
    first = machine.run(4.0, **options, plan_file=path)
    assert same(machine.run(4.0, **options), first), "the file changes nothing in the run that makes it"
    assert not same(machine.run(0.01, **options), first)
    written = Path(path).read_text()
    assert same(machine.run(0.01, **options, plan_file=path), first)
    assert same(machine.resumed(0.01, 0.2, **options, plan_file=path), first)
    assert Path(path).read_text() == written


@pytest.mark.parametrize(
    "options",
    [{"precision": 4, "rounding": "stochastic"}, {"audit_every": 2}, {"audit_every": 2, **ELASTIC}],
    ids=["stochastic", "audited", "elastic"],
)
def test_what_is_compressed_goes_on_as_it_was(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, make=lora)
    options = {**options, "memory_budget": "450KB", "plan_file": str(tmp_path / "plan.json")}
    first = machine.run(4.0, **options)
    assert '"COMPRESS"' in Path(options["plan_file"]).read_text()
    assert same(machine.resumed(0.01, 0.2, **options), first)


@pytest.mark.parametrize("options", [BUDGET, {**BUDGET, **ELASTIC}], ids=["budget", "both"])
def test_a_resumed_run_adds_what_it_does(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine, path = Machine(monkeypatch), str(tmp_path / "plan.json")
    first = machine.resumed(4.0, 0.01, **options, plan_file=path)
    assert same(machine.run(0.2, **options, plan_file=path), first)


@pytest.mark.parametrize("options", [{**BUDGET, **ELASTIC}], ids=["both"])
def test_a_trainer_that_is_resumed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    options = {**options, "plan_file": str(tmp_path / "plan.json")}
    training = {"max_steps": STEPS, "save_steps": SAVED, "save_strategy": "steps"}
    machine, trainers = Machine(monkeypatch), []
    for backward, resume in ((4.0, None), (0.01, None), (0.2, SAVED)):
        machine.clock(backward)
        trainer = make_trainer(DAFCallback(**options), model=classifier(0.1), **training)
        folder = None if resume is None else f"{trainers[0].args.output_dir}/checkpoint-{resume}"
        run(trainer, **({} if folder is None else {"resume_from_checkpoint": folder}))
        trainers.append(trainer)
    first, second, resumed = map(weights, trainers)
    assert same(first, second)
    assert same(first, resumed)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:Be aware that when using `ckpt_path`",  # the run that goes on saves nothing
)
def test_a_trainer_of_lightning_that_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {**BUDGET, **ELASTIC, "plan_file": str(tmp_path / "plan.json")}
    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")], "enable_checkpointing": True}
    machine, found = Machine(monkeypatch), []
    for backward, more, path in ((4.0, saving, None), (0.01, {}, None), (0.2, {}, tmp_path / f"step={SAVED}.ckpt")):
        machine.clock(backward)
        module = Classifier(classifier(0.1))
        training = {"max_steps": STEPS, "limit_train_batches": SAVED, "strategy": DAFStrategy(**options), **more}
        fit(tmp_path, module, ckpt_path=path, **training)
        found.append(lightning_runs.weights(module))
    first, second, resumed = found
    assert same(first, second)
    assert same(first, resumed)


def test_a_file_of_another_model_is_refused_before_training(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    PlanFile(path, DAFConfig.from_dict(BUDGET), classifier())
    other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    hooks = [len(module._forward_hooks) for module in other.modules()]
    with pytest.raises(ConfigError, match="made for another training"):
        daf.prepare(other, **BUDGET, plan_file=path)
    assert [len(module._forward_hooks) for module in other.modules()] == hooks
