"""Forks in the middle of training and trains on in both processes; run by test_forks.py, one case for each call."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig, SpillError
from tests.core.harness import pager_of

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])
parameters = list(model.parameters())
SPILLS = DAFConfig(
    precision="exact", memory_budget=200_000, budget_covers="activations", spill_dir=sys.argv[2], packing="device"
)
WORKERS = DAFConfig(precision="exact", packing="workers")


def batch(seed: int) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))


def assert_right(loss: Tensor, seed: int) -> None:
    expected = torch.autograd.grad(model(batch(seed)).sum(), parameters)
    assert all(map(torch.equal, torch.autograd.grad(loss, parameters), expected))


def train(engine: ActivationEngine, first: int = 0, steps: int = 5) -> None:
    for seed in range(first, first + steps):
        with engine.compress():
            loss = model(batch(seed)).sum()
        assert_right(loss, seed)
    del loss
    assert (engine.held_bytes, engine.leased_pages) == (0, 0)


def fork(in_child: Callable[[], None], in_parent: Callable[[], None] = lambda: None) -> None:
    """Does something in a child while the parent does something else."""
    child = os.fork()
    if not child:
        try:
            in_child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    in_parent()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def before_training() -> None:
    """Both write at once, each to a file of its own."""
    engine = ActivationEngine(model, SPILLS)
    fork(lambda: train(engine, 100, 40), lambda: train(engine, 200, 40))


def after_training() -> None:
    """The child has no thread that reads ahead, and its children have none either."""
    engine = ActivationEngine(model, SPILLS)
    train(engine)

    def child() -> None:
        train(engine, 100)
        fork(lambda: train(engine, 200))

    fork(child)
    train(engine)


def between_forward_and_backward() -> None:
    """What lies in memory is the child's own; what lies in the parent's file is an error."""
    spilling, resident = ActivationEngine(model, SPILLS), ActivationEngine(model, WORKERS)
    with spilling.compress():
        spilled = model(batch(1)).sum()
    with resident.compress():
        kept = model(batch(2)).sum()

    def child() -> None:
        nonlocal spilled, kept
        assert_right(kept, 2)
        with pytest.raises(SpillError, match="before this process was forked"):
            spilled.backward()
        del spilled, kept
        train(spilling, 100)

    fork(child)
    assert_right(spilled, 1)
    assert_right(kept, 2)


def in_a_pass() -> None:
    """What flies has landed, and the child packs on a thread of its own."""
    engine = ActivationEngine(model, WORKERS)
    with engine.compress():
        middle = model[:6](batch(1))
        child_number = os.fork()
        loss = model[6:](middle).sum()
    try:
        assert_right(loss, 1)
        del loss, middle
        train(engine, 100 + child_number)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if not child_number:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child_number, 0)[1]) == 0


def while_a_lock_is_held() -> None:
    """Another thread is in the middle of a change, and not there in the child."""
    engine = ActivationEngine(model, SPILLS)
    train(engine)
    inside, pager = threading.Event(), pager_of(engine)

    def change() -> None:
        with pager._lock, pager.pool._lock:
            pager.held_bytes += 1
            inside.set()
            time.sleep(0.2)
            pager.held_bytes -= 1

    changing = threading.Thread(target=change)
    changing.start()
    inside.wait()
    fork(lambda: train(engine, 100))
    changing.join()
    train(engine)


torch.set_num_threads(1)
globals()[sys.argv[1]]()
