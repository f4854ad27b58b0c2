"""Elastic training in loops of one's own, and in those of Accelerate."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daf_integrations as daf
from daf_core import ConfigError, StateError
from daf_core.model.blocks import layers_of
from daf_integrations.loop.training import training_of
from daf_integrations.session.unwrap import unwrap_model
from tests.core.elastic.runs import checkpoint
from tests.core.plan.nets import FeedForward
from tests.integrations.elastic_runs import (
    BLOCKS,
    ELASTIC,
    STEPS,
    TIME,
    adapters,
    classifier,
    count_time,
    trained,
    whole,
    with_gradient,
)
from tests.integrations.loop_runs import adam, batches, weights_of

MakeModel = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)


class Loop:
    """A plain loop; notes losses, what steps train, and the figures of each."""

    def __init__(self, model: nn.Module, accumulation: int = 1, by_step: bool = False, to_none: bool = True) -> None:
        self.model, self.optimizer = model, adam(model)
        self.losses: list[float] = []
        self.trained: list[frozenset[str]] = []
        self.metrics: list[dict[str, float]] = []
        self._accumulation, self._by_step = accumulation, by_step
        self._number, self._to_none = 0, to_none

    def run(self, steps: int) -> Loop:
        self.model.train()
        start = self._number * self._accumulation
        end = start + steps * self._accumulation
        for number, batch in list(enumerate(batches(self.model, end)))[start:]:
            torch.manual_seed(number)
            if self._by_step:
                loss = daf.step(self.model, batch)
            else:
                loss = self.model(**batch).loss
                loss.backward()
            self.losses.append(loss.item())
            if (number + 1) % self._accumulation == 0:
                self._update()
        return self

    def _update(self) -> None:
        now = with_gradient(self.model)
        before = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.optimizer.step()
        changed = {name for name, value in self.model.named_parameters() if not torch.equal(value, before[name])}
        assert changed <= now
        self.trained.append(now)
        self.optimizer.zero_grad(set_to_none=self._to_none)
        self.metrics.append(daf.metrics(self.model))
        self._number += 1

    def go_on_from(self, other: Loop) -> None:
        """Takes over what a checkpoint of another loop would hold."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        daf.load_state_dict(self.model, json.loads(json.dumps(daf.state_dict(other.model), sort_keys=True)))
        self._number = other._number


def loop(make: MakeModel = adapters, by_step: bool = False, accumulation: int = 1, **options: Any) -> Loop:
    return Loop(daf.prepare(make(), **{**ELASTIC, **options}), accumulation, by_step)


def depths(done: Loop) -> list[float]:
    return [each["daf/elastic_depth"] for each in done.metrics]


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [classifier, adapters])
def test_what_is_off_does_not_change(make: MakeModel, accumulation: int, by_step: bool) -> None:
    """`Loop` looks at it; between steps everything is trained that was before."""
    done = loop(make, by_step, accumulation)
    before = trained(done.model)
    done.run(STEPS)
    assert {BLOCKS} < set(depths(done))
    shares = [each["daf/elastic_share"] for each in done.metrics]
    assert sum(shares[1:]) / (STEPS - 1) == pytest.approx(TIME, abs=0.06)
    assert [len(each) == len(before) for each in done.trained] == [depth == BLOCKS for depth in depths(done)]
    assert trained(done.model) == before
    table = daf.summary(done.model)
    assert "blocks that built a graph, a step" in table
    assert "units in" in table


def test_gradients_that_are_left_at_zero_move_nothing() -> None:
    """As those would that an optimizer found: by momentum, and by decay."""
    done = Loop(daf.prepare(adapters(), **ELASTIC), to_none=False).run(STEPS)
    assert {BLOCKS} < set(depths(done))


@pytest.mark.parametrize("saved", [1, 9])
@pytest.mark.parametrize("make", [classifier, adapters])
def test_goes_on_from_a_saved_state(make: MakeModel, saved: int) -> None:
    """By a file that sorts its keys, as some do."""
    whole = loop(make).run(saved)
    resumed = loop(make)
    resumed.go_on_from(whole)
    whole.run(2 * STEPS - saved)
    resumed.run(2 * STEPS - saved)
    assert len(whole.trained[saved - 1]) < len(trained(whole.model))
    assert resumed.trained == whole.trained[saved:]
    assert resumed.losses == whole.losses[saved:]
    assert resumed.metrics[-1]["daf/elastic_share"] == whole.metrics[-1]["daf/elastic_share"]


def test_a_state_of_another_model_is_refused() -> None:
    done = loop().run(6)
    state = daf.state_dict(done.model)
    other = loop(lambda: adapters(BLOCKS + 1))
    with pytest.raises(StateError, match="elastic training of this model"):
        daf.load_state_dict(other.model, state)


def test_a_share_that_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    done = loop(elastic={"time": 0.01})
    before = trained(done.model)
    done.run(STEPS)
    assert "elastic.time=0.01 cannot be kept" in caplog.text
    assert depths(done)[-1] == 1
    assert trained(done.model) == before


def test_stopping_in_the_middle_of_a_step_gives_the_model_back() -> None:
    done = loop()
    before = trained(done.model)
    done.model.train()
    done.model(**next(batches(done.model, 1))).loss.backward()
    assert trained(done.model) < before
    daf.prepare(done.model, precision="exact")
    assert trained(done.model) == before


class Tokens(nn.Module):
    """Has parameters of its own before its blocks, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8, 32) / 10)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("by_step", [False, True], ids=["by call", "by step"])
def test_parameters_of_the_model_itself_come_before_its_blocks(by_step: bool) -> None:
    torch.manual_seed(0)
    model = daf.prepare(Tokens(), precision="exact", elastic={"time": 0.75, "refresh": 4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    together = set[tuple[bool, ...]]()
    for step in range(12):
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(step))
        if by_step:
            daf.step(model, x, lambda rows: model(rows).square().mean())
        else:
            model(x).square().mean().backward()
        together.add((model.position.grad is not None, model.blocks[0].up.weight.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    assert (False, False) in together
    assert (True, False) not in together


@pytest.mark.parametrize("by_step", [False, True], ids=["by call", "by step"])
def test_a_forward_pass_that_fails_leaves_what_the_user_trains(by_step: bool) -> None:
    """An optimizer that is made then would never see the rest."""
    done = loop()
    before = trained(done.model)
    done.model.train()
    batch = next(batches(done.model, 1))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = layers_of(unwrap_model(done.model))[-1].module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        daf.step(done.model, batch) if by_step else done.model(**batch)
    hook.remove()
    assert trained(done.model) == before


def test_a_scaler_that_skips_a_step_keeps_what_is_trained() -> None:
    """The optimizer does not step, so that the step goes on with the next batch."""
    model = daf.prepare(adapters(), **ELASTIC)
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    before = trained(model)
    model.train()
    seen: list[frozenset[str]] = []
    for number, batch in enumerate(batches(model, STEPS)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        if number in (0, 7):
            next(each for each in model.parameters() if each.grad is not None).grad.fill_(torch.inf)
        seen.append(trained(model))
        weights = weights_of(model)
        scaler.step(optimizer)
        scaler.update()
        skipped = number in (0, 7)
        assert (trained(model) == before) is not skipped
        assert skipped == all(torch.equal(value, weights[name]) for name, value in weights_of(model).items())
        optimizer.zero_grad()
    assert seen[0] == seen[1] < before
    assert seen[7] == seen[8] < before
    assert before in seen


def test_distributed_data_parallel_has_to_allow_it() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(adapters())
        with pytest.raises(ConfigError, match="find_unused_parameters=True"):
            daf.prepare(model, **ELASTIC)
        assert training_of(model) is None
        daf.prepare(nn.parallel.DistributedDataParallel(adapters(), find_unused_parameters=True), **ELASTIC)
    finally:
        torch.distributed.destroy_process_group()


def test_several_optimizers_share_a_step() -> None:
    """What each of them trains has gains, also what the first one to step does not hold."""
    model = daf.prepare(adapters(), **ELASTIC)
    lower = [value for name, value in model.named_parameters() if value.requires_grad and ".h.0." in name]
    others = [value for value in model.parameters() if value.requires_grad and all(value is not each for each in lower)]
    optimizers = [torch.optim.AdamW(lower, lr=5e-3), torch.optim.AdamW(others, lr=5e-3)]
    steps: list[float] = []
    for batch in batches(model, 12):
        model(**batch).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        steps.append(daf.metrics(model)["daf/elastic_depth"])
    assert {BLOCKS} < set(steps)
    training = training_of(model)
    assert training is not None
    assert training.session.totals.elastic_steps == 12
    course = training.session.state()["elastic_state"]["course"]
    assert len(course["gains"]) == BLOCKS
    assert sum(gain > 0 for gain in course["gains"]) > BLOCKS / 2
    assert course["gains"][-1] > 0


def test_closures_are_steps_too() -> None:
    """The optimizer's step begins before the forward pass."""
    model = daf.prepare(adapters(), **ELASTIC)
    optimizer, depths = adam(model), set[float]()
    for batch in batches(model, 12):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            return loss

        optimizer.step(closure)
        depths.add(daf.metrics(model)["daf/elastic_depth"])
    assert {BLOCKS} < depths
    training = training_of(model)
    assert training is not None
    assert sum(gain > 0 for gain in training.session.state()["elastic_state"]["course"]["gains"]) > BLOCKS / 2


def test_a_forward_pass_without_gradients_in_the_middle_of_a_step() -> None:
    """As of a teacher: checkpoints are recomputed with what the step trains."""
    model = daf.prepare(whole(), **ELASTIC)
    checkpoint(model, use_reentrant=False)
    optimizer, sizes = adam(model), set[int]()
    everything = trained(model)
    for batch in batches(model, 12):
        loss = model(**batch).loss
        during = trained(model)
        with torch.no_grad():
            model(**batch)
        assert trained(model) == during
        loss.backward()
        with torch.no_grad():
            model(**batch)
        assert trained(model) == everything
        optimizer.step()
        optimizer.zero_grad()
        sizes.add(len(during))
    assert len(sizes) > 1


def test_a_turn_in_which_nothing_is_trained() -> None:
    """As that of a generator whose critic is frozen meanwhile: nothing is chosen in it, and nothing is forgotten."""
    model = daf.prepare(adapters(), **ELASTIC)
    optimizer, everything = adam(model), [each for each in model.parameters() if each.requires_grad]
    training = training_of(model)
    assert training is not None
    inputs = torch.zeros((), requires_grad=True)
    for batch in batches(model, 16):
        for parameter in everything:
            parameter.requires_grad_(False)
        (model(**batch).loss + inputs).backward()
        for parameter in everything:
            assert not parameter.requires_grad
            parameter.requires_grad_(True)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert training.session.totals.elastic_steps == 16
    assert training.session.state()["elastic_state"]["course"]["selection"] is not None


def test_a_state_that_was_saved_while_something_else_was_trained() -> None:
    """It does not fit, and is no state of another model: what pays is measured anew."""
    done = loop()
    frozen = [each for name, each in done.model.named_parameters() if ".h.0." in name and each.requires_grad]
    done.run(4)
    state = training_of(done.model).session.state()
    other = adapters()
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".h.0." not in name)
    assert frozen
    daf.prepare(other, **ELASTIC)
    training_of(other).load_state(json.loads(json.dumps(state)))
    Loop(other).run(3)
