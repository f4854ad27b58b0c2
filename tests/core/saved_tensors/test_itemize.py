"""What a pass saves, tensor by tensor: the sums are those of the step's statistics, whatever is shared or let go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core.autograd.sites import Site
from daf_core.codecs.raw import RawActivation
from daf_core.engine import ActivationEngine
from daf_core.saved_tensors.itemize import NO_OPERATOR, PACKING, Items, SavedItem
from daf_core.telemetry import StepStatistics
from tests.core.harness import LARGE, MODELS, Loss, assert_empty, assert_same, backward, engine_for, make_model, normal


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, second)
        return first * second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ctx.saved_tensors
        return gradient * second, gradient * first


def itemized(model: nn.Module, loss_of: Loss, engine: ActivationEngine) -> tuple[list[SavedItem], StepStatistics]:
    """Returns the items of a step, and the step's statistics."""
    with engine.itemized() as items, engine.compress():
        loss = loss_of(model, 0)
    items.name_operators(loss)
    loss.backward()
    found = items.at_peak()
    del loss
    assert_empty(engine)
    return found, engine.finish_step()


def sums(items: list[SavedItem]) -> tuple[int, int]:
    return sum(item.raw_bytes for item in items), sum(item.held_bytes for item in items)


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize("precision", ["exact", "auto", 1])
@pytest.mark.parametrize("name", MODELS)
def test_items_add_up_to_the_statistics(name: str, precision: Any, packing: Any) -> None:
    model, loss = make_model(name)
    items, statistics = itemized(model, loss, engine_for(model, precision, packing=packing))
    assert sums(items) == (statistics.raw_bytes, statistics.held_bytes)
    assert len(items) == sum(statistics.stored_as.values())
    assert all(codec in statistics.stored_as for codec in {item.codec for item in items})
    assert NO_OPERATOR not in {item.operator for item in items}


def test_listing_changes_nothing() -> None:
    model, loss = make_model("transformer")
    expected = backward(model, loss, engine_for(model, 4))
    engine = engine_for(model, 4)
    with engine.itemized():
        assert_same(backward(model, loss, engine), expected)


def test_each_item_knows_its_module_operator_and_codec() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    items, _ = itemized(model, lambda model, seed: model(normal(*LARGE)).sum(), engine_for(model, 4))
    size = 4 * 128 * 64
    assert [(item.site.module, item.operator, item.codec, item.raw_bytes) for item in items] == [
        ("0", "AddmmBackward0", "planes", size),
        ("1", "TanhBackward0", "planes", size),
        ("2", "AddmmBackward0", "shared", 0),
    ]
    assert [bool(item.held_bytes) for item in items] == [True, True, False]


class Branches(nn.Module):
    """Has a branch that nothing comes of, and something before and after it."""

    def __init__(self, branch: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.branch, self.after = branch, after

    def forward(self) -> Tensor:
        result = (self.weight * normal(*LARGE)).sum()
        branch = self.weight * normal(self.branch, 64, seed=1)
        del branch
        return result + (self.weight * normal(self.after, 64, seed=2)).sum()


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize(
    ("branch", "after", "held"), [(128, 512, [True, False, True]), (512, 128, [True, True, False])]
)
def test_what_was_let_go_counts_at_the_peak_alone(precision: Any, branch: int, after: int, held: list[bool]) -> None:
    model = Branches(branch, after)
    items, statistics = itemized(model, lambda model, seed: model(), engine_for(model, precision))
    assert sums(items) == (statistics.raw_bytes, statistics.held_bytes)
    assert [bool(item.held_bytes) for item in items] == held
    assert [item.operator for item in items] == ["MulBackward0", NO_OPERATOR, "MulBackward0"]


def test_raw_views_hold_their_storage_as_long_as_one_exists() -> None:
    """The first view, which counts for the storage, is let go; the second one holds it all the same."""
    model, x = Branches(1, 1), normal(*LARGE)

    def loss_of(_model: nn.Module, _seed: int) -> Tensor:
        first, second = model.weight * x[:4], model.weight * x[4:]
        del first
        return second.sum() + (model.weight * normal(*LARGE, seed=1)).sum()

    items, statistics = itemized(model, loss_of, engine_for(model, "exact"))
    assert sums(items) == (statistics.raw_bytes, statistics.held_bytes)
    assert [item.held_bytes for item in items] == [4 * 128 * 64, 0, 4 * 128 * 64]


def test_what_was_held_only_while_packing_is_an_item_of_its_own() -> None:
    items, packed = Items(lambda packed: packed), RawActivation(normal(2), None)
    items.add(SavedItem(Site("a", "leaf", 0), NO_OPERATOR, "raw", 8, 8), packed, torch.device("cpu"), peak=12)
    *_, last = items.at_peak()
    assert (last.site, last.raw_bytes, last.held_bytes) == (PACKING, 0, 4)


def test_nothing_is_kept_alive() -> None:
    model, x = Branches(1, 1), normal(*LARGE)
    engine, storage = engine_for(model, "exact"), StorageWeakRef(x.untyped_storage())
    with engine.itemized() as items, engine.compress():
        loss = (model.weight * x).sum()
    del x
    loss.backward()
    del loss
    assert items.at_peak()
    assert storage.expired()
    assert_empty(engine)


def test_operators_written_in_python_are_named() -> None:
    """They keep what they save in one list."""
    model, x = Branches(1, 1), normal(*LARGE)
    items, _ = itemized(model, lambda *_: Product.apply(x * model.weight, x.sin()).sum(), engine_for(model, 4))
    # From torch 2.14 on an operator's tensors wait in a first pass for the graph to say who has saved them.
    operators = [item.operator for item in items if item.site != PACKING]
    assert operators == ["MulBackward0", "ProductBackward", "ProductBackward"]
