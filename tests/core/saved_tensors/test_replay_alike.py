"""Saves that look alike to a replay, and are not: in another module or call, of another maker, or of another form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.model.treatments import Treatments
from tests.core.harness import LARGE, engine_for, normal, take_the_full_way
from tests.core.saved_tensors.test_replay import CONFIGS, assert_equal, compare, take_step

STEPS = 12

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Stepped(nn.Module):
    """A model that knows which step it is in; a copy is made anew, with its weights."""

    step = 0

    def __deepcopy__(self, memo: object) -> Stepped:
        copied = type(self)(*self.made_with)
        copied.load_state_dict(self.state_dict())
        return copied

    def __init__(self, *made_with: Any) -> None:
        super().__init__()
        self.made_with = made_with


def loss_of(model: Any, step: int) -> Tensor:
    model.step = step
    return model(normal(*LARGE, seed=step)).square().mean()


class Chosen(Stepped):
    """Runs one of three blocks, the first one in the first steps."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[self.step**2 % 3 if self.step > 3 else 0](self.first(x).tanh())


@pytest.mark.parametrize("precision", [4, "exact"])
def test_a_block_that_stays_as_it_is_lends_nothing_to_another_one(precision: object) -> None:
    torch.manual_seed(0)
    model = Chosen(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    twin = copy.deepcopy(model)
    engine, other = (engine_for(each, precision, packing="device") for each in (model, twin))
    take_the_full_way(other)
    held = set[int]()
    for each in (engine, other):
        each.treat(Treatments(kept={"blocks.0": True}))
    for number in range(STEPS):
        found = take_step(engine, model, loss_of, number)
        assert_equal(found, take_step(other, twin, loss_of, number))
        held.add(found.held)
    assert len(held) == (1 if precision == "exact" else 2)


class SavesFewFirst(nn.Module):
    """Saves a small tensor before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        few = (x[:4] * 2).sin().sum()
        return self.layer(x).tanh() * few


class SavesAMaskFirst(SavesFewFirst):
    """Saves a mask before all others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.masked_fill(x.detach() > 0.5, 0.1).tanh()).tanh()


@configs
@pytest.mark.parametrize("make", [SavesFewFirst, SavesAMaskFirst])
def test_masks_and_small_tensors_belong_to_their_module(make: type[nn.Module], config: dict[str, Any]) -> None:
    compare(partial(Chosen, make), loss_of, STEPS, **config)


class Loops(Stepped):
    """Calls one block three times, or twice with as many operators in all."""

    class Block(nn.Module):
        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = (x * 1.1).tanh()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(64, 64), Loops.Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for times in ([1, 1, 1], [2, 1])[self.step % 2]:
            x = self.block(x, times)
        return x


class NormedWeight(Stepped):
    """Saves in a hook before a module's forward, and may save something before that."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.normed = nn.utils.weight_norm(nn.Linear(64, 64))
        self.first = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.normed(x.sin() if self.step % 2 else x).tanh()


class HookedLater(Stepped):
    """Registers a hook after the engine was made, which saves one thing or another."""

    hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.step >= 3 and not self.hooked:
            self.hooked = True
            self.layers.register_forward_hook(self.after)
        return self.layers(self.layers(x).cos())

    def after(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
        return (result * 1.1).tanh() if self.step // 3 % 2 else result.sin()


@configs
@pytest.mark.parametrize("make", [Loops, NormedWeight, HookedLater])
def test_what_is_saved_counts_for_the_call_that_saves_it(make: type[nn.Module], config: dict[str, Any]) -> None:
    compare(make, loss_of, STEPS, **config)


def _nothing(*_: object) -> None:
    """A hook of a user."""


class WithMore(Stepped):
    """Saves more inside of a block from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (
            nn.Linear(64, 64),
            nn.Sequential(nn.Linear(64, 64), nn.GELU()),
            nn.Linear(64, 64),
        )
        self.block.register_forward_hook(self.more)

    def more(self, _: nn.Module, __: object, result: Tensor) -> Tensor:
        return result.sin() if self.step > 6 else result

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.block(F.gelu(self.first(x)))))


@pytest.mark.parametrize("when", ["registered while DAF's rest", "removed while DAF's rest"])
def test_hooks_of_users_leave_those_of_modules_to_be_switched_on(when: str) -> None:
    """As of a profiler. What stays as it is is known by them."""
    torch.manual_seed(0)
    model = WithMore()
    twin = copy.deepcopy(model)
    engines = [engine_for(each, 4, packing="device") for each in (model, twin)]
    take_the_full_way(engines[1])
    handles = [model.register_forward_hook(_nothing)] if when.startswith("removed") else []
    for number in range(6):
        take_step(engines[0], model, loss_of, number)
        take_step(engines[1], twin, loss_of, number)
    for handle in handles:
        handle.remove()
    if not handles:
        for module in model.modules():
            module.register_forward_hook(_nothing)
    for engine in engines:
        engine.treat(Treatments(kept={"block": True, "block.0": True}))
    for number in range(6, STEPS):
        found = take_step(engines[0], model, loss_of, number)
        assert_equal(found, take_step(engines[1], twin, loss_of, number))


class Heads(Stepped):
    """Has one head or another, of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        self.heads = [nn.Linear(64, 64), nn.Linear(64, 32)]
        self.head = self.heads[0]

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.heads[self.step % 2]
        return self.head(self.trunk(x))

    def __deepcopy__(self, memo: object) -> Heads:
        copied = Heads()
        copied.trunk.load_state_dict(self.trunk.state_dict())
        copied.heads = copy.deepcopy(self.heads)
        copied.head = copied.heads[0]
        return copied


@configs
def test_shapes_of_parameters_that_take_turns_are_replayed(config: dict[str, Any]) -> None:
    assert compare(Heads, loss_of, STEPS, **config) > 3


class Twice(Stepped):
    """Runs an encoder twice in a row, as for pairs of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.encoder(x.flip(0))


def test_only_what_begins_anew_right_after_itself_is_followed_in_each_pass() -> None:
    """A module with hooks takes 5 us more for each call; of the layers inside of it their order tells."""
    model = Twice()
    engine = engine_for(model, 4, packing="device")
    for number in range(6):
        take_step(engine, model, loss_of, number)
    with engine.compress():
        followed = [name for name, module in model.named_modules() if module._forward_hooks]
        model(normal(*LARGE))
    assert followed == ["encoder"]
    compare(Twice, loss_of, STEPS, precision=4)


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))


def _one_or_other(make: Callable[[Any, Tensor], Tensor], use: Callable[[Any, Tensor], Tensor]) -> Any:
    def loss(model: Any, step: int) -> Tensor:
        x = model[0](normal(256, 64, seed=step))
        one, other = make(model, x), x * 2 + 1
        return use(model, one if step % 3 == 2 else other).float().tanh().sum() + one.mean()

    return loss


def _linear_of_view(model: Any, x: Tensor) -> Tensor:
    return model[2](x.view(2, 128, 64))


MAKERS = {
    "a normalization": _one_or_other(lambda model, x: model[1](x), _linear_of_view),
    "a ReLU": _one_or_other(lambda _, x: F.relu(x), _linear_of_view),
    "a cast": _one_or_other(lambda _, x: x.tanh(), lambda model, x: F.linear(x.bfloat16(), model[2].weight.bfloat16())),
    "a dropout": _one_or_other(lambda _, x: x.softmax(-1), lambda model, x: _linear_of_view(model, F.dropout(x, 0.1))),
}


@configs
@pytest.mark.parametrize("how", MAKERS)
def test_what_follows_from_others_depends_on_what_has_made_it(how: str, config: dict[str, Any]) -> None:
    """Views of both look alike, and so do dropouts and casts."""
    compare(_normalized, MAKERS[how], STEPS, **config)


def _trained_at_first(model: Any, step: int) -> Tensor:
    large = model(normal(8192, 64, seed=step)).tanh()
    prompt = normal(128, 64, seed=step).requires_grad_(step < 5)
    return large.sum() + F.layer_norm(prompt, (64,), model.bias, model.bias).square().sum()


def _second_part(model: Any, step: int) -> Tensor:
    x = model(normal(8192, 64, seed=step)).tanh()
    return (x[:256].exp().chunk(2)[step % 2 if step > 5 else 0] * model.bias[0]).sum() + x.sum()


@configs
@pytest.mark.parametrize("loss", [_trained_at_first, _second_part])
def test_whether_it_may_be_a_statistic_is_looked_at_each_time(loss: Any, config: dict[str, Any]) -> None:
    compare(lambda: nn.Linear(64, 64), loss, STEPS, **config)


@configs
def test_a_new_parameter_may_change_the_form_of_activations(config: dict[str, Any]) -> None:
    """What has the shape of a vector of parameters stays exact."""

    def loss(model: nn.Module, step: int) -> Tensor:
        if step == 6:
            model.register_parameter("extra", nn.Parameter(torch.zeros(8192)))
        x = model(normal(128, 64, seed=step)).flatten()
        return (x.sin() * x.tanh()).sum() + sum(each.sum() for each in model.parameters(recurse=False))

    compare(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), loss, 10, **config)


def test_what_stays_as_it_is_is_not_derived_and_counted_again() -> None:
    """A frozen layer, and an adapter that drops its input, whose codes would take as much as it."""

    def loss(model: Any, step: int) -> Tensor:
        x = normal(64, 64, seed=step).requires_grad_()
        return (model[0](x) + model[1](F.dropout(x, 0.1))).tanh().sum()

    make = partial(nn.ModuleList, [nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)])
    compare(make, loss, 5, precision=4)


def test_a_dropout_that_nothing_is_saved_of_is_not_noted() -> None:
    """Its mask has the shape of a weight that autocast may have cast."""

    def loss(model: Any, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            x = F.dropout(model[0](normal(128, 64, seed=step)), 0.1)
            result = model[1](F.dropout(x, 0.1)) + x
        return result.float().clamp(-9, 9).square().mean() + 0 * model[2].weight.sum()

    make = partial(nn.ModuleList, [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 128)])
    compare(make, loss, STEPS, precision=4)


def test_what_may_be_written_late_is_looked_at_each_time() -> None:
    """A randomized ReLU of an input that was changed before, or not."""

    def loss(model: Any, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        return F.rrelu((x if step % 2 else x.add_(0)) * model.weight, training=True).sum()

    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(()))
        return module

    compare(make, loss, STEPS, precision=4)
