"""Models that are trained under pressure, and what a budget can be for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationBudgetError, ActivationEngine, DAFConfig
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.books import PagerAccount
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.readers.learning import Readers
from daf_core.readers.places import Place
from daf_core.readers.table import Reading
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.pending import PendingActivation
from tests.core.books import check_pager
from tests.core.harness import (
    Loss,
    assert_empty,
    engine_for,
    gradients,
    integers,
    normal,
    pager_of,
    wait_for_read_ahead,
)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.first(x)))
        return F.relu(x + self.norm_2(self.second(inner)))


def make_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 8))


def make_resnet() -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, 8))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.MaxPool2d(2), Residual(16), pool)


def make_perceptron() -> nn.Module:
    layers = [
        layer
        for width in (64, 128, 128)
        for layer in (nn.Linear(width, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1))
    ]
    return nn.Sequential(*layers, nn.Linear(128, 8))


def _loss(*shape: int) -> Loss:
    def loss(model: nn.Module, step: int) -> Tensor:
        outputs = model(normal(*shape, seed=step)).flatten(0, -2)
        return F.cross_entropy(outputs, integers(8, outputs.shape[0], seed=step))

    return loss


def make_normalized() -> tuple[Callable[[], nn.Module], Loss]:
    """A model whose largest activation is followed by a batch norm of 32 channels, and by nothing large."""
    layers = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return lambda: copy.deepcopy(nn.Sequential(*layers, nn.Linear(32, 8))), _loss(4, 3, 16, 16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "encoder": (make_encoder, _loss(4, 32, 64)),
    "resnet": (make_resnet, _loss(4, 3, 16, 16)),
    "perceptron": (make_perceptron, _loss(128, 64)),
}
PRECISIONS = ["exact", 8, 4]


def make_model(name: str) -> tuple[nn.Module, Loss]:
    """Returns a fresh model, initialized the same every time, and its loss."""
    make, loss = MODELS[name]
    _readings(loss, type(make()))
    torch.manual_seed(0)
    return make(), loss


@cache
def _readings(loss_of: Loss, kind: type[nn.Module]) -> Mapping[Place, Reading]:
    """Returns what an engine learns of who reads what, of one of `MODELS`."""
    models = [make() for make, loss in MODELS.values() if loss is loss_of]
    engine = ActivationEngine(next(model for model in models if type(model) is kind), DAFConfig(precision=8))
    with engine.compress():
        loss_of(engine._model, 0)
    READERS.append(engine._readers)
    return engine._readers._readings


READERS: list[Readers] = []
"""Keeps the codes of functions alive whose addresses are in names of places."""


def forward(engine: ActivationEngine, model: nn.Module, loss_of: Loss, step: int = 0) -> Tensor:
    """Returns the loss of a forward pass; its dropout follows from the step.

    The engine knows already who reads what: a first pass may hold more than others, which are measured here.
    """
    engine._readers._readings.update(_readings(loss_of, type(model)))
    torch.manual_seed(step)
    with engine.compress():
        return loss_of(model, step)


def backward(engine: ActivationEngine, model: nn.Module, loss_of: Loss, step: int = 0) -> list[Tensor]:
    """Returns the gradients of one step."""
    model.zero_grad()
    forward(engine, model, loss_of, step).backward()
    return gradients(model)


@cache
def peak_of(name: str, precision: Any, **options: Any) -> int:
    """Returns the most bytes that are held without pressure; with a spill folder in the forms that can move there."""
    model, loss_of = make_model(name)
    budget = "1GB" if "spill_dir" in options else None
    engine = engine_for(model, precision, memory_budget=budget, **options)
    backward(engine, model, loss_of)
    return engine.finish_step().held_bytes


@cache
def least_budget(name: str, precision: Any, **options: Any) -> int:
    """Returns the smallest budget that a forward pass fits in: the error's `needed` leads there."""
    model, loss_of = make_model(name)
    budget, needed = 0, 1
    while needed > budget:
        budget = needed
        try:
            forward(engine_for(model, precision, memory_budget=budget, **options), model, loss_of)
        except ActivationBudgetError as raised:
            needed = raised.needed
    return budget


def assert_sound(engine: ActivationEngine) -> None:
    """Fails where the pager's books, its pool and its bytes disagree."""
    wait_for_read_ahead(pager_of(engine))
    check_pager(pager_of(engine))
    assert engine.held_bytes >= engine.leased_pages * PAGE_BYTES


def steps(name: str, count: int, **options: Any) -> tuple[list[Tensor], list[PagerAccount], list[dict[str, int]]]:
    """Returns the gradients of so many steps, what the pager did in them, and what was stored as what."""
    model, loss_of = make_model(name)
    engine = engine_for(model, **options)
    found: list[Tensor] = []
    done: list[PagerAccount] = []
    stored: list[dict[str, int]] = []
    for step in range(count):
        found += backward(engine, model, loss_of, step)
        assert_empty(engine)
        assert_sound(engine)
        was = engine.finish_step()
        done.append(PagerAccount(was.held_bytes, was.dropped_planes, was.dropped_bytes, was.spilled_bytes))
        stored.append(was.stored_as)
    return found, done, stored


def held_with_window(engine: ActivationEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lists the bytes of the pages and of the tensors that wait for a worker, each time that a tensor is sent there."""
    seen: list[int] = []
    send = BackgroundPacker.send

    def watch(self: BackgroundPacker, saved: SavedTensor) -> PendingActivation:
        found = send(self, saved)
        seen.append(self._window.size + pager_of(engine).held_bytes)
        return found

    monkeypatch.setattr(BackgroundPacker, "send", watch)
    return seen
