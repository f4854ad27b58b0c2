"""Observes one training pass: the time and the memory of each part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from daf_core import timing
from daf_core.engine import ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.model.blocks import Block
from daf_core.model.recompute import RecomputedBlock
from daf_core.plan.observe.block_trace import BlockTrace, Kind, Phase, Reading
from daf_core.plan.observe.meter import MemoryMeter
from daf_core.snapshots.gradients import gradients_aside


@dataclass(frozen=True)
class Observation:
    """A pass.

    Attributes:
        phases: Its parts in order.
        blocks: The number of the block of each call.
        sizes: See `ActivationEngine.pass_sizes`.
    """

    phases: Sequence[Phase]
    blocks: Sequence[int]
    sizes: Any

    def of(self, call: int, *kinds: Kind) -> list[Phase]:
        """Returns the phases of a call that are of these kinds."""
        return [phase for phase in self.phases if phase.call == call and phase.kind in kinds]


class Observer:
    """Runs forward and backward passes of a model and watches its blocks.

    Training is not disturbed: `Measurement` says what is taken back, and gradients stay as they are.

    Args:
        model: The model.
        blocks: Its blocks.
        engine: Compresses what the passes save.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], engine: ActivationEngine) -> None:
        self._model = model
        self._blocks = blocks
        self._engine = engine

    def observe(
        self, loss_function: Callable[[], Tensor], recompute: bool, meter: MemoryMeter | None, timed: bool = True
    ) -> Observation:
        """Runs a pass.

        Args:
            loss_function: Returns the loss.
            recompute: Whether all blocks are recomputed.
            meter: Measures memory, which takes time; None for times.
            timed: See `Measurement.running`; the first pass of an engine is not.

        Raises:
            TraceError: See `Measurement.running`.
        """
        with ExitStack() as stack:
            trace = BlockTrace(self._blocks, lambda: self._read(meter))
            stack.callback(trace.close)
            for block in self._blocks if recompute else ():
                stack.callback(RecomputedBlock(block, trace.recompute).remove)
            stack.enter_context(self._engine.measurement.running(timed))
            stack.enter_context(gradients_aside(self._model))
            stack.enter_context(self._engine.synchronous_packing())  # as in planned steps
            stack.enter_context(meter or nullcontext())
            with self._engine.compress():
                trace.begin("before")
                loss = loss_function()
            sizes = self._engine.pass_sizes
            trace.begin("head")
            loss.backward()
            trace.begin("rest")
            del loss
        self._engine.finish_step()
        return Observation(trace.phases, [call.block for call in trace.calls], sizes)

    def _read(self, meter: MemoryMeter | None) -> Reading:
        engine = self._engine
        level, peak = (0, 0) if meter is None else (meter.level, meter.take_peak())
        counts = engine.leased_pages * PAGE_BYTES, engine.lossy_bytes, engine.pass_raw_bytes
        held = engine.held_bytes
        return Reading(timing.synchronized_time(), held, level, peak, *counts, engine.codec_seconds)
