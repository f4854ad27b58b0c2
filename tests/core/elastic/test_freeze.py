"""Parameters that a step does not train stay what they are, and the user's choice is given back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from daf_core.elastic.freeze import STALE, FrozenUnits, forget_momentum
from tests.core.elastic.runs import Run, assumed_units, deep_gpt2, depth_of, trained
from tests.core.plan import nets

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    "amsgrad": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5),
}


def backward(model: nn.Module, seed: int = 0) -> None:
    nets._tokens(model, nets.tokens(2, seed=seed)).backward()


def copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_off_does_not_move(kind: str, to_none: bool) -> None:
    model = deep_gpt2(4)
    units = assumed_units(model)
    optimizer, mask = OPTIMIZERS[kind](trained(model)), FrozenUnits(units)
    backward(model)
    optimizer.step()  # momenta
    optimizer.zero_grad(set_to_none=to_none)
    mask.apply({0})
    off = [parameter for unit in units.units[1:] for parameter in unit.parameters]
    before, on = copies(off), copies([*units.units[0].parameters])
    for seed in range(4):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert all(map(torch.equal, before, off))
    assert not any(map(torch.equal, on, units.units[0].parameters))
    mask.unfreeze()
    backward(model)
    optimizer.step()
    assert not any(map(torch.equal, before, off))


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_what_steps_do_not_train_does_not_move(to_none: bool) -> None:
    model = deep_gpt2(4)
    optimizer = OPTIMIZERS["adamw"](trained(model))
    zero = partial(torch.optim.Optimizer.zero_grad, set_to_none=to_none)
    run = Run(model, nets._tokens, optimizers=[optimizer], zero=zero, time=0.75)
    depths: set[int] = set()
    for number in range(14):
        before = {name: each.detach().clone() for name, each in model.named_parameters() if "lora" in name}
        step = run.step(nets.tokens(2, seed=number))
        moved = {name for name, each in model.named_parameters() if name in before and not each.equal(before[name])}
        assert moved <= step.names
        assert depth_of(step) == step.elastic.depth
        depths.add(step.elastic.depth)
    assert {1, 4} <= depths
    run.close()


def test_apply_takes_the_place_of_what_was_before() -> None:
    model = deep_gpt2(3)
    units = assumed_units(model)
    mask = FrozenUnits(units)
    for on in ({0}, {2}, {0, 1, 2}, set[int](), {1}):
        mask.apply(on)
        for number, unit in enumerate(units.units):
            assert all(parameter.requires_grad == (number in on) for parameter in unit.parameters)
    frozen = [each for name, each in model.named_parameters() if "lora" not in name]
    mask.unfreeze()
    assert all(parameter.requires_grad for unit in units.units for parameter in unit.parameters)
    assert not any(parameter.requires_grad for parameter in frozen)


def test_everything_is_trained_again_after_an_error() -> None:
    model = deep_gpt2(4)
    before = [parameter.requires_grad for parameter in model.parameters()]
    run = Run(model, nets._tokens, time=0.8)

    def fail(_model: nn.Module, _batch: nets.Batch) -> torch.Tensor:
        nets._tokens(model, nets.tokens(2))
        assert [parameter.requires_grad for parameter in model.parameters()] != before
        raise KeyboardInterrupt

    run.loss = fail
    with pytest.raises(KeyboardInterrupt):
        run.step(nets.tokens(2))
    run.close()
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert run.training.finish_step() is None


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_momentum_alone_is_forgotten(kind: str) -> None:
    model = deep_gpt2(2)
    parameters = trained(model)
    optimizer = OPTIMIZERS[kind](parameters)
    backward(model)
    optimizer.step()
    before = copy.deepcopy([optimizer.state[parameter] for parameter in parameters])
    model.zero_grad()
    backward(model, seed=1)
    forget_momentum([optimizer], parameters[:2])
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state[parameter].items():
            if number < 2 and name in ("exp_avg", "momentum_buffer"):
                assert not value.any()
            else:
                assert value.equal(before[number][name])
    forget_momentum([optimizer, torch.optim.AdamW([nn.Parameter(torch.zeros(2))])], [nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("idle", [STALE, STALE + 1])
def test_momentum_begins_anew_after_many_idle_steps(idle: int, probe: bool) -> None:
    """What is trained again after as many steps goes on with its momentum, and after one more without.

    Not where it is measured what it gains: without momentum that would be less than what others gain.
    """
    model = deep_gpt2(2)
    optimizer = torch.optim.AdamW(trained(model), 1e-3)
    for _ in range(2):  # LoRA's A has no gradient while B is zero
        nets._tokens(model, nets.tokens(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run = Run(model, nets._tokens, optimizers=[optimizer], time=0.9)
    lower = [each for name, each in model.named_parameters() if ".h.0." in name and "lora" in name]
    run.steps(1 + probe, nets.tokens(2))  # the second step trains everything, the third is measured too
    steps = {id(each): float(optimizer.state[each]["step"]) for each in lower}
    run.training._learned.idle = dict.fromkeys(run.training._learned.idle, idle)
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(not any(optimizer.state[each]["exp_avg"].any() for each in lower))
        assert all(optimizer.state[each]["exp_avg_sq"].any() for each in lower)
        assert all(optimizer.state[each]["step"] == steps[id(each)] for each in lower)

    optimizer.register_step_pre_hook(look)
    run.step(nets.tokens(2))
    assert seen == [idle > STALE and not probe]
    assert set(run.training._learned.idle.values()) == {idle + 1 if idle > STALE and probe else 0}
    run.close()


def test_idle_steps_are_counted() -> None:
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    expected = dict.fromkeys(run.training._learned.idle, 0)
    for _ in range(14):
        step = run.step(nets.tokens(2))
        for name in expected:
            on = any(each.startswith(f"{name}.") for each in step.names)
            expected[name] = 0 if on else expected[name] + 1
        assert run.training._learned.idle == expected
    assert max(expected.values()) > 1
    run.close()
