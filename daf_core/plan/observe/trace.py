"""One training pass, watched: what each part of it takes, in time and in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from daf_core import timing
from daf_core.autograd.torch_private import in_backward
from daf_core.engine import ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.model.blocks import Block
from daf_core.model.recompute import RecomputedBlock
from daf_core.plan.observe.meter import MemoryMeter
from daf_core.snapshots.gradients import gradients_aside

Kind = Literal["before", "forward", "head", "backward", "recompute"]

OUTSIDE = -1
"""The number of the call where no block is running."""


class Reading(NamedTuple):
    """What was counted when a phase began or ended.

    Attributes:
        seconds: The time.
        level: Bytes of tensors.
        held: Bytes of saved activations, packed or not.
        packed: Those on pages.
        lossy: Those that may lose more.
        raw: Bytes that autograd alone would have saved so far.
        codec: Seconds in packing and unpacking so far.
    """

    seconds: float
    level: int
    held: int
    packed: int
    lossy: int
    raw: int
    codec: float


@dataclass(frozen=True)
class Phase:
    """A part of a pass, without interruption.

    Attributes:
        kind: "before": before a block, or after the last one; "head": the beginning of backward, until it reaches a
            block.
        call: Number of the block's call, counted in the order of calls; `OUTSIDE` for none.
        start: At its beginning.
        end: At its end.
        peak: The most bytes of tensors meanwhile.
    """

    kind: Kind
    call: int
    start: Reading
    end: Reading
    peak: int

    @property
    def transient(self) -> int:
        """The most bytes of tensors meanwhile, without activations that autograd held at its beginning."""
        return self.peak - (self.start.held - self.start.packed)


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
        trace = _Trace(self._engine, meter)
        with ExitStack() as stack:
            for block in self._blocks if recompute else ():
                stack.callback(RecomputedBlock(block, trace.recompute).remove)
            stack.enter_context(self._engine.measurement.running(timed))
            stack.enter_context(gradients_aside(self._model))
            stack.enter_context(self._engine.synchronous_packing())  # as in planned steps
            for number, block in enumerate(self._blocks):
                stack.callback(block.module.register_forward_pre_hook(partial(trace.enter, number)).remove)
                stack.callback(block.module.register_forward_hook(trace.leave, always_call=True).remove)
            stack.enter_context(meter or nullcontext())
            with self._engine.compress():
                trace.begin("before")
                loss = loss_function()
            sizes = self._engine.pass_sizes
            trace.begin("head")
            loss.backward()
            trace.end()
            del loss
        self._engine.finish_step()
        return Observation(trace.phases, trace.blocks, sizes)


class _Trace:
    """Cuts a pass into phases."""

    def __init__(self, engine: ActivationEngine, meter: MemoryMeter | None) -> None:
        self.phases: list[Phase] = []
        self.blocks: list[int] = []
        self._engine = engine
        self._meter = meter
        self._kind: Kind | None = None
        self._call = OUTSIDE
        self._start: Reading | None = None

    def begin(self, kind: Kind, call: int = OUTSIDE) -> None:
        self.end()
        self._kind, self._call = kind, call
        self._start = self._read()

    def end(self) -> None:
        if self._kind is None or self._start is None:
            return
        peak = 0 if self._meter is None else self._meter.take_peak()
        self.phases.append(Phase(self._kind, self._call, self._start, self._read(), peak))
        self._kind = None

    def enter(self, block: int, _module: nn.Module, _inputs: object) -> None:
        if not in_backward():
            self.blocks.append(block)
            self.begin("forward", len(self.blocks) - 1)

    def leave(self, _module: nn.Module, _inputs: object, output: object) -> None:
        if in_backward():
            return
        call = len(self.blocks) - 1
        tensor = _first_with_gradient(output)
        if tensor is not None:
            tensor.register_hook(partial(self._reached, call))
        self.begin("before")

    def recompute(self, begins: bool) -> None:
        self.begin("recompute" if begins else "backward", self._call)

    def _reached(self, call: int, _gradient: Tensor) -> None:
        self.begin("backward", call)

    def _read(self) -> Reading:
        engine = self._engine
        level = 0 if self._meter is None else self._meter.level
        counted = (engine.held_bytes, engine.leased_pages * PAGE_BYTES, engine.lossy_bytes, engine.pass_raw_bytes)
        return Reading(timing.synchronized_time(), level, *counted, engine.codec_seconds)


def _first_with_gradient(output: object) -> Tensor | None:
    """Returns the first tensor of a block's output that a gradient will reach."""
    if isinstance(output, Tensor):
        return output if output.requires_grad else None
    items = list(output.values()) if isinstance(output, dict) else output
    if isinstance(items, list | tuple):
        return next((found for item in items if (found := _first_with_gradient(item)) is not None), None)
    return None
