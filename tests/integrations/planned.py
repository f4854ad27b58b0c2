"""Steps within a budget, made to do what a test is about: run in so many parts, or run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from daf_core.plan.search import planner

AMPLE = "1GB"
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."

Where = Literal["forward", "backward"]


@contextmanager
def in_parts(count: int) -> Generator[None]:
    """Leaves plans no other number of micro-batches, where a batch may be split."""
    before = planner._parts, planner._untouched
    planner._parts = lambda rows, splits: [count] if splits else [1]
    planner._untouched = lambda profile, batch, budget: None
    try:
        yield
    finally:
        planner._parts, planner._untouched = before


class OutOfMemory:
    """Runs out of memory once, in forward or where backward reaches a module near the input.

    Args:
        module: A module near the input.
        where: In which pass.
        due: Whether now is the time.
    """

    def __init__(self, module: nn.Module, where: Where, due: Callable[[], bool]) -> None:
        self.raised = 0
        self._where, self._due = where, due
        self._handle = module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, _inputs: object, output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if self._where == "forward":
            self._raise_if_due()
        else:
            tensor = output if isinstance(output, Tensor) else output[0]
            tensor.register_hook(self._in_backward)

    def _in_backward(self, _gradient: Tensor) -> None:
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._due() and not self.raised:
            self.raised += 1
            self._handle.remove()
            raise torch.OutOfMemoryError(TEXT)


class OtherReader:
    """Has another operator read what a module gives, in one instruction, from some step on.

    Args:
        module: A module near the input.
        due: Whether now is the time.
    """

    TIMES, WIDER = 8, 32
    """So often, and in tensors so many times wider, that they are most of a small model's activations."""

    def __init__(self, module: nn.Module, due: Callable[[], bool]) -> None:
        self._due = due
        self.remove = module.register_forward_hook(self._after_forward).remove

    def _after_forward(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        for time in range(self.TIMES):
            wide = output.repeat_interleave(self.WIDER, -1)
            # The backward of a sine may read few bits, that of the other one is not known to.
            output = output + (torch.sin, torch.erf)[time == 0 and self._due()](wide)[..., :: self.WIDER]
        return output
