"""Whether activations are packed in the background, and on how many threads."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from daf_core import ActivationEngine, ConfigError, DAFConfig
from daf_core.saved_tensors import background_choice
from daf_core.saved_tensors.backends import Backends
from daf_core.saved_tensors.background_choice import MOST_THREADS, TRIALS, WARM_UP, PackingChoice
from daf_core.saved_tensors.pending import PackJob
from tests.core.harness import LARGE, Scale, assert_same, engine_for, make_model, normal, train


def choice(packing: Any) -> PackingChoice:
    config = DAFConfig(packing=packing)
    return PackingChoice(config, Backends(Scale(), config))


@pytest.mark.parametrize(("idle", "workers", "automatic"), [(-3, 1, {0}), (0, 1, {0}), (1, 1, {0, 1}), (3, 3, {0, 3})])
def test_idle_cores_decide(idle: int, workers: int, automatic: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as cores that torch leaves idle, at most four; at least one where they are asked for."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: idle)
    assert choice("workers").threads() == workers
    assert choice("device").threads() == 0
    asked = choice("auto")
    found = set()
    for _ in range(8):
        found.add(threads := asked.threads())
        asked.add(threads, 1.0, 100)
    assert found == automatic
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 60)
    assert choice("workers").threads() == MOST_THREADS


@pytest.mark.parametrize("background_seconds", [0.9, 1.1])
def test_the_faster_way_is_taken(background_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median time for a byte: passes are of different lengths, and a slow one now and then decides nothing."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 2)
    asked, kinds = choice("auto"), []
    for turn in range(WARM_UP + 2 * TRIALS):
        threads = asked.threads()
        kinds.append(threads)
        size = 1000 * (1 + turn % 3)
        seconds = size * (background_seconds if threads else 1.0) * (50 if turn in (0, 1, 5, 8) else 1)
        asked.add(threads, seconds, size)
    assert kinds == [0, 2] * (WARM_UP // 2 + TRIALS)
    for _ in range(3):
        assert asked.threads() == (2 if background_seconds < 1 else 0)
        asked.add(asked.threads(), 1e9, 1)
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 0)  # torch was given more threads
    assert asked.threads() == 0


def test_passes_that_save_nothing_are_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in evaluation."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 1)
    asked = choice("auto")
    for _ in range(20):
        assert asked.threads() == 0
        asked.add(0, 1.0, 0)


@pytest.mark.parametrize("packing", ["auto", "workers"])
def test_models_elsewhere_have_no_background(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU run in the background of Python anyway."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 1)
    monkeypatch.setattr(Backends, "packs_on_host", False)
    asked = choice(packing)
    for _ in range(4):
        assert asked.threads() == 0
        asked.add(0, 1.0, 100)


def test_reference_kernels_run_in_the_background_where_it_is_asked_for(
    sent: list[PackJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give the same. They are torch's operations, and would bring a second team of its threads along."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 1)
    model, loss_of = make_model("mlp")
    expected = train(model, loss_of, DAFConfig(precision=4, packing="device"))
    assert_same(train(model, loss_of, DAFConfig(precision=4, backend="reference")), expected)
    assert not sent
    assert_same(train(model, loss_of, DAFConfig(precision=4, packing="workers", backend="reference")), expected)
    assert sent


def test_auto_tries_both(sent: list[PackJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine, pass by pass, with the same result."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 1)
    engine, values = engine_for(model := Scale(), 4), []
    for turn in range(4):
        with engine.compress():
            node: Any = model(normal(*LARGE)).grad_fn
        values.append(node._saved_self)
        assert len(sent) == (turn + 1) // 2
    assert_same(values[1:], values[:1] * 3)


@pytest.mark.parametrize(
    ("cores", "threads", "processes", "expected"),
    [(2, 1, "1", 1), (2, 2, "1", 0), (1, 4, "1", -3), (64, 8, "8", 0), (64, 6, "8", 2)],
)
def test_cores_that_torch_leaves_idle(
    cores: int, threads: int, processes: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the share of this process."""
    monkeypatch.undo()  # the cores that every other test has
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert background_choice.idle_cores() == expected


@pytest.mark.parametrize("processes", ["", "0", "-2", "two", "1.0", "9" * 400, "\u00b2"])
def test_a_wrong_number_of_processes_is_found_before_the_first_pass(
    processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model is as it was."""
    model = nn.Linear(1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    with pytest.raises(ConfigError, match=r"^LOCAL_WORLD_SIZE='.*' is no number of processes; set it to"):
        ActivationEngine(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_every_core_counts_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.undo()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert background_choice.idle_cores() == 2
