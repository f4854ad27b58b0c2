"""What was not trained for some steps goes as far in its next update as if it had been."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from daf_core.elastic.catch_up import MOST_STEPS, CatchUp
from tests.elastic.runs import Run, assumed_units, deep_gpt2, make, trained
from tests.plan import nets

RATE = 0.25


@pytest.mark.parametrize("idle", [0, 1, 3, 10])
@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "whole"])
def test_an_update_stands_for_the_steps_that_were_missed(idle: int, adapters: bool) -> None:
    """For four at most; what is trained as a whole, whose copies would be as large as the model, moves as it does."""
    model, batch, loss = make("gpt2", adapters)
    run = Run(model, loss, optimizers=[torch.optim.SGD(trained(model), lr=RATE)], time=0.9)
    run.steps(2, batch)  # the second one trains everything
    run.training._idle = dict.fromkeys(run.training._idle, idle)
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    gradients: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        gradients.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})

    run.optimizers[0].register_step_pre_hook(look)
    step = run.step(batch)
    assert step.names, "the third one trains everything, too"
    steps = min(idle + 1, MOST_STEPS) if adapters else 1
    moved = {name: each.detach() - before[name] for name, each in model.named_parameters() if name in step.names}
    for name, change in moved.items():
        torch.testing.assert_close(change, -steps * RATE * gradients[name], rtol=1e-3, atol=1e-6)
    run.close()


def test_decay_of_missed_steps_counts_and_a_step_that_is_skipped_changes_nothing() -> None:
    model = deep_gpt2(2)
    unit = assumed_units(model).units[0]
    optimizer = torch.optim.SGD(trained(model), lr=0.1, weight_decay=0.5)
    for parameter in trained(model):
        parameter.grad = torch.zeros_like(parameter)
        nn.init.ones_(parameter)
    catch_up = CatchUp([(unit, 2)])
    catch_up.apply()
    assert all(parameter.eq(1.0).all() for parameter in unit.parameters)
    optimizer.step()
    others = copy.deepcopy([each for each in trained(model) if all(each is not own for own in unit.parameters)])
    catch_up.apply()
    for parameter in unit.parameters:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 3 * 0.05))
    for parameter in others:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 0.05))


def test_what_was_gained_is_measured_of_one_step() -> None:
    """Otherwise units that are trained seldom would seem to gain more for it."""
    found: list[list[float] | None] = []
    for idle in (0, 3):
        model = deep_gpt2(2, dropout=0.0)
        run = Run(model, nets._tokens, optimizers=[torch.optim.SGD(trained(model), lr=RATE)], time=0.9)
        run.steps(2, nets.tokens(2))
        assert run.training._course._gains is None
        run.training._idle = dict.fromkeys(run.training._idle, idle)
        run.step(nets.tokens(2))
        found.append(run.training._course._gains)
        run.close()
    assert found[0] is not None
    assert found[0] == found[1]
