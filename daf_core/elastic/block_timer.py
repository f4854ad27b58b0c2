"""What each block of a model takes in a training step, read at its borders while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

from daf_core import timing
from daf_core.autograd.torch_private import call_after_backward, in_backward
from daf_core.batch.rows import tensors_in
from daf_core.model.blocks import Block
from daf_core.model.module_hooks import is_training_pass
from daf_core.plan.observe.trace import OUTSIDE, BlockTrace, Kind, Phase, Reading

if TYPE_CHECKING:
    from daf_core.plan.plan_file import PlanFile

UNTIMED_STEPS = 5  # steps in a row that should have been timed, and could not be, before a warning

log = getLogger("daf")


@dataclass
class StepTimes:
    """What a step took: seconds of each block and outside, and bytes that saved activations held in the last pass."""

    elements: int  # that the first block was given in all passes: times are compared for as many
    forward: list[float]  # of each block
    with_graph: list[bool]  # whether each block built a graph
    backward: list[float]  # of each block
    outside: float  # in forward and backward, outside of blocks
    rest: float  # outside of both, as the optimizer's
    held: list[int]  # of each block
    held_outside: int  # outside of blocks
    held_elements: int  # that the first block was given in the last pass


class TimedSteps:
    """Says what timed steps are to have taken, and once that steps cannot be timed, so that all train everything.

    The plan file, if there is one, has the times of an earlier run, and takes those that it does not have.
    """

    def __init__(self, plan_file: PlanFile | None = None) -> None:
        self.count = self._untimed = 0
        self._file = plan_file

    def add(self, times: StepTimes) -> StepTimes | None:
        """Returns what a step is to have taken, given what the clock says; None where it could not be timed."""
        if times.elements:
            self._untimed = 0
            self.count += 1
            return times if self._file is None else StepTimes(**self._file.times(self.count, asdict(times)))
        self._untimed += 1  # the model was not run in this step
        if self._untimed == UNTIMED_STEPS:
            log.warning(
                "elastic training saves nothing: %d steps in a row could not be timed, as the model's forward passes "
                "run inside of backward passes (as in gradient caching), or where DAF does not see them",
                self._untimed,
            )
        return None


class BlockTimer(BlockTrace):
    """Watches one step from its beginning to `stop`; `held` returns the bytes that saved activations hold now."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], held: Callable[[], int]) -> None:
        # Only forward counts bytes: in backward the engine would wait here for tensors that it still packs.
        self._held = held
        super().__init__(blocks, lambda: Reading(timing.synchronized_time(), 0 if in_backward() else held()))
        self._count = len(blocks)
        self._in_backward = False
        self._held_after_forward: dict[int, int] = {}
        self._hooks.watch(model, self._begin_pass, self._end_forward)
        self.begin("rest")

    @override
    def begin(self, kind: Kind, call: int = OUTSIDE) -> None:
        if kind == "backward":
            self._begin_backward()
        super().begin(kind, call)

    def stop(self) -> StepTimes:
        """Ends the step, and removes its hooks."""
        self.begin("rest")
        self.close()
        count, none = self._count, [0.0] * self._count
        graphs = [number in self.with_graph for number in range(count)]
        times = StepTimes(0, none, graphs, [*none], 0.0, 0.0, [0] * count, 0, 0)
        kinds: list[Kind] = ["rest", *(phase.kind for phase in self.phases), "rest"]
        for number, (phase, before, after) in enumerate(zip(self.phases, kinds, kinds[2:], strict=False)):
            # Lightning calls what is inside of the model: a pass may begin with a block.
            if phase.kind == "start" or before == "rest":
                times.held, times.held_outside, times.held_elements = [0] * count, 0, 0
            # The last phase of a forward pass goes on until backward reaches a block.
            held = phase.end.held if after in ("before", "forward") else self._held_after_forward.get(number)
            grown = 0 if held is None or phase.kind == "rest" else held - phase.start.held
            self._add(times, phase, grown)
        return times

    def _add(self, times: StepTimes, phase: Phase, grown: int) -> None:
        if phase.call != OUTSIDE:
            block, elements = self.calls[phase.call]
            (times.forward if phase.kind == "forward" else times.backward)[block] += phase.seconds
            times.held[block] += grown
            if phase.kind == "forward" and block == 0:
                times.elements += elements
                times.held_elements += elements
        elif phase.kind == "rest":
            times.rest += phase.seconds
        else:
            times.outside += phase.seconds
            times.held_outside += grown

    def _begin_pass(self, _arguments: Any) -> None:
        if is_training_pass():
            self._in_backward = False
            self.begin("start")

    def _end_forward(self, _arguments: Any, output: Any) -> None:
        if not is_training_pass():
            return
        self._held_after_forward[len(self.phases)] = self._held()
        results = [output] if isinstance(output, Tensor) else tensors_in(output)
        tensor = next((each for each in results if each.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _gradient: Tensor | None = None) -> None:
        """Has the pass end with its backward pass, whose first part belongs to the head until a block is reached."""
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._in_backward = False
        self.begin("rest")
