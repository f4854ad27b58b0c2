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
    """A pass: its phases in order, the number of the block of each call, and `ActivationEngine.pass_sizes`."""

    phases: Sequence[Phase]
    blocks: Sequence[int]
    sizes: Any

    def of(self, call: int, *kinds: Kind) -> list[Phase]:
        """Returns the phases of a call that are of these kinds."""
        return [phase for phase in self.phases if phase.call == call and phase.kind in kinds]


def observe(
    model: nn.Module,
    blocks: Sequence[Block],
    engine: ActivationEngine,
    loss_function: Callable[[], Tensor],
    *,
    recompute: bool = False,
    meter: MemoryMeter | None = None,
    timed: bool = True,
) -> Observation:
    """Runs a forward and backward pass of a model beside its training, and watches its blocks.

    Args:
        model: The model; `Measurement` takes back what the pass changes, and gradients stay as they are.
        blocks: Its blocks; with `recompute` all of them are recomputed.
        engine: Compresses what the pass saves.
        loss_function: Returns the loss.
        recompute: See `blocks`.
        meter: Measures memory, which takes time; None for times.
        timed: See `Measurement.running`, also for errors; the first pass of an engine is not.
    """

    def read() -> Reading:
        level, peak = (0, 0) if meter is None else (meter.level, meter.take_peak())
        counts = engine.leased_pages * PAGE_BYTES, engine.lossy_bytes, engine.pass_raw_bytes
        held = engine.held_bytes
        return Reading(timing.synchronized_time(), held, level, peak, *counts, engine.codec_seconds)

    with ExitStack() as stack:
        trace = BlockTrace(blocks, read)
        stack.callback(trace.close)
        for block in blocks if recompute else ():
            stack.callback(RecomputedBlock(block, trace.recompute).remove)
        stack.enter_context(engine.measurement.running(timed))
        stack.enter_context(gradients_aside(model))
        stack.enter_context(engine.synchronous_packing())  # as in planned steps
        stack.enter_context(meter or nullcontext())
        with engine.compress():
            trace.begin("before")
            loss = loss_function()
        sizes = engine.pass_sizes
        trace.begin("head")
        loss.backward()
        trace.begin("rest")
        del loss
    engine.finish_step()
    return Observation(trace.phases, [call.block for call in trace.calls], sizes)
