"""Files of plans: what one run has decided another follows, without measuring."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from daf_core import ActivationEngine, ConfigError, DAFConfig, distributed
from daf_core.memory.system import available
from daf_core.model.blocks import blocks_of
from daf_core.plan.plan_file import PlanFile
from daf_core.plan.run.step_planner import Batch, StepPlanner
from daf_core.plan.search.planner import Plan
from tests.core.plan import nets

TIGHT: dict[str, Any] = {"precision": "exact", "memory_budget": "2MB", "packing": "device"}


class Planned:
    """A planner with a file, and the steps of its run."""

    def __init__(self, path: Path, name: str = "gpt2", step: int = 0, **options: Any) -> None:
        self.model, self.batch, self.loss = nets.make(name, 8)
        config = DAFConfig(**{**TIGHT, **options, "plan_file": path})
        self.step, self.measured = step, 0
        self.file = PlanFile(str(path), config, self.model, lambda: self.step)
        self.planner = StepPlanner(self.model, ActivationEngine(self.model, config), config, plan_file=self.file)

    def plan(self, batch: nets.Batch | None = None, fails: int = 0) -> Plan:
        """Returns the plan of a batch that runs out of memory so many times."""
        self.planner.begin_batch()
        described = self.described(self.batch if batch is None else batch)
        for _ in range(fails):
            self.planner.prepare(described)
            assert self.planner.tighten("the test says so")
        return self.planner.prepare(described)

    def finish_step(self) -> None:
        self.step += 1
        self.planner.finish_step()

    def described(self, batch: nets.Batch) -> Batch:
        first = next(iter(batch.values()))

        def loss_of(count: int) -> Tensor:
            self.measured += 1
            return self.loss(self.model, {key: value[:count] for key, value in batch.items()})

        return Batch(first.shape[0], first[0].numel(), loss_of)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_one_run_has_planned_another_follows_without_measuring(path: Path) -> None:
    first, batches = Planned(path), (nets.tokens(8, 32), nets.tokens(3, 32), nets.tokens(8, 16))
    plans = [first.plan(batch) for batch in batches]
    assert first.measured
    assert any(plan.recomputed or plan.parts > 1 for plan in plans)
    second = Planned(path)
    assert [second.plan(batch) for batch in batches] == plans
    assert second.measured == 0
    assert ["forward" in vars(each.module) for each in blocks_of(second.model)] == [
        each.recomputes for each in plans[-1].blocks
    ]
    longer = second.plan(nets.tokens(8, 64))
    assert second.measured
    assert longer == Planned(path).plan(nets.tokens(8, 64))
    assert len(lines(path)) == 5


def test_a_plan_changes_in_the_batch_in_which_it_has_changed(path: Path) -> None:
    """Of a step that accumulates: the batch before keeps its plan."""
    first = Planned(path)
    before = [first.plan(), first.plan()]
    first.finish_step()
    before.append(first.plan())
    after = first.plan(fails=2)
    assert after.forecast.peak_bytes < before[0].forecast.peak_bytes
    second = Planned(path)
    assert [second.plan(), second.plan()] == before[:2]
    second.finish_step()
    assert [second.plan(), second.plan(), second.plan()] == [before[2], after, after]
    assert second.measured == 0
    assert Planned(path, step=7).plan() == after


def test_a_plan_that_changes_back_as_there_is_more_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2_000_000

    def memory(_device: Any) -> tuple[int, int]:
        return 1_000_000_000, free + available.LEAST_RESERVE

    monkeypatch.setattr(available, "device_memory", memory)
    first = Planned(path, memory_budget="auto")
    plans = []
    for step in range(14):
        free = 2_000_000 if step < 2 else 500_000_000
        plans.append(first.plan())
        first.finish_step()
    assert plans[0].parts > plans[-1].parts == 1 or plans[0].recomputed
    assert plans[0] != plans[-1]
    free = 1
    second, found = Planned(path, memory_budget="auto"), []
    for _ in range(14):
        found.append(second.plan())
        second.finish_step()
    assert found == plans


def test_a_plan_of_the_file_that_runs_out_of_memory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Planned(path).plan()
    second = Planned(path)
    second.plan()
    second.finish_step()
    after = second.plan(fails=1)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"the plan in {path} does not hold" in warning.message
    assert after.forecast.peak_bytes <= 0.8 * before.forecast.peak_bytes
    second.finish_step()
    assert second.plan() == after
    third = Planned(path)
    found = [third.plan()]
    third.finish_step()
    found.append(third.plan())
    assert found == [before, after]
    assert third.measured == 0


def test_the_last_line_of_a_run_that_was_killed_is_left_out(path: Path) -> None:
    plan = Planned(path).plan()
    whole = path.read_text()
    Planned(path).plan(nets.tokens(8, 16))
    path.write_text(path.read_text()[:-9])
    again = Planned(path)
    assert path.read_text() == whole
    assert again.plan() == plan
    assert again.measured == 0
    again.plan(nets.tokens(8, 16))
    assert len(lines(path)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b\n", "holds no plans of DAF"),
        ("a letter", "holds no plans of DAF"),
        ("[]\n", "holds no plans of DAF"),
        ('{"plan_file": 3, "made_for": {}}\n', "format 3; this version reads 2"),
        ("HEADER\nnonsense\n", "damaged in line 2"),
        ('HEADER\n{"plan": {"step": 0}}\n', "damaged in line 2"),
        ("HEADER\nPLAN\n[]\n", "damaged in line 3"),
        ("HEADER\nPLAN transformer.h.0 transformer.h.9\n", "the model has no transformer.h.9"),
        ("HEADER\nPLAN KEEP SHRINK\n", "KeyError.*SHRINK"),
    ],
)
def test_what_is_no_file_of_plans(text: str, message: str, path: Path) -> None:
    Planned(path, memory_budget="100MB").plan()
    header, plan = path.read_text().splitlines()
    text = text.replace("HEADER", header)
    if "PLAN " in text:
        before, after = text.partition("PLAN ")[2].split()
        text = text.partition("PLAN ")[0] + plan.replace(before, after) + "\n"
    path.write_text(text.replace("PLAN", plan))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"plan_file='{path}' .*{message}.*Delete it, or name another file"):
        Planned(path, memory_budget="100MB")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": 4}, "precision was 'exact' and is 4"),
        ({"memory_budget": "3MB"}, "memory_budget was 2000000 and is 3000000"),
        ({"elastic": {"time": 0.5}}, "elastic was None and is {'time': 0.5, 'memory': None, 'refresh': 50}"),
        ({"spill_dir": "."}, "spill_dir was False and is True"),
        ({"name": "llama"}, "model was 'GPT2LMHeadModel' and is 'LlamaForCausalLM'; parameters was"),
    ],
)
def test_a_file_of_another_training(options: dict[str, Any], message: str, path: Path) -> None:
    Planned(path)
    with pytest.raises(ConfigError, match="was made for another training") as info:
        Planned(path, **options)
    assert message in str(info.value)
    Planned(path, seed=3, audit_every=7, backend="reference")


def test_parameters_that_are_trained_are_a_part_of_it(path: Path) -> None:
    planned = Planned(path)
    next(planned.model.parameters()).requires_grad_(False)
    with pytest.raises(ConfigError, match="parameters was"):
        PlanFile(str(path), DAFConfig(**TIGHT), planned.model)


def test_parameters_that_the_first_batch_makes(path: Path) -> None:
    for _ in range(2):
        PlanFile(str(path), DAFConfig(**TIGHT), nn.LazyLinear(4))


@pytest.mark.parametrize("name", ["missing/plan.json", "."])
def test_a_path_that_takes_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read and written.*Name another file"):
        Planned(tmp_path / name)


def test_each_process_has_its_own_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        Planned(path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["plan.json", "plan.rank1.json"]


def test_the_path_is_kept_as_text(path: Path) -> None:
    config = DAFConfig.from_dict({"plan_file": path, "elastic": {}})
    assert config.plan_file == str(path)
    assert DAFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
