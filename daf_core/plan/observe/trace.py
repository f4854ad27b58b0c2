"""Observes training passes, cut into phases at the borders of a model's blocks: the time and the memory of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from daf_core import timing
from daf_core.batch.rows import tensors_in
from daf_core.engine import ActivationEngine
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.model.blocks import Block
from daf_core.model.module_hooks import CallHooks, is_training_pass
from daf_core.model.recompute import RecomputedBlock
from daf_core.plan.observe.meter import MemoryMeter
from daf_core.snapshots.step import gradients_aside, other_gradients_aside

Kind = Literal["rest", "start", "before", "forward", "head", "backward", "recompute"]
"""What runs in a phase. "rest": nothing of a pass; "before": what runs before a block or after the last one; "start":
the same at the beginning of a pass, where passes are told apart; "head": backward, until it reaches a block."""

OUTSIDE = -1  # stands for a block's or a call's number where no block is running


class Reading(NamedTuple):
    """What was counted at the border of two phases; bytes where nothing else is said."""

    seconds: float  # the time
    held: int  # of saved activations, packed or not
    level: int = 0  # of tensors
    peak: int = 0  # of tensors, the most since the border before
    packed: int = 0  # of saved activations on pages
    lossy: int = 0  # of saved activations that may lose more precision
    raw: int = 0  # that autograd alone would have saved so far
    codec: float = 0.0  # seconds in packing and unpacking so far


class Phase(NamedTuple):
    """An uninterrupted part of a pass: what runs in it, for which call (`OUTSIDE`: none), and readings around it."""

    kind: Kind
    call: int
    start: Reading
    end: Reading

    @property
    def seconds(self) -> float:
        """Its time."""
        return self.end.seconds - self.start.seconds

    @property
    def transient(self) -> int:
        """The most bytes of tensors in it, without activations that autograd held at its beginning."""
        return self.end.peak - (self.start.held - self.start.packed)


class Call(NamedTuple):
    """A call of a block: the block's number, and elements of the first tensor that the block was given."""

    block: int
    elements: int


class BlockTrace:
    """Watches the blocks of a model until `close`; `read` returns the counts of now."""

    def __init__(self, blocks: Sequence[Block], read: Callable[[], Reading]) -> None:
        self.calls: list[Call] = []
        self.phases: list[Phase] = []
        self.with_graph: set[int] = set()  # numbers of the blocks whose last call built a graph
        self._read = read
        self._running: tuple[Kind, int, Reading] | None = None
        self._hooks = CallHooks()
        self.close = self._hooks.remove
        for number, block in enumerate(blocks):
            self._hooks.watch(block.module, partial(self._enter, number), partial(self._leave, number))

    def begin(self, kind: Kind, call: int = OUTSIDE) -> None:
        """Ends the phase that is running, if any, and begins another."""
        now = self._read()
        if self._running is not None:
            self.phases.append(Phase(*self._running, now))
        self._running = kind, call, now

    def recompute(self, begins: bool) -> None:
        """Notes that the block whose backward pass is running begins or ends its recomputation."""
        self.begin("recompute" if begins else "backward", OUTSIDE if self._running is None else self._running[1])

    def _enter(self, block: int, arguments: Any) -> None:
        if is_training_pass():
            self.calls.append(Call(block, next((each.numel() for each in tensors_in(arguments)), 1)))
            self.begin("forward", len(self.calls) - 1)

    def _leave(self, block: int, _arguments: Any, output: Any) -> None:
        if not is_training_pass():
            return
        tensor = next((each for each in tensors_in(output) if each.requires_grad), None)
        self.with_graph.discard(block)
        if tensor is not None:
            self.with_graph.add(block)
            tensor.register_hook(partial(self._reached, len(self.calls) - 1))
        self.begin("before")

    def _reached(self, call: int, _gradient: Tensor) -> None:
        self.begin("backward", call)


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
    recomputed: Collection[Block] = (),
    meter: MemoryMeter | None = None,
    timed: bool = True,
) -> Observation:
    """Runs a forward and backward pass of a model beside its training, and watches its blocks.

    Those that are `recomputed` run again in backward. A meter measures memory, which takes time; None is for times. For
    `timed`, and errors, see `Measurement.running`; the first pass of an engine is not timed.
    """

    def read() -> Reading:
        level, peak = (0, 0) if meter is None else (meter.level, meter.take_peak())
        counts = engine.leased_pages * PAGE_BYTES, engine.lossy_bytes, engine.pass_raw_bytes
        held = engine.held_bytes
        return Reading(timing.synchronized_time(), held, level, peak, *counts, engine.codec_seconds)

    with ExitStack() as stack:
        trace = BlockTrace(blocks, read)
        stack.callback(trace.close)
        for block in recomputed:
            stack.callback(RecomputedBlock(block, trace.recompute).remove)
        stack.enter_context(engine.measurement.running(timed))
        stack.enter_context(gradients_aside(model))
        stack.enter_context(engine.synchronous_packing())  # as in planned steps
        stack.enter_context(meter or nullcontext())
        with engine.compress():
            trace.begin("before")
            loss = loss_function()
        sizes = engine.pass_sizes
        trace.begin("rest")
        stack.enter_context(other_gradients_aside(loss, model.parameters()))
        trace.begin("head")
        loss.backward()
        trace.begin("rest")
        del loss
    engine.finish_step()
    return Observation(trace.phases, [call.block for call in trace.calls], sizes)
