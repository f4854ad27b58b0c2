"""Memory of tensors, counted."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from daf_core.plan.observe.meter import TensorMeter

KIB = 256
"""Elements of a KiB."""


def test_level_and_peak_follow_tensors() -> None:
    with TensorMeter() as meter:
        first = torch.zeros(KIB)
        assert meter.level == 1024
        second = torch.ones(3 * KIB) + 1  # ones and its sum are there at once
        assert meter.level == 4096
        assert meter.take_peak() == 7168
        assert meter.take_peak() == 4096
        del first
        assert (meter.level, meter.take_peak()) == (3072, 4096)
        del second
        assert meter.level == 0


def test_views_and_changes_in_place_are_nothing_new() -> None:
    with TensorMeter() as meter:
        base = torch.zeros(4, KIB)
        views = [base[0], base.view(-1), base.t(), *base.unbind(), *base.split(2)]
        base.add_(1).mul_(2)
        torch.add(base, 1, out=base)
        assert meter.level == 4096
        del base
        assert meter.level == 4096
        del views
        gc.collect()
        assert meter.level == 0


def test_result_in_a_tensor_that_was_given() -> None:
    before = torch.zeros(KIB)
    with TensorMeter() as meter:
        torch.add(before, 1, out=before)
        assert meter.level == 0
        inside = torch.empty(KIB)
        torch.add(before, 1, out=inside)
        assert meter.level == 1024


def test_tensors_of_before_do_not_count() -> None:
    before = torch.zeros(KIB)
    later = before * 2
    with TensorMeter() as meter:
        result = before.view(2, -1) + later.view(2, -1)
        assert meter.level == 1024
        del before, later
        assert meter.level == 1024
        del result
        assert meter.level == 0


@pytest.mark.parametrize("recomputed", [False, True])
def test_saved_tensors_and_backward(recomputed: bool) -> None:
    weight = torch.ones(KIB, requires_grad=True)
    weight.grad = torch.zeros(KIB)

    def function(x: Tensor) -> Tensor:
        return (x.sin() * weight).tanh()

    checkpoint(function, weight, use_reentrant=False).sum().backward()  # imports what it needs
    with TensorMeter() as meter:
        result = checkpoint(function, weight, use_reentrant=False) if recomputed else function(weight)
        held = meter.level
        assert held == (1024 if recomputed else 2048)  # of the sine and the result, the input was there
        meter.take_peak()
        result.sum().backward()
        assert meter.take_peak() > held
        del result
        gc.collect()
        assert meter.level <= 8


def test_what_is_beside_tensors() -> None:
    pages = [0]
    with TensorMeter(lambda: pages[0]) as meter:
        pages[0] = 500
        kept = torch.zeros(KIB)
        pages[0] = 0
        assert kept.numel()
        assert meter.level == 1024
        assert meter.take_peak() == 1524


def test_nothing_is_followed_after_the_end() -> None:
    with TensorMeter() as meter:
        kept = torch.zeros(KIB)
    assert meter.level == 1024
    del kept
    more = torch.zeros(KIB)
    assert meter.level == 1024
    assert more.numel()
