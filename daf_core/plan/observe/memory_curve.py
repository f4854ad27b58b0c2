"""The memory of tensors over one training step, as a curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from daf_core.autograd.torch_private import in_backward
from daf_core.engine import ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.plan.observe.meter import TensorMeter
from daf_core.snapshots.measurement import measuring
from daf_core.snapshots.step import backward_beside, gradients_aside


class Point(NamedTuple):
    """A point of the curve: seconds since the step began, and bytes of tensors made since then and of pages in use.

    Watching each operator is part of the time.
    """

    seconds: float
    size: int


class MemoryCurve(NamedTuple):
    """A step: one point after each operator, and the time when the forward pass had ended."""

    points: list[Point]
    forward_seconds: float

    @property
    def peak(self) -> int:
        """The most bytes."""
        return max((point.size for point in self.points), default=0)


def record_step(model: nn.Module, loss_function: Callable[[], Tensor], engine: ActivationEngine | None) -> MemoryCurve:
    """Runs a forward and a backward pass beside training, and follows the memory of tensors.

    Parameters, their gradients and the batch, which were there before, do not count. The engine compresses what is
    saved, for the first time: its pool has the size of the pages in use then. None leaves it to autograd.
    """
    points: list[Point] = []
    beside = int if engine is None else _pages_of(model, engine)
    with measuring(model), gradients_aside(model):
        started = time.perf_counter()
        with TensorMeter(beside, lambda level: points.append(Point(time.perf_counter() - started, level))):
            with nullcontext() if engine is None else engine.compress():
                loss = loss_function()
            forward_seconds = time.perf_counter() - started
            backward_beside(loss, model.parameters())
            del loss
        return MemoryCurve(points, forward_seconds)


def _pages_of(model: nn.Module, engine: ActivationEngine) -> Callable[[], int]:
    """Returns what tells the bytes of pages that no tensor accounts for: a GPU's pool is one of torch's tensors."""
    if next(model.parameters()).device.type != "cpu":
        return int

    def pages() -> int:
        # An operator of the forward pass may run while the pager takes pages, and has its lock.
        return engine.leased_pages * PAGE_BYTES if in_backward() else engine.resident_bytes

    return pages
