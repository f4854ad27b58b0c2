"""Cuts training passes into phases at the borders of a model's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from daf_core.batch.rows import tensors_in
from daf_core.model.blocks import Block
from daf_core.model.module_hooks import CallHooks, is_training_pass

Kind = Literal["rest", "start", "before", "forward", "head", "backward", "recompute"]
"""What runs in a phase. "rest": nothing of a pass; "before": what runs before a block or after the last one; "start":
the same at the beginning of a pass, where passes are told apart; "head": backward, until it reaches a block."""

OUTSIDE = -1
"""Stands for a block's or a call's number where no block is running."""


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
