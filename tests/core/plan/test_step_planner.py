"""A plan for each step: as batches grow, as memory comes and goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.errors import PlanError
from daf_core.memory.system import available
from daf_core.model.blocks import blocks_of
from daf_core.plan.observe.meter import TensorMeter
from daf_core.plan.policies import KEEP, RECOMPUTE, RECOMPUTE_COMPRESSED
from daf_core.plan.run import step_planner
from daf_core.plan.run.step_planner import MEASURED, Batch, StepPlanner
from daf_core.plan.search.planner import Plan
from tests.core.harness import assert_same
from tests.core.plan import nets

MB = 1_000_000


class Training:
    """A planner, and steps that follow its plans."""

    def __init__(self, name: str = "gpt2", rows: int = 8, **options: Any) -> None:
        self.model, self.batch, self.loss = nets.make(name, rows)
        self.config = DAFConfig(**{"memory_budget": 1000 * MB, "packing": "device", **options})
        self.engine = ActivationEngine(self.model, self.config)
        self.planner = StepPlanner(self.model, self.engine, self.config)
        self.rows: list[int] = []
        self.spilled_bytes = 0

    def described(self, batch: nets.Batch | None = None) -> Batch:
        batch = self.batch if batch is None else batch
        first = next(iter(batch.values()))

        def loss_of(count: int) -> Tensor:
            self.rows.append(count)
            return self.loss(self.model, {key: value[:count] for key, value in batch.items()})

        return Batch(first.shape[0], first[0].numel(), loss_of)

    def prepare(self, batch: nets.Batch | None = None) -> Plan:
        return self.planner.prepare(self.described(batch))

    def peak(self, plan: Plan) -> int:
        """Returns the bytes that a step takes at most."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rows = next(iter(self.batch.values())).shape[0]
        with TensorMeter(lambda: self.engine.resident_bytes) as meter:
            for part in range(plan.parts):
                bounds = slice(rows * part // plan.parts, rows * (part + 1) // plan.parts)
                with self.engine.compress():
                    loss = self.loss(self.model, {key: value[bounds] for key, value in self.batch.items()})
                loss.backward()
                del loss
            peak = meter.take_peak()
        self.spilled_bytes = self.engine.finish_step().spilled_bytes
        self.model.zero_grad()
        return peak


def test_lengths_and_rows_have_plans_of_their_own() -> None:
    training = Training()
    first = training.prepare()
    seen = len(training.rows)
    assert training.prepare() is first
    shorter = training.prepare(nets.tokens(8, 16))
    last = training.prepare(nets.tokens(3, 32))
    assert training.prepare() is first
    assert len({id(plan) for plan in (first, shorter, last)}) == 3
    assert len(training.rows) == seen
    longer = training.prepare(nets.tokens(8, 64))
    assert len(training.rows) > seen
    assert longer.forecast.peak_bytes > first.forecast.peak_bytes > shorter.forecast.peak_bytes
    assert first.forecast.peak_bytes > last.forecast.peak_bytes


def test_steps_that_train_other_parameters_are_measured_of_their_own() -> None:
    """As where layers are unfrozen while training runs: what was measured without their graphs says too little."""
    training = Training(precision=4)
    parameters = [each for each in training.model.parameters() if each.requires_grad]
    for parameter in parameters[: len(parameters) * 3 // 4]:
        parameter.requires_grad_(False)
    few = training.prepare()
    assert training.peak(few) <= few.forecast.peak_bytes
    for parameter in parameters:
        parameter.requires_grad_(True)
    every = training.prepare()
    assert few.forecast.peak_bytes < training.peak(every) <= every.forecast.peak_bytes
    seen = len(training.rows)
    for parameter in parameters[: len(parameters) * 3 // 4]:
        parameter.requires_grad_(False)
    assert training.prepare().forecast == few.forecast
    for parameter in parameters:
        parameter.requires_grad_(True)
    assert training.prepare().forecast == every.forecast
    assert len(training.rows) == seen


class Elastic:
    """Holds parameters off that the user trains."""

    without_graph: Collection[str] = ()

    def __init__(self) -> None:
        self.held_off: list[nn.Parameter] = []

    def everything(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_what_elastic_training_holds_off_is_trained_by_the_user() -> None:
    """It is another set in many a step, and none of them is measured of its own."""
    training, elastic = Training(), Elastic()
    training.planner = StepPlanner(training.model, training.engine, training.config, elastic=elastic)
    first, seen = training.prepare(), len(training.rows)
    elastic.held_off = [each for each in training.model.parameters() if each.requires_grad][:3]
    for parameter in elastic.held_off:
        parameter.requires_grad_(False)
    assert training.prepare() is first
    assert len(training.rows) == seen


def test_many_choices_of_parameters_are_measured_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where layers are chosen at random, or one after the other: a plan for all of them has room for each."""
    training, measured = Training(precision=4), list[int]()
    measure = step_planner.measure
    monkeypatch.setattr(step_planner, "measure", lambda *args: measured.append(1) or measure(*args))
    parameters = [each for each in training.model.parameters() if each.requires_grad]
    for number in range(2 * MEASURED + 4):
        for place, parameter in enumerate(parameters):
            parameter.requires_grad_(place % (MEASURED + 2) == number % (MEASURED + 2))
        plan = training.prepare()
    assert len(measured) <= MEASURED + 2
    assert training.peak(plan) <= plan.forecast.peak_bytes
    assert [each.requires_grad for each in parameters].count(True) == len(
        parameters[number % (MEASURED + 2) :: MEASURED + 2]
    )


def test_what_was_measured_keeps_no_batch() -> None:
    training = Training()
    batch = nets.tokens(8, 32)
    kept = weakref.ref(next(iter(batch.values())))
    training.prepare(batch)
    del batch
    training.prepare()
    assert kept() is None


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_longer_batches_are_measured_without_the_recomputation_of_the_plan(name: str) -> None:
    training = Training(name, precision="exact")
    expected = [set(vars(block.module)) for block in blocks_of(training.model)]
    training.prepare()
    training.planner.applied.follow(dict.fromkeys(blocks_of(training.model)[:2], RECOMPUTE))
    measured = training.planner._measured
    training.planner._measured = None
    training.planner._measured_for(training.described())
    assert [set(vars(block.module)) for block in blocks_of(training.model)] == expected
    again = training.planner._measured
    assert measured is not None
    assert again is not None
    one, other = (each.profile.at(8, None)[KEEP].held for each in (measured, again))
    assert (abs(one - other) <= 0.01 * one).all()


@pytest.mark.parametrize("whole", [None, "a reason"])
def test_less_memory_makes_other_plans_until_there_is_none(whole: str | None) -> None:
    training = Training()
    described = training.described()
    plans = [training.planner.prepare(described, whole)]
    while training.planner.tighten("the test says so"):
        plans.append(training.planner.prepare(described, whole))
        assert plans[-1].forecast.peak_bytes <= 0.8 * plans[-2].forecast.peak_bytes
    assert len(plans) >= 3
    assert training.planner.prepare(described, whole).forecast == plans[-1].forecast
    assert training.peak(plans[-1]) <= 1.1 * plans[-1].forecast.peak_bytes
    assert whole is None or {plan.parts for plan in plans} == {1}


def test_budget_that_no_plan_keeps() -> None:
    training = Training(memory_budget=20_000)
    with pytest.raises(
        PlanError, match=r"fewer bits, recomputation of 2 blocks, no micro-batches \(a reason\)"
    ) as info:
        training.planner.prepare(training.described(), "a reason")
    enough = Training(memory_budget=info.value.least)
    assert enough.planner.prepare(enough.described(), "a reason").parts == 1


def test_closing_makes_the_model_the_one_it_was() -> None:
    training = Training(precision="exact")
    before = [set(vars(module)) for module in training.model.modules()]
    plain = nets.gradients_of(training.model, lambda: training.loss(training.model, training.batch), nullcontext)
    described = training.described()
    training.planner.prepare(described, "a reason")
    while training.planner.tighten("the test says so"):
        training.planner.prepare(described, "a reason")
    assert training.planner.plan is not None
    assert training.planner.plan.recomputed
    training.planner.close()
    assert [set(vars(module)) for module in training.model.modules()] == before
    found = nets.gradients_of(
        training.model, lambda: training.loss(training.model, training.batch), training.engine.compress
    )
    assert_same(found, plain)


class Machine:
    """A machine with so much memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        monkeypatch.setattr(available, "device_memory", lambda device: (1000 * MB, self.free + available.LEAST_RESERVE))


def test_plans_follow_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MB)
    training = Training(memory_budget="auto")
    first = training.prepare()
    training.planner.finish_step()
    machine.free = int(first.forecast.peak_bytes * 0.5)
    second = training.prepare()
    assert second.forecast.peak_bytes < machine.free
    assert training.peak(second) <= machine.free
    machine.free = 100 * MB
    for _ in range(available.PATIENCE):
        assert training.prepare() is second
        training.planner.finish_step()
    assert training.prepare().forecast == first.forecast
    machine.free = -training.engine.resident_bytes
    with pytest.raises(PlanError):
        training.prepare()


def test_memory_that_falls_while_batches_are_short_counts_for_the_next_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 100 * MB)
    training = Training(memory_budget="auto")
    long, short = training.prepare(), training.prepare(nets.tokens(2, 16))
    machine.free = (long.forecast.peak_bytes + short.forecast.peak_bytes) // 2
    assert training.prepare(nets.tokens(2, 16)) is short
    assert training.prepare().forecast.peak_bytes <= machine.free


def test_memory_that_ran_out_for_a_short_batch_is_tried_again_for_a_long_one() -> None:
    training = Training()
    long = training.prepare()
    training.prepare(nets.tokens(2, 16))
    assert training.planner.tighten("the test says so")
    training.prepare(nets.tokens(2, 16))
    assert training.planner.prepare(training.described(), "a reason").forecast == long.forecast


def test_gradients_that_are_yet_to_come_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, training = Machine(monkeypatch, 100 * MB), Training(memory_budget="auto")
    peak = training.prepare().forecast.peak_bytes
    weights = sum(parameter.nbytes for parameter in training.model.parameters())
    machine.free = peak + weights // 2
    assert training.prepare().forecast.peak_bytes < peak


def test_budget_larger_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Training().prepare()
    Machine(monkeypatch, int(roomy.forecast.peak_bytes * 0.6))
    training = Training()
    assert training.prepare().forecast.peak_bytes <= 0.6 * roomy.forecast.peak_bytes


def test_measuring_disturbs_nothing() -> None:
    training = Training(memory_budget=2 * MB)
    training.model.transformer.wte.weight.grad = kept = torch.ones_like(training.model.transformer.wte.weight)
    buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    numbers = torch.get_rng_state()
    training.prepare()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert training.model.transformer.wte.weight.grad is kept
    assert kept.eq(1).all()
    assert [p.grad is None for p in training.model.parameters()].count(False) == 1
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in training.model.named_buffers())
    statistics = training.engine.finish_step()
    assert (statistics.raw_bytes, statistics.held_bytes, statistics.stored_as) == (0, 0, {})


def _fail(number: int) -> Callable[..., None]:
    seen = 0

    def hook(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise KeyError("odd")

    return hook


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_error_while_measuring_leaves_nothing(place: str) -> None:
    training = Training()
    inner = training.model.transformer.h[1].mlp
    before = [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in training.model.modules()]
    hook = _fail(2)
    handle = inner.register_forward_pre_hook(hook) if place == "forward" else inner.c_fc.weight.register_hook(hook)
    with pytest.raises(KeyError):
        training.prepare()
    handle.remove()
    after = [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in training.model.modules()]
    assert after == before
    assert all(p.grad is None for p in training.model.parameters())
    training.prepare()


@pytest.mark.parametrize("precision", ["exact", 4])
def test_experts_that_get_no_rows(precision: Any) -> None:
    """They run in some passes and not in others; the layers that they are in are the blocks then.

    These are recomputed only from exact inputs: from others rows might go to other experts.
    """
    training = Training("mixture", rows=64, precision=precision)
    plans = [training.prepare()]
    while training.planner.tighten("the test says so"):
        plans.append(training.prepare())
    policies = {policy for plan in plans for policy in plan.blocks}
    assert {len(plan.blocks) for plan in plans} == {2}
    assert RECOMPUTE_COMPRESSED not in policies


class Frozen(nn.Module):
    """Blocks of which the lower ones are frozen, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nets.FeedForward(64) for _ in range(5)])
        self.layers[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers[:4], self.layers[3]]:
            x = layer(x)
        return x


def test_frozen_and_unused_blocks_and_one_that_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nets.MODELS, "frozen", (Frozen, lambda rows: {"x": nets.normal(rows, 64, 64)}, nets._squares))
    training = Training("frozen", rows=16)
    plan = training.prepare()
    assert len(plan.blocks) == 5
    while training.planner.tighten("the test says so"):
        plan = training.prepare()
    assert training.peak(plan) <= 1.25 * plan.forecast.peak_bytes, "of 250 kB, of which single pages are 4"


def test_layers_with_batch_norms_are_measured_on_two_rows() -> None:
    training = Training("resnet")
    training.planner.prepare(training.described(), "batch norm")
    assert min(training.rows) == 2


class Deep(nn.Sequential):
    """Many blocks."""

    def __init__(self) -> None:
        super().__init__(*(nets.FeedForward(64) for _ in range(40)))


def test_what_no_plan_has_room_for_is_spilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder there is no plan for as little in 8 bits."""
    shape = (Deep, lambda rows: {"x": nets.normal(rows, 256, 64)}, nets._squares)
    monkeypatch.setitem(nets.MODELS, "deep", shape)
    options: dict[str, Any] = {"name": "deep", "precision": 8, "min_precision": 8}
    without = Training(**options)
    without.planner.prepare(without.described(), "a reason")
    measured = without.planner._measured
    assert measured is not None
    without.planner._set_limit(1)
    with pytest.raises(PlanError) as error:
        without.planner._find(measured, without.described(), "a reason")
    budget = int(0.9 * error.value.least)
    training = Training(**options, memory_budget=budget, spill_dir=str(tmp_path))
    plan = training.planner.prepare(training.described(), "a reason")
    assert training.peak(plan) <= budget
    assert training.spilled_bytes > 0
