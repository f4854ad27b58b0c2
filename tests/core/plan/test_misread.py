"""A step whose activations had another reader than before is run again, and is as if the reader had been known."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from daf_core import ReaderError
from daf_core.plan.run.retry import with_retries
from daf_core.snapshots.step import Snapshot
from tests.core.harness import assert_same, engine_for, error, gradients, normal

FUNCTIONS = torch.sin, torch.erf
"""The first one's backward may read an approximation; that of the other one is not known to."""


class Turning(nn.Module):
    """Three layers with dropout, which call another function of C in one instruction from some step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(FUNCTIONS[self.turn](layer(x)))
        return x.square().mean()


class Steps:
    """Steps of that model with few bits, each of which may be run again.

    Attributes:
        attempts: How many there were.
        fails: Attempts in which backward reads what has not been kept, counted from 1.
    """

    def __init__(self) -> None:
        self.net = Turning()
        self.engine = engine_for(self.net, 4)
        self.attempts, self.fails = 0, set[int]()

    def run(self, look_again: bool = True) -> list[Tensor]:
        """Runs the step of a seed; returns its gradients."""
        torch.manual_seed(1)
        with_retries(
            self._attempt,
            Snapshot(self.net, self.engine.snapshot),
            lambda _message: False,
            look_again=self.engine.look_again if look_again else None,
        )
        found = gradients(self.net)
        self.net.zero_grad()
        return found

    def _attempt(self) -> None:
        self.attempts += 1
        with self.engine.compress():
            loss = self.net(normal(128, 64))
        loss.backward()
        if self.attempts in self.fails:
            raise ReaderError("something outside of backward asks")

    def plain(self) -> list[Tensor]:
        torch.manual_seed(1)
        self.net(normal(128, 64)).backward()
        found = gradients(self.net)
        self.net.zero_grad()
        return found


def test_other_readers_in_all_layers_cost_one_more_attempt(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    steps.run()
    steps.net.turn = 1
    found = steps.run()
    assert steps.attempts == 3
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "ErfBackward0 asks for" in record.message
    assert_same(found, steps.run())
    assert steps.attempts == 4
    assert error(found, steps.plain()) < 0.3


def test_nothing_is_looked_at_any_more_once_it_is_known_again() -> None:
    steps = Steps()
    steps.run()
    steps.net.turn = 1
    steps.run()
    steps.run()
    readers = steps.engine._readers
    assert {reading.reader for reading in readers._readings.values() if reading.varies} == {"PowBackward0"}
    assert not readers._own.unknown


def test_a_second_misreading_of_a_step_is_an_error() -> None:
    steps = Steps()
    steps.fails = {1, 2}
    with pytest.raises(ReaderError, match="something outside of backward asks"):
        steps.run()
    assert steps.attempts == 2
    steps.run()


def test_what_cannot_be_run_again_is_an_error_at_once() -> None:
    steps = Steps()
    steps.fails = {1}
    with pytest.raises(ReaderError):
        steps.run(look_again=False)
    assert steps.attempts == 1
