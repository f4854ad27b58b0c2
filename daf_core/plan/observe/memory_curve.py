"""The memory of tensors over one training step, as a curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from daf_core.autograd.torch_private import in_backward
from daf_core.engine import ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.plan.observe.meter import TensorMeter
from daf_core.snapshots.gradients import gradients_aside
from daf_core.snapshots.measurement import measuring


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


class RecordingMeter(TensorMeter):
    """Notes the level after each operator in `points`."""

    def __init__(self, beside: Callable[[], int] = int) -> None:
        super().__init__(beside)
        self.points: list[Point] = []
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since it was made."""
        return time.perf_counter() - self._started

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.points.append(Point(self.seconds, self.level))
        return result


def record_step(model: nn.Module, loss_function: Callable[[], Tensor], engine: ActivationEngine | None) -> MemoryCurve:
    """Runs a forward and a backward pass beside training, and follows the memory of tensors.

    Parameters, their gradients and the batch, which were there before, do not count.

    Args:
        model: The model.
        loss_function: Returns its loss.
        engine: Compresses what is saved, for the first time: its pool has the size of the pages in use then. None
            leaves it to autograd.
    """
    with measuring(model), gradients_aside(model):
        with RecordingMeter(int if engine is None else _pages_of(model, engine)) as meter:
            with nullcontext() if engine is None else engine.compress():
                loss = loss_function()
            forward_seconds = meter.seconds
            loss.backward()
            del loss
        return MemoryCurve(meter.points, forward_seconds)


def _pages_of(model: nn.Module, engine: ActivationEngine) -> Callable[[], int]:
    """Returns what tells the bytes of pages that no tensor accounts for: a GPU's pool is one of torch's tensors."""
    if next(model.parameters()).device.type != "cpu":
        return int

    def pages() -> int:
        # An operator of the forward pass may run while the pager takes pages, and has its lock.
        return engine.leased_pages * PAGE_BYTES if in_backward() else engine.resident_bytes

    return pages
