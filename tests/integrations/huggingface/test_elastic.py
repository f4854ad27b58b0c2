"""Elastic training by the Trainer of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from torch import nn
from transformers import Trainer

from daf_core import ConfigError, ElasticError
from daf_core.plan.policies import OFF
from daf_integrations import DAFCallback
from tests.integrations.elastic_runs import (
    BLOCKS,
    ELASTIC,
    STEPS,
    TIME,
    Watched,
    adapters,
    classifier,
    count_time,
    trained,
    whole,
)
from tests.integrations.hf_runs import (
    MakeTrainer,
    checkpointed,
    daf_records,
    left_behind,
    losses,
    raise_at_pass,
    run,
    weights,
)
from tests.integrations.planned import AMPLE, OutOfMemory, Where

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)


def elastic(**options: Any) -> DAFCallback:
    return DAFCallback(**{**ELASTIC, **options})


def logged(trainer: Trainer, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def hooks(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, len(module._forward_hooks)) for name, module in model.named_modules() if module._forward_hooks]


class TestRuns:
    @pytest.mark.parametrize("make", [classifier, adapters, whole])
    def test_keep_the_share(
        self, make: Callable[[], nn.Module], make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Early steps, which measure, are made up for; the figures are in the log and in the table."""
        watched = Watched()
        plain, trainer = (make_trainer(*each, model=make(), max_steps=24) for each in ([], [elastic(), watched]))
        before = trained(trainer.model)
        run(plain)
        run(trainer)
        shares, depths = logged(trainer, "daf/elastic_share"), logged(trainer, "daf/elastic_depth")
        assert len(shares) == len(depths) == 24
        # Of the first step little is known when it is logged; it trains the least there is.
        assert mean([min(shares[1:]), *shares[1:]]) == pytest.approx(TIME, abs=0.03)
        assert min(depths) < BLOCKS == max(depths)
        assert [len(each) == len(before) for each in watched.trained[1:]] == [share == 1 for share in shares[1:]]
        text = capsys.readouterr().out
        assert "60% of a step's time" in text
        assert f"{mean(shares):.2f} (expected)" in text
        assert "units in" in text
        assert trained(trainer.model) == before
        assert vars(trainer).keys() == vars(plain).keys()
        assert left_behind(trainer) == []

    @pytest.mark.parametrize(
        "options",
        [
            {"gradient_accumulation_steps": 2},
            {"max_grad_norm": 1e-3},
            {"warmup_steps": 6},
            {"eval_strategy": "steps", "eval_steps": 5},
            {"weight_decay": 0.1},
        ],
        ids=["accumulation", "clipping", "warm-up", "evaluation", "decay"],
    )
    def test_change_nothing_that_is_off(self, options: dict[str, Any], make_trainer: MakeTrainer) -> None:
        """What a step does not train is the same bit for bit after it; `Watched` looks at accumulated batches."""
        watched = Watched()
        trainer = make_trainer(elastic(), watched, model=classifier(0.1), max_steps=STEPS, **options)
        before = trained(trainer.model)
        run(trainer)
        assert all(map(math.isfinite, losses(trainer)))
        assert all(changed <= on for changed, on in zip(watched.changed, watched.trained, strict=True))
        assert watched.changed[-1] == watched.trained[-1]
        assert {before} < set(watched.trained)
        assert set(watched.evaluated) == ({before} if "eval_steps" in options else set())

    @pytest.mark.parametrize(
        "options",
        [{}, {"max_gradient_error": 0.3}, {"memory_budget": "400KB", "budget_covers": "activations"}],
        ids=["auto", "bound", "budget"],
    )
    def test_are_audited_where_they_train_everything(
        self, options: dict[str, Any], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An audit that is due in a step that trains a part waits; its times are measured without the audit."""
        callback = elastic(**{"precision": "auto", "audit_every": 3, **options})
        trainer = make_trainer(callback, model=adapters(), max_steps=24)
        run(trainer)
        depths = logged(trainer, "daf/elastic_depth")
        audited = [number for number, spent in enumerate(logged(trainer, "daf/audit_ms"), 1) if spent]
        full = [number for number, depth in enumerate(depths, 1) if depth == BLOCKS]
        assert min(depths[4:]) < BLOCKS
        assert set(audited) <= set(full)
        due = (1, 3, *range(6, full[-1] + 1, 3))
        assert audited == sorted({next(number for number in full if number >= step) for step in due})
        # The first one only looks at what will be stored, unless there is a bound to keep.
        assert callback.state()["attributes"]["totals"]["audits"] >= len(audited) - 1
        assert [record.message for record in daf_records(caplog) if "error of the gradient" in record.message] == []


class TestCheckpointing:
    @pytest.mark.parametrize("options", [{}, checkpointed(use_reentrant=False)], ids=["kept", "recomputed"])
    def test_saves_bytes_in_spite_of_inputs_that_require_gradients(
        self, options: dict[str, Any], make_trainer: MakeTrainer
    ) -> None:
        plain, trainer = (
            make_trainer(*each, model=adapters(), max_steps=STEPS, **options) for each in ([], [elastic()])
        )
        for each in (plain, trainer):
            each.model.enable_input_require_grads()
            run(each)
        held = dict(zip(logged(trainer, "daf/elastic_depth"), logged(trainer, "daf/held_mb"), strict=True))
        assert hooks(trainer.model) == hooks(plain.model) != []
        assert held.keys() > {BLOCKS}
        whole = held.pop(BLOCKS)
        assert max(held.values()) < 0.8 * whole

    def test_of_the_reentrant_kind_is_refused(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(elastic(), model=adapters(), **checkpointed(use_reentrant=True))
        before = trained(trainer.model)
        with pytest.raises(ConfigError, match=r'elastic.*reentrant.*"use_reentrant": False'):
            run(trainer)
        assert trained(trainer.model) == before
        assert [each for each in left_behind(trainer) if "wte" not in each] == []  # which transformers hooks itself


class TestErrors:
    @pytest.mark.parametrize("step", [1, 6])
    def test_in_a_step_that_trains_a_part(self, step: int, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(elastic(), model=adapters(), max_steps=STEPS)
        before = trained(trainer.model)
        handle = raise_at_pass(trainer.model.base_model.model.transformer.h[0], step, ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            run(trainer)
        handle.remove()
        assert trained(trainer.model) == before
        assert left_behind(trainer) == []

    def test_where_no_step_holds_so_little(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(elastic(elastic={"memory": 0.01}), model=adapters(), max_steps=STEPS)
        before = trained(trainer.model)
        with pytest.raises(ElasticError, match=r"elastic\.memory=0\.01 cannot be kept.*Allow more"):
            run(trainer)
        assert trained(trainer.model) == before
        assert left_behind(trainer) == []


def test_a_share_of_time_that_cannot_be_kept_ends_no_run(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Times are measured: a run that passes now and fails a minute later helps nobody."""
    trainer = make_trainer(elastic(elastic={"time": 0.01}), model=adapters(), max_steps=STEPS)
    run(trainer)
    [record] = daf_records(caplog)
    assert "elastic.time=0.01 cannot be kept" in record.message
    assert logged(trainer, "daf/elastic_depth")[-1] == 1


@pytest.mark.parametrize("make", [classifier, whole])
@pytest.mark.parametrize("saved", [1, 9])
def test_a_resumed_run_goes_on_alike(make: Callable[[], nn.Module], saved: int, make_trainer: MakeTrainer) -> None:
    """From a step that trained a part: also the first one, after which optimizers know nothing of the rest."""
    options = {"save_strategy": "steps", "save_steps": saved, "max_steps": 2 * STEPS, "save_total_limit": 40}
    first, second = Watched(), Watched()
    uninterrupted = make_trainer(elastic(), first, model=make(), **options)
    run(uninterrupted)
    resumed = make_trainer(elastic(), second, model=make(), **options)
    assert len(first.trained[saved - 1]) < len(trained(resumed.model))
    run(resumed, resume_from_checkpoint=f"{uninterrupted.args.output_dir}/checkpoint-{saved}")
    assert second.trained == first.trained[saved:]
    assert losses(resumed)[saved:] == losses(uninterrupted)[saved:]
    assert logged(resumed, "daf/elastic_share")[saved:] == logged(uninterrupted, "daf/elastic_share")[saved:]


class Plans(Watched):
    """Notes the plan of each step."""

    def __init__(self, callback: DAFCallback) -> None:
        super().__init__()
        self.plans: list[Any] = []
        self._callback = callback

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        runner = self._callback._session.runner
        self.plans.append(None if runner is None else runner.plan)


class TestBudgets:
    def test_of_whole_steps_leave_out_what_builds_no_graph(self, make_trainer: MakeTrainer) -> None:
        callback = elastic(memory_budget=AMPLE)
        plans = Plans(callback)
        trainer = make_trainer(callback, plans, model=adapters(), max_steps=STEPS)
        run(trainer)
        depths = [int(depth) for depth in logged(trainer, "daf/elastic_depth")]
        assert {BLOCKS} < set(depths)
        peaks = {depth: plan.forecast.peak_bytes for depth, plan in zip(depths, plans.plans, strict=True)}
        for depth, plan in zip(depths, plans.plans, strict=True):
            off = BLOCKS - depth
            assert [block is OFF for block in plan.blocks] == [True] * off + [False] * depth
            assert depth == BLOCKS or peaks[depth] < peaks[BLOCKS]

    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_out_of_memory_in_a_part_changes_nothing(self, where: Where, make_trainer: MakeTrainer) -> None:
        callback, watched = elastic(memory_budget=AMPLE), Watched()
        options = {"max_steps": 13, **SGD}
        plain = make_trainer(elastic(), watched, model=adapters(), **options)
        failing = make_trainer(callback, plans := Plans(callback), model=adapters(), **options)
        last = failing.model.base_model.model.transformer.h[-1]
        failure = OutOfMemory(last, where, lambda: failing.state.global_step == 10)
        run(plain)
        run(failing)
        assert failure.raised == 1
        assert len(watched.trained[10]) < len(trained(plain.model))
        assert plans.trained == watched.trained
        assert plans.changed == watched.changed
        before, after = weights(plain), weights(failing)
        assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-6

    def test_of_activations_hold_in_all_steps(self, make_trainer: MakeTrainer) -> None:
        callback = elastic(precision="auto", memory_budget="400KB", budget_covers="activations", audit_every=4)
        trainer = make_trainer(callback, model=adapters(), max_steps=STEPS)
        run(trainer)
        assert min(logged(trainer, "daf/elastic_depth")[4:]) < BLOCKS
        assert max(logged(trainer, "daf/held_mb")) <= 0.41
        assert max(logged(trainer, "daf/raw_mb")) > 1
