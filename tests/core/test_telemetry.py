"""Rule 12 and `StepStatistics`: what was saved, what was held instead, and that nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import DAFConfig, StepStatistics
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_kernels import mask_pages, plane_layout
from tests.core.harness import LARGE, MODELS, Scale, assert_empty, engine_for, integers, make_model, normal, train

BYTES = 4 * 128 * 64
"""Bytes of a tensor of shape LARGE."""

PAGES = plane_layout(128 * 64, 64, PAGE_BYTES).pages(3) * PAGE_BYTES
"""Bytes that its pages at 4 bits take."""


@pytest.mark.parametrize("precision", ["exact", 8, 4, 2, 1])
@pytest.mark.parametrize("name", MODELS)
def test_rule_12_every_step_leaves_nothing(name: str, precision: object) -> None:
    """`train` checks after each step that no page is leased and no byte held."""
    model, loss = make_model(name)
    train(model, loss, DAFConfig(precision=precision))


def test_statistics_of_a_step_made_by_hand() -> None:
    """One activation that two operators save, a mask, and a small tensor."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    x = normal(*LARGE)
    with engine.compress():
        h = model(x).sin()  # x and the layer's result
        masked = h.masked_fill(x > 0, 0.0)  # a boolean mask
        small = masked.mean(1).exp()  # 128 numbers
        loss = small.sum() + model(x).sum()  # x again
    mask = mask_pages(128 * 64, PAGE_BYTES) * PAGE_BYTES
    assert engine.held_bytes == 2 * PAGES + mask + 4 * 128
    assert engine.leased_pages == (2 * PAGES + mask) // PAGE_BYTES
    loss.backward()
    statistics = engine.finish_step()
    assert statistics.raw_bytes == 2 * BYTES + 128 * 64 + 4 * 128
    assert statistics.held_bytes == 2 * PAGES + mask + 4 * 128
    assert statistics.stored_as == {"planes": 2, "shared": 1, "bitmask": 1, "raw": 1}
    assert statistics.ratio == statistics.raw_bytes / statistics.held_bytes
    assert statistics.pack_seconds > 0
    assert statistics.unpack_seconds > 0
    assert_empty(engine)


def test_raw_bytes_count_a_storage_once() -> None:
    """Queries, keys and values that are parts of one tensor are one storage in plain training too."""
    model = nn.Linear(64, 192)
    engine = engine_for(model, 4)
    x = normal(*LARGE)
    with engine.compress():
        query, key, value = model(x).split(64, dim=-1)
        loss = (query.sin() + key.sin() + value.sin()).sum()
    assert engine.held_bytes == 4 * PAGES
    assert engine.finish_step().raw_bytes == 4 * BYTES
    del loss


@pytest.mark.parametrize("precision", ["exact", 4])
def test_raw_bytes_of_passes_before_one_backward_add_up(precision: Any) -> None:
    """Plain training keeps them together; of passes that each have a backward, the largest counts."""
    model, x = nn.Linear(64, 64), normal(*LARGE)
    engine = engine_for(model, precision)
    for together, passes in ((True, 3), (False, 1)):
        losses = list[Tensor]()
        for number in range(3):
            with engine.compress():
                losses.append(model(x + number).sin().sum())
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        statistics = engine.finish_step()
        assert statistics.raw_bytes == passes * 2 * BYTES
        assert statistics.held_bytes == passes * 2 * (BYTES if precision == "exact" else PAGES)
        del losses


def test_what_a_backward_has_let_go_is_not_counted_again() -> None:
    """Though a result of the pass, which no loss is made of, holds what it was made of."""
    first, second, third = (nn.Linear(64, 64) for _ in range(3))
    engine, x = engine_for(nn.ModuleList([first, second, third]), 4), normal(*LARGE)
    raw = list[int]()
    for passes in (1, 3):
        for _ in range(passes):
            with engine.compress():
                hidden = first(x).relu()
                beside = third(hidden.relu()).sin()
                loss = second(hidden).square().mean()
            loss.backward()
        raw.append(engine.finish_step().raw_bytes)
    assert raw[0] == raw[1]
    del beside


def test_raw_views_hold_their_whole_storage_once() -> None:
    """An exact view keeps all of its storage alive, and is counted as such; several count once."""
    model = Scale()
    engine = engine_for(model, "exact")
    x = normal(*LARGE)
    with engine.compress():
        first, second = model(x[:4]), model(x[4:])
    assert engine.held_bytes == BYTES
    assert engine.finish_step().raw_bytes == BYTES
    del first
    assert engine.held_bytes == BYTES
    del second
    assert_empty(engine)


def test_views_of_what_was_there_before_count_themselves() -> None:
    """A batch that is a part of a data set in memory does not hold all of it; 4 passes, as later ones are replayed."""
    model, data = Scale(), normal(*LARGE)
    engine = engine_for(model, "exact")
    for _ in range(4):
        with engine.compress([data[:2], data[4:5]]):
            loss = model(data[:2])
        assert engine.held_bytes == 3 * BYTES // LARGE[0]
        assert engine.finish_step().raw_bytes == 3 * BYTES // LARGE[0]
        loss.sum().backward()
        assert_empty(engine)
        with engine.compress([data]):  # and whole
            loss = model(data)
        assert engine.finish_step().raw_bytes == BYTES
        del loss


def test_views_that_a_pass_is_given_inside_count_themselves() -> None:
    model, data = Scale(), normal(*LARGE)
    engine = engine_for(model, "exact")
    with engine.compress():
        with engine.compress([data[:2]]):
            loss = model(data[:2])
        other = model(data.exp()[:2])  # nobody else holds the rest
    assert engine.finish_step().raw_bytes == 2 * BYTES // LARGE[0] + BYTES
    del loss, other


def test_views_of_what_nobody_else_has_hold_their_storage() -> None:
    model = Scale()
    engine = engine_for(model, "exact")
    for make in (
        lambda: normal(*LARGE)[:2],
        lambda: normal(*LARGE).split(2)[0],
        lambda: normal(2 * LARGE[0], 32).T[:, :2],
    ):
        view = make()
        with engine.compress([view]):
            loss = model(view)
        assert engine.finish_step().raw_bytes == BYTES
        del loss


def test_views_with_a_graph_hold_their_storage() -> None:
    """It may be one that the pass has made."""
    model, data = Scale(), normal(*LARGE).requires_grad_().exp()
    engine = engine_for(model, "exact")
    with engine.compress([data[:2]]):
        loss = model(data[:2])
    assert engine.finish_step().raw_bytes == BYTES
    del loss


def test_a_storage_at_the_address_of_one_that_was_lent_counts_whole() -> None:
    model = Scale()
    engine = engine_for(model, "exact")
    for _ in range(5):
        data = normal(*LARGE)
        with engine.compress([data[:2]]):
            loss = model(data[:2])
        assert engine.finish_step().raw_bytes == 2 * BYTES // LARGE[0]
        del data, loss
        other = normal(*LARGE)
        with engine.compress():
            loss = model(other[:2])
        assert engine.finish_step().raw_bytes == BYTES
        del other, loss


def test_narrowed_indices_are_counted_narrow() -> None:
    """Indices below 256 take a byte each, in whole pages."""
    model = nn.Embedding(100, 8)
    engine = engine_for(model, "exact")
    with engine.compress():
        loss = model(integers(100, 5000)).sum()
    assert engine.held_bytes == 2 * PAGE_BYTES
    assert engine.finish_step().raw_bytes == 8 * 5000
    loss.backward()
    assert_empty(engine)


def test_parameters_and_buffers_are_not_counted() -> None:
    """They are there with and without DAF."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128))
    engine = engine_for(model, 4)
    with engine.compress():
        loss = model(normal(1, 64)).sum()
    loss.backward()
    statistics = engine.finish_step()
    assert statistics.raw_bytes == statistics.held_bytes == 4 * (64 + 128)
    assert statistics.stored_as == {"raw": 2}


def test_accumulation_of_separate_passes() -> None:
    """Passes whose backward follows at once are not added up in bytes, only in counts."""
    model = Scale()
    engine = engine_for(model, 4)
    for rows in (128, 256, 128):
        with engine.compress():
            loss = model(normal(rows, 64)).sum()
        loss.backward()
    statistics = engine.finish_step()
    assert statistics.raw_bytes == 2 * BYTES
    assert statistics.held_bytes == plane_layout(256 * 64, 64, PAGE_BYTES).pages(3) * PAGE_BYTES
    assert statistics.stored_as["planes"] == 3


def test_passes_that_are_alive_together_are_held_together() -> None:
    """Several forward passes before the first backward, as in pipelines: the bytes add up."""
    model = Scale()
    engine = engine_for(model, 4)
    losses = []
    for seed in range(3):
        with engine.compress():
            losses.append(model(normal(*LARGE, seed=seed)).sum())
    torch.stack(losses).sum().backward()
    del losses
    assert engine.finish_step().held_bytes == 3 * PAGES
    assert_empty(engine)


def test_finish_step_starts_anew() -> None:
    """A second call without a step in between reports nothing; what is still held counts on."""
    model = Scale()
    engine = engine_for(model, 4)
    with engine.compress():
        loss = model(normal(*LARGE))
    assert engine.finish_step().stored_as == {"planes": 1}
    assert engine.finish_step() == StepStatistics(held_bytes=PAGES)
    del loss
    assert engine.finish_step().held_bytes == PAGES
    assert engine.finish_step() == StepStatistics()


def test_statistics_of_what_was_dropped() -> None:
    """Planes and bytes of what a budget took, before or after they were written, counted anew each step."""
    model = Scale()
    engine = engine_for(model, 4, memory_budget=PAGES + 2 * PAGE_BYTES)
    with engine.compress():
        loss = model(normal(*LARGE)) + model(normal(*LARGE, seed=1))
    statistics = engine.finish_step()
    assert (statistics.dropped_planes, statistics.dropped_bytes) == (2, 2 * PAGE_BYTES)
    assert (statistics.held_bytes, statistics.spilled_bytes) == (PAGES + 2 * PAGE_BYTES, 0)
    assert statistics.pager_seconds > 0
    del loss
    with engine.compress():
        model(normal(*LARGE))
    statistics = engine.finish_step()
    assert (statistics.dropped_planes, statistics.dropped_bytes) == (0, 0)


@pytest.mark.parametrize("precision", ["exact", 4])
def test_statistics_of_what_was_spilled(precision: object, tmp_path: Path) -> None:
    """Each activation is written once, however often it is read back."""
    size = BYTES if precision == "exact" else PAGES
    model = Scale()
    engine = engine_for(model, precision, memory_budget=size, spill_dir=tmp_path)
    with engine.compress():
        first, second = model(normal(*LARGE)), model(normal(*LARGE, seed=1))
    for output in (first, second, first, second):
        output.sum().backward(retain_graph=True)
    statistics = engine.finish_step()
    assert (statistics.spilled_bytes, statistics.held_bytes) == (2 * size, size)
    assert (statistics.dropped_planes, statistics.dropped_bytes) == (0, 0)


def test_ratio_of_nothing_is_one() -> None:
    """A step that saved nothing divides by no zero."""
    assert StepStatistics().ratio == 1.0
    assert StepStatistics(raw_bytes=80, held_bytes=10).ratio == 8.0


@pytest.mark.parametrize(("precision", "least"), [(8, 2.5), (4, 4), (2, 6), (1, 8)])
def test_ratio_grows_as_precision_falls(precision: int, least: float) -> None:
    """A large activation shrinks by what its precision promises, headers included."""
    model = Scale()
    engine = engine_for(model, precision)
    with engine.compress():
        loss = model(normal(1024, 256))
    assert least < engine.finish_step().ratio <= 32 / precision
    del loss
