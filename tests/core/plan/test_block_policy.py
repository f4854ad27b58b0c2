"""What every block policy keeps to, and that a new one needs its class and an entry alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from typing_extensions import override

from daf_core import ActivationEngine, DAFConfig
from daf_core.model.blocks import Block, blocks_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.plan import policies
from daf_core.plan.cost.measure import measure
from daf_core.plan.cost.profile import Profile, interpolate
from daf_core.plan.policies import KEEP, OFF, POLICIES, AppliedPolicies, BlockPolicy, ObservedCall, policy_named
from daf_core.plan.run.step_planner import Batch, StepPlanner
from tests.core.harness import assert_same
from tests.core.plan import nets

EACH = pytest.mark.parametrize("policy", POLICIES, ids=repr)
SELECTABLE = pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.selectable], ids=repr)


def profile_of(name: str) -> Profile:
    model, batch, loss = nets.make(name, 8)
    config = DAFConfig(precision=4, packing="device")
    return measure(
        model, config, lambda rows: loss(model, {key: each[:rows] for key, each in batch.items()}), 8, 1 << 30
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of("gpt2")


def test_names_are_unique_and_found() -> None:
    assert len({policy.name for policy in POLICIES}) == len({policy.words for policy in POLICIES}) == len(POLICIES)
    assert [policy_named(policy.name) for policy in POLICIES] == [*POLICIES]
    with pytest.raises(KeyError):
        policy_named("keep")


@EACH
def test_faster_policies_come_first_and_say_so_of_none_that_is_not_selectable(policy: BlockPolicy) -> None:
    faster = policy.faster
    assert faster is None or (POLICIES.index(faster) < POLICIES.index(policy) and faster.selectable)


@EACH
def test_costs_are_numbers_of_zero_or_more(policy: BlockPolicy, profile: Profile) -> None:
    for rows in (1, 4, 8, 64):
        costs = profile.at(rows, 4)
        for values in costs[policy]:
            assert values.shape == (1 + len(profile.calls),)
            assert torch.as_tensor(values[1:]).isfinite().all()
            assert (values >= 0).all()
        if policy.faster is not None:
            inside = costs[policy].seconds[1:], costs[policy.faster].seconds[1:]
            assert (inside[0] > inside[1]).all()


@EACH
def test_only_what_holds_more_than_others_is_faster(policy: BlockPolicy, profile: Profile) -> None:
    costs = profile.at(8, 4)
    if policy.faster is not None:
        assert (costs[policy].held[1:] < costs[policy.faster].held[1:]).all()


@EACH
def test_more_rows_take_no_less(policy: BlockPolicy, profile: Profile) -> None:
    few, many = profile.at(2, 4), profile.at(8, 4)
    for one, other in zip(few[policy], many[policy], strict=True):
        assert (other >= one).all()
    for same, one in zip(interpolate(few, many, 0.0)[policy], few[policy], strict=True):
        assert (same == one).all()


@EACH
def test_outside_of_blocks_a_policy_costs_something_or_cannot_be(policy: BlockPolicy, profile: Profile) -> None:
    values = [each[0] for each in profile.at(8, 4)[policy]]
    assert torch.tensor(values).isfinite().all() or torch.tensor(values).isinf().all()
    assert not (policy.recomputes and torch.tensor(values).isfinite().any())


@EACH
def test_costs_are_infinite_where_a_policy_does_not_suit(policy: BlockPolicy) -> None:
    profile = profile_of("resnet")
    held = torch.as_tensor(profile.at(8, 4)[policy].held[1:])
    assert held.isfinite().tolist() == [policy.suits(profile.blocks[block]) for block in profile.calls]


@SELECTABLE
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_gradients_are_those_of_plain_training_and_blocks_as_before(policy: BlockPolicy, name: str) -> None:
    model, batch, loss = nets.make(name)
    other, before = copy.deepcopy(model), [set(vars(module)) for module in model.modules()]
    blocks, applied = blocks_of(model), AppliedPolicies()
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    applied.follow(dict.fromkeys(blocks, policy))
    found = nets.gradients_of(model, lambda: loss(model, batch), engine.compress)
    assert_same(found, nets.gradients_of(other, lambda: loss(other, batch), nullcontext))
    assert_same(list(model.buffers()), list(other.buffers()))
    applied.follow({})
    engine.close()
    assert [set(vars(module)) for module in model.modules()] == before


class Offload(BlockPolicy):
    """A new treatment: a quarter of the bytes stays, and the others come back in no time."""

    name = "OFFLOAD"
    faster = KEEP

    def __init__(self) -> None:
        self.blocks: list[str] = []

    @override
    def seconds(self, call: ObservedCall) -> float:
        return KEEP.seconds(call) * 1.01

    @override
    def held(self, call: ObservedCall) -> float:
        return KEEP.held(call) / 4

    @override
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        return KEEP.peaks(call)

    @override
    def apply(self, block: Block) -> Callable[[], None]:
        def offloaded(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.blocks.append(block.name)
            return forward(*args, **kwargs)

        return ForwardPatch(block.module, offloaded).remove


def test_a_new_policy_is_planned_and_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Offload()
    monkeypatch.setattr(policies, "POLICIES", (*POLICIES, offload))
    model, batch, loss = nets.make("gpt2", 8)
    config = DAFConfig(memory_budget="1GB", precision="exact", packing="device")
    engine = ActivationEngine(model, config)
    planner = StepPlanner(model, engine, config)

    def loss_of(rows: int) -> torch.Tensor:
        return loss(model, {key: value[:rows] for key, value in batch.items()})

    described = Batch(8, 32, loss_of)
    plan = planner.prepare(described)
    assert set(plan.blocks) == {KEEP}
    while offload not in plan.blocks:
        assert planner.tighten("the test says so")
        plan = planner.prepare(described)
    loss_of(8).backward()
    chosen = [block.name for block, policy in zip(blocks_of(model), plan.blocks, strict=True) if policy is offload]
    assert offload.blocks == chosen
    assert f"{len(chosen)} offload" in (planner.summary or "")
    assert policy_named("OFFLOAD") is offload
    planner.close()
    assert not any("forward" in vars(block.module) for block in blocks_of(model))


def test_what_is_not_selectable_is_never_planned(profile: Profile) -> None:
    assert not OFF.selectable
    assert [policy for policy in POLICIES if not policy.selectable] == [OFF]
