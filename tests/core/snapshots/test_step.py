"""What runs aside of training leaves no trace in it: random numbers, running statistics, gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine
from daf_core.precision.calibration import calibrate
from daf_core.snapshots.measurement import measuring
from tests.core.harness import Loss, assert_empty, assert_same, engine_for, gradients, make_model, normal, trainable

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
    "torch": (torch.manual_seed, lambda: torch.rand(5).tolist()),
    "torch-dropout": (torch.manual_seed, lambda: nn.functional.dropout(torch.ones(50)).tolist()),
    "numpy": (np.random.seed, lambda: np.random.rand(5).tolist()),
    "numpy-normal": (np.random.seed, lambda: [np.random.standard_normal() for _ in range(3)]),  # draws two at a time
    "python": (random.seed, lambda: [random.random() for _ in range(5)]),
    "python-normal": (random.seed, lambda: [random.gauss(0, 1) for _ in range(3)]),
}


class Failure(BaseException):
    """What no `except Exception` catches, as an interrupt."""


def _aside(model: nn.Module, run: Callable[[], object], fails: bool) -> None:
    """Runs a function aside of training; an exception must come through."""
    with pytest.raises(Failure) if fails else nullcontext(), measuring(model):
        run()
        _fail_if(fails)


def _fail_if(fails: bool) -> None:
    if fails:
        raise Failure


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("seed", "draw"), GENERATORS.values(), ids=GENERATORS)
def test_random_numbers_go_on(seed: Callable[[int], Any], draw: Callable[[], Any], fails: bool) -> None:
    """Training draws the numbers that it would have drawn, whatever was drawn or seeded aside, and however it ended."""
    seed(7)
    expected = [draw(), draw()]
    seed(7)
    first = draw()

    def run() -> None:
        seed(123)
        draw()

    _aside(nn.Identity(), run, fails)
    assert [first, draw()] == expected


def test_random_numbers_aside_are_those_of_training() -> None:
    """The generators are not seeded anew: dropout aside is that of the step that follows."""
    torch.manual_seed(3)
    with measuring(nn.Identity()):
        aside = torch.rand(4)
    assert torch.equal(aside, torch.rand(4))


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None))


@pytest.mark.parametrize("fails", [False, True])
def test_running_statistics_come_back(fails: bool) -> None:
    """Means, variances and counts of all normalizations, bit by bit; the same tensors as before."""
    model = _normalized()
    model(normal(4, 3, 8, 8))
    before = copy.deepcopy(model.state_dict())
    tensors = dict(model.named_buffers())

    def run() -> None:
        model(5 + normal(4, 3, 8, 8, seed=1))
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
        assert len(changed) == len(tensors) == 6

    _aside(model, run, fails)
    assert_same([*model.state_dict().values()], [*before.values()])
    assert all(buffer is tensors[name] for name, buffer in model.named_buffers())


def test_buffer_that_two_modules_share_comes_back() -> None:
    """Once, and with what it held before the first of them changed it."""
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    model[1].running_mean = model[0].running_mean
    with measuring(model):
        for norm in model:
            norm(1 + normal(8, 3))
        assert model[0].running_mean.all()
    assert not model[0].running_mean.any()
    assert model[1].running_mean is model[0].running_mean


class _Buffers(nn.Module):
    """Two buffers in one storage, each a view of it."""

    def __init__(self) -> None:
        super().__init__()
        together = torch.arange(8.0).view(2, 4)
        self.register_buffer("first", together[0])
        self.register_buffer("second", together[1])


CHANGES: dict[str, Callable[[_Buffers, str], object]] = {
    "in-place": lambda model, name: getattr(model, name).add_(1),
    "behind-autograd": lambda model, name: getattr(model, name).data.add_(1),
    "replaced": lambda model, name: setattr(model, name, getattr(model, name) + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["first", "second"])
def test_buffers_come_back_however_they_were_changed(name: str, change: Callable[[_Buffers, str], object]) -> None:
    """Written where no version counts it, or another tensor in their place, as moving averages often do."""
    model = _Buffers()
    before = {known: (buffer, buffer.clone()) for known, buffer in model.named_buffers()}
    with measuring(model):
        change(model, name)
        assert not torch.equal(getattr(model, name), before[name][1])
    for known, (buffer, values) in before.items():
        assert torch.equal(getattr(model, known), values)
        assert getattr(model, known) is buffer


def test_buffer_without_a_storage_of_its_own() -> None:
    """A sparse matrix, such as a graph's, is no obstacle."""
    model = nn.Module()
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    with measuring(model):
        model.adjacency.mul_(2)
    assert torch.equal(model.adjacency.to_dense(), torch.eye(4))


def test_buffers_that_did_not_change_are_not_written() -> None:
    """A graph of training that has saved one still runs backward, as without."""
    model = nn.BatchNorm1d(3)
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * model.running_var).sum()
    with measuring(model):
        model.eval()
        model(normal(8, 3))
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_gradients_are_left_to_what_runs() -> None:
    """Who measures decides what becomes of them."""
    model = nn.Linear(2, 2)
    with measuring(model):
        model.weight.grad = torch.ones(2, 2)
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def _train(
    model: nn.Module, loss_of: Loss, aside: Callable[[ActivationEngine, Callable[[], Tensor]], None]
) -> list[Any]:
    """Returns all that may differ after three steps, with something run aside before each."""
    model = copy.deepcopy(model)
    engine = engine_for(model, 4, rounding="stochastic")
    optimizer = torch.optim.SGD(trainable(model), lr=1e-2)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    record: list[Any] = []
    for step in range(3):
        aside(engine, lambda step=step: loss_of(model, step))
        assert_empty(engine)
        with engine.compress():
            loss = loss_of(model, step)
        loss.backward()
        record += [loss.detach(), *gradients(model)]
        optimizer.step()
        engine.finish_step()
    return [
        *record,
        *model.state_dict().values(),
        torch.get_rng_state(),
        torch.tensor([random.random(), np.random.rand()]),
    ]


def _rehearse(engine: ActivationEngine, loss: Callable[[], Tensor]) -> None:
    with engine.probe_pass(loss) as rehearsal:
        assert rehearsal.compare({site: 2 for site, _ in rehearsal.activations}).error > 0


def _fail(engine: ActivationEngine, loss: Callable[[], Tensor]) -> None:
    def run() -> Tensor:
        loss()
        raise Failure

    with pytest.raises(Failure), engine.probe_pass(run):
        pytest.fail("there is no loss")


def _audit(engine: ActivationEngine, loss: Callable[[], Tensor]) -> None:
    engine.audit(loss)
    with engine.probe_pass(loss) as rehearsal:
        assert calibrate(rehearsal)


@pytest.mark.parametrize("aside", [_rehearse, _fail, _audit])
@pytest.mark.parametrize("name", ["transformer", "convnet", "mlp"])
def test_rehearsals_and_audits_change_no_bit_of_training(name: str, aside: Callable[..., None]) -> None:
    """Losses, gradients, weights, buffers and random numbers are those of training without them."""
    model, loss_of = make_model(name)
    assert_same(_train(model, loss_of, aside), _train(model, loss_of, lambda *_: None))
