"""What each block of a model takes in a training step, read at its borders while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from daf_core import timing
from daf_core.autograd.torch_private import call_after_backward, in_backward
from daf_core.batch.rows import tensors_in
from daf_core.model.blocks import Block
from daf_core.model.module_hooks import InstanceHook

if TYPE_CHECKING:
    from daf_core.plan.plan_file import PlanFile

UNTIMED_STEPS = 5
"""Steps in a row that should have been timed, and could not be, before a warning."""

log = getLogger("daf")

OUTSIDE = -1
"""Stands for what is outside of blocks."""


@dataclass
class StepTimes:
    """What a step took, each in seconds.

    Attributes:
        elements: Elements that the first block was given in all passes: times are compared for as many.
        forward: Of each block.
        with_graph: Whether each block built a graph.
        backward: Of each block.
        outside: In forward and backward, outside of blocks.
        rest: Outside of both, as the optimizer's.
        held: Bytes that saved activations of each block held; those of the last pass.
        held_outside: The same, outside of blocks.
        held_elements: Elements that the first block was given in that pass.
    """

    elements: int
    forward: list[float]
    with_graph: list[bool]
    backward: list[float]
    outside: float
    rest: float
    held: list[int]
    held_outside: int
    held_elements: int


class TimedSteps:
    """Says what timed steps are to have taken, and once that steps cannot be timed, so that all train everything.

    Args:
        plan_file: Has the times of an earlier run, and takes those that it does not have; None for none.

    Attributes:
        count: Steps that were timed.
    """

    def __init__(self, plan_file: PlanFile | None = None) -> None:
        self.count = self._untimed = 0
        self._file = plan_file

    def add(self, times: StepTimes) -> StepTimes | None:
        """Returns what a step is to have taken; None where it could not be timed.

        Args:
            times: What the clock says.

        Raises:
            ConfigError: The file is of a model with other blocks, or cannot be written.
        """
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


class BlockTimer:
    """Watches one step, from its beginning to `stop`.

    Args:
        model: The model.
        blocks: Its blocks in the order in which they run.
        held: Returns the bytes that saved activations hold now.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], held: Callable[[], int]) -> None:
        count = len(blocks)
        self._times = StepTimes(0, [0.0] * count, [False] * count, [0.0] * count, 0.0, 0.0, [0] * count, 0, 0)
        self._held = held
        self._level = 0
        self._backward = False
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(InstanceHook(self._begin_pass)),
            model.register_forward_hook(InstanceHook(self._end_forward)),
        ]
        for number, block in enumerate(blocks):
            enter, leave = InstanceHook(partial(self._enter, number)), InstanceHook(partial(self._leave, number))
            self._handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(block.module.register_forward_hook(leave))
        self._phase: tuple[str, int] = ("rest", OUTSIDE)
        self._since = timing.synchronized_time()

    def stop(self) -> StepTimes:
        """Ends the step, and removes its hooks."""
        self._switch("rest")
        for handle in self._handles:
            handle.remove()
        return self._times

    def _switch(self, kind: str, block: int = OUTSIDE) -> None:
        now = timing.synchronized_time()
        before, number = self._phase
        spent, self._since, self._phase = now - self._since, now, (kind, block)
        if before == "rest":
            self._times.rest += spent
        elif number == OUTSIDE:
            self._times.outside += spent
        else:
            getattr(self._times, before)[number] += spent

    def _begin_pass(self, _model: nn.Module, _inputs: object) -> None:
        if not is_training_pass():
            return
        self._backward = False
        self._level = self._held()
        self._times.held, self._times.held_outside = [0] * len(self._times.held), 0
        self._times.held_elements = 0
        self._switch("forward")

    def _enter(self, block: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_training_pass():
            return
        if self._phase[0] == "rest":  # Lightning calls what is inside of the model
            self._begin_pass(_module, args)
        if block == 0:
            elements = next((each.numel() for each in tensors_in((args, kwargs))), 1)
            self._times.elements += elements
            self._times.held_elements += elements
        self._count(OUTSIDE)
        self._switch("forward", block)

    def _leave(self, block: int, _module: nn.Module, _inputs: object, output: object) -> None:
        if not is_training_pass():
            return
        self._count(block)
        tensor = next((each for each in tensors_in(output) if each.requires_grad), None)
        self._times.with_graph[block] = tensor is not None
        if tensor is not None:
            tensor.register_hook(partial(self._reached, block))
        self._switch("forward")

    def _end_forward(self, _model: nn.Module, _inputs: object, output: object) -> None:
        if not is_training_pass():
            return
        self._count(OUTSIDE)
        results = [output] if isinstance(output, Tensor) else tensors_in(output)
        tensor = next((each for each in results if each.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(self._begin_backward)

    def _count(self, block: int) -> None:
        before, self._level = self._level, self._held()
        if block == OUTSIDE:
            self._times.held_outside += self._level - before
        else:
            self._times.held[block] += self._level - before

    def _begin_backward(self, _gradient: Tensor) -> None:
        if not self._backward:
            self._backward = True
            call_after_backward(self._end_pass)

    def _reached(self, block: int, gradient: Tensor) -> None:
        self._begin_backward(gradient)
        self._switch("backward", block)

    def _end_pass(self) -> None:
        self._switch("rest")


def is_training_pass() -> bool:
    """Says whether a forward pass is one of training: not one that is recomputed, or without gradients."""
    return torch.is_grad_enabled() and not in_backward()
