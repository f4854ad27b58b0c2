"""Poles that read small tensors, of which nothing is stored in few bits, while a large result before them is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from daf_core import ActivationEngine, DAFConfig
from daf_core.readers import patterns
from tests.core.harness import error, gradients, normal

CLASSES = 200

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "gathered": lambda scores, targets: -(scores.softmax(-1).gather(1, targets[:, None]) + 1e-9).log().mean(),
    "indexed": lambda scores, targets: -scores.softmax(-1)[torch.arange(len(targets)), targets].log().mean(),
    "root": lambda scores, targets: (scores.softmax(-1).gather(1, targets[:, None]) + 1e-12).sqrt().mean(),
    "picked": lambda scores, targets: -(scores.softmax(-1) * F.one_hot(targets, CLASSES)).sum(1).log().mean(),
    "ratio": lambda scores, targets: _ratio(scores.softmax(-1).gather(1, targets[:, None])),
    "contrast": lambda scores, targets: _contrast(scores.exp(), targets),
    "forbidden actions": lambda scores, targets: -_policy(scores).log_prob(targets).mean(),
    "pointer": lambda scores, targets: -(_pointed(scores).gather(1, targets[:, None]) + 1e-12).log().mean(),
    "mean of some": lambda scores, targets: F.nll_loss(_several(scores).mean(0).log(), targets),
    "sum of some": lambda scores, targets: F.nll_loss(
        scores.softmax(-1).view(-1, CLASSES // 8, 8).sum(-1).log(), targets // 8
    ),
    "mixture": lambda scores, targets: F.nll_loss(
        torch.einsum("rk,krc->rc", scores[:, :4].softmax(-1), _several(scores)).log(), targets
    ),
    "difference": lambda scores, _targets: -((-scores.exp()).exp() - (-1.05 * scores.exp()).exp() + 1e-9).log().mean(),
    "distances": lambda scores, _targets: _distances(scores.view(-1, CLASSES // 4, 4)).mean(),
}


def _ratio(chosen: Tensor) -> Tensor:
    return (chosen / chosen.detach()).mean()


def _contrast(similar: Tensor, targets: Tensor) -> Tensor:
    return -(similar.gather(1, targets[:, None])[:, 0] / similar.sum(1)).log().mean()


def _policy(scores: Tensor) -> Categorical:
    allowed = (torch.arange(scores.numel()) % 7 > 1).view_as(scores)
    probabilities = scores.softmax(-1) * allowed + 1e-30
    return Categorical(probabilities / probabilities.sum(-1, keepdim=True))


def _pointed(scores: Tensor) -> Tensor:
    """Returns a mixture of what a model makes up and of what it copies from places that it was given."""
    share, places = scores[:, :1].sigmoid(), torch.arange(scores.numel()).view_as(scores)[:, :16] * 7 % CLASSES
    return (share * scores.softmax(-1)).scatter_add(1, places, (1 - share) * scores[:, :16].softmax(-1))


def _several(scores: Tensor) -> Tensor:
    return torch.stack([(scores * factor).softmax(-1) for factor in (0.7, 0.8, 0.9, 1.0)])


def _distances(points: Tensor) -> Tensor:
    return ((points - 0.999 * points.roll(1, 1)).exp().square().sum(-1) + 1e-12).sqrt()


def _without_pole(scores: Tensor, _targets: Tensor) -> Tensor:
    return (scores.softmax(-1) + scores.exp() / 1e6).square().mean()


def _logarithms(scores: Tensor, _targets: Tensor) -> Tensor:
    return -(scores.softmax(-1) + 1e-9).log().mean()


def _errors(losses: Sequence[Loss], rows: Sequence[int], precision: object = 8) -> list[float]:
    """Returns the error of the gradient in each step, with its loss and its rows."""
    torch.manual_seed(0)
    layer, found = nn.Linear(32, CLASSES), list[float]()
    engine = ActivationEngine(layer, DAFConfig.from_dict({"precision": precision}))
    for step, (loss, count) in enumerate(zip(losses, rows, strict=True)):
        inputs, targets = normal(count, 32, seed=step), torch.randint(CLASSES, (count,))
        loss(6 * layer(inputs), targets).backward()
        expected = gradients(layer)
        layer.zero_grad()
        with engine.compress():
            result = loss(6 * layer(inputs), targets)
        result.backward()
        found.append(error(gradients(layer), expected))
        layer.zero_grad()
        engine.finish_step()
    return found


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradient_is_right_from_the_first_step_on(loss: Loss) -> None:
    """In replayed passes, too. At 8 bits errors were up to 1e9."""
    assert max(_errors([loss] * 4, [512] * 4)) < 0.01


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_pole_that_comes_later_is_learned(loss: Loss) -> None:
    """While the model trains, within two steps."""
    found = _errors([_without_pole] * 3 + [loss] * 4, [512] * 7)
    assert max(found[:3] + found[5:]) < 0.01


@pytest.mark.parametrize("rows", [20, 21, 24, 28, 40])
@pytest.mark.parametrize("precision", [8, 4])
def test_first_batch_may_be_too_small_for_codes(rows: int, precision: int) -> None:
    """From 4096 elements on a reader is learned, but what is hardly larger takes no fewer bytes in codes."""
    found = _errors([_logarithms] * 5, [rows + 1, 512, 512, 512, 512], precision)
    assert max(found) < (0.01 if precision == 8 else 0.2)


def test_quotient_of_single_numbers_is_none() -> None:
    """As a loss over the number of its rows: it is a factor of all gradients before it."""
    torch.manual_seed(0)
    layer = nn.Linear(32, CLASSES)
    engine = ActivationEngine(layer, DAFConfig(precision=8))
    with engine.compress():
        probabilities = layer(normal(512, 32)).softmax(-1)
        loss = probabilities.square()[0, 0] / torch.tensor(512.0)
    loss.backward()
    assert engine.finish_step().stored_as["planes"] == 2


def _mean_of_kept(divisor: Callable[[Tensor], Tensor]) -> Loss:
    """The mean over what a mask keeps of each row, as of the words of an answer."""
    kept = (torch.arange(512 * CLASSES) % 7 > 1).view(512, CLASSES)
    return lambda scores, _targets: ((scores.exp() * kept).sum(-1) / divisor(kept)).square().mean()


@pytest.mark.parametrize(
    ("divisor", "coded"),
    [
        (lambda kept: kept.sum(-1), True),
        (lambda kept: kept.float().sum(-1).clamp(min=1e-9), True),
        (lambda kept: kept.float().sum(-1) / 3, False),
        (lambda kept: kept.float().sum(-1) - CLASSES, False),
    ],
    ids=["counts", "counts as floats", "no whole numbers", "below 1"],
)
@pytest.mark.parametrize("packing", ["device", "workers"])
def test_a_number_of_elements_is_no_pole(divisor: Callable[[Tensor], Tensor], coded: bool, packing: Any) -> None:
    torch.manual_seed(0)
    layer, loss = nn.Linear(32, CLASSES), _mean_of_kept(divisor)
    engine = ActivationEngine(layer, DAFConfig(precision=8, packing=packing))
    for step in range(2):
        with engine.compress():
            found = loss(layer(normal(512, 32, seed=step)), torch.zeros(()))
        found.backward()
        assert engine.finish_step().stored_as["planes"] == 1 + coded  # the input, and what the exponential has made


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_numbers_of_something_else_are_poles(dtype: torch.dtype) -> None:
    """What a relative error divides by: its small values have large gradients. At 8 bits errors were up to .7."""

    def loss(scores: Tensor, _targets: Tensor) -> Tensor:
        expected = (scores.detach() + 2 + normal(512, CLASSES, seed=7)).exp().round().clamp_min(1).to(dtype)
        return (((scores + 2).exp() - expected).abs() / expected).mean()

    assert max(_errors([loss] * 4, [512] * 4)) < 0.02


def test_each_node_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where functions return results that are older, as ``contiguous`` does of what a loop reads again."""
    looked = list[object]()

    def noted(node: object, _large: object) -> bool:
        looked.append(node)
        return False

    monkeypatch.setattr(patterns, "has_pole", noted)
    layer = nn.Linear(64, 64)
    with ActivationEngine(layer, DAFConfig(precision=8)).compress():
        memory = layer(normal(128, 64))
        state = memory * 2
        for _ in range(100):
            state = (state + memory.contiguous()).tanh()
    assert len(looked) < 400


class Attention(nn.Module):
    """An attention whose probabilities are products of rectified queries and keys, over their sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.outputs = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.inputs(values).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, 8)).permute(0, 2, 3, 1) for part in parts)
        value = F.pad(value, (0, 0, 0, 1), value=1)
        found = (value @ key.relu().transpose(-1, -2)) @ query.relu()
        found = found[:, :, :-1] / (found[:, :, -1:] + 1e-15)
        return self.outputs(found.permute(0, 3, 1, 2).flatten(2))


@pytest.mark.parametrize("precision", [8, 4])
def test_zeros_of_a_relu_stay_zero_for_a_product(precision: int) -> None:
    """Where a query is zero, its gradient is divided by 1e-15, and its zeros cancel that. Errors were 4e11."""
    model, inputs = Attention(), normal(4, 512, 64)
    model(inputs).square().mean().backward()
    expected = gradients(model)
    engine = ActivationEngine(model, DAFConfig(precision=precision))
    for _ in range(3):
        model.zero_grad()
        with engine.compress():
            loss = model(inputs).square().mean()
        loss.backward()
        assert error(gradients(model), expected) < (0.01 if precision == 8 else 0.15)
        engine.finish_step()


def test_view_of_a_relu_has_its_signs_once() -> None:
    """As of a linear layer's input with three dimensions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    engine, found = ActivationEngine(model, DAFConfig(precision=8)), list[int]()
    for shape in ((512, 64), (8, 64, 64)):
        with engine.compress():
            loss = model(normal(512, 64).view(shape)).sum()
        found.append(engine.held_bytes)
        loss.backward()
        assert engine.finish_step().stored_as["rectified"] == 1
    assert found[0] == found[1]
