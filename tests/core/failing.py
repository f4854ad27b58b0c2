"""Steps that run out of memory where and how a test wants it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.plan.run.retry import with_retries
from daf_core.snapshots.step import Snapshot
from tests.core.harness import Loss, gradients, trainable

CPU_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000 bytes."
ERRORS: dict[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "allocator": lambda: RuntimeError(CPU_TEXT),
    "python": MemoryError,
}


@dataclass
class Fuse:
    """Fails at the given attempts of a run, counted from 1.

    Attributes:
        place: "forward", after the model has run; "late", when backward has come to the first parameter.
        fails: The attempts that fail.
        error: What is raised.
        attempts: How many there were.
    """

    place: str
    fails: set[int]
    error: Callable[[], Exception] = ERRORS["device"]
    attempts: int = 0

    def attempt(self, model: nn.Module, loss_of: Loss, step: int, engine: ActivationEngine | None) -> Tensor:
        self.attempts += 1
        fails = self.attempts in self.fails
        if engine is not None and engine.audit_due:
            engine.audit(lambda: loss_of(model, step))
        if engine is None:
            loss = loss_of(model, step)
            self._burn(fails and self.place == "forward")
        else:
            with engine.compress():
                loss = loss_of(model, step)
                self._burn(fails and self.place == "forward")
        hook = trainable(model)[0].register_hook(lambda gradient: self._burn(fails and self.place == "late"))
        try:
            loss.backward()
        finally:
            hook.remove()
        return loss.detach()

    def _burn(self, fails: bool) -> None:
        if fails:
            raise self.error()


def train(
    model: nn.Module, loss_of: Loss, fuse: Fuse, config: DAFConfig | None, steps: int = 3, accumulate: int = 1
) -> tuple[list[Tensor], list[dict[str, int]]]:
    """Trains a copy of a model; returns all that may differ, and each step's bytes and codecs.

    Each optimizer step has as many forward and backward passes as `accumulate` says, each run again where it fails.
    """
    model = copy.deepcopy(model)
    engine = ActivationEngine(model, config) if config else None
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    torch.manual_seed(1)
    record: list[Tensor] = []
    statistics: list[dict[str, int]] = []
    for step in range(steps):
        for part in range(accumulate):
            number = step * accumulate + part
            record.append(
                with_retries(
                    lambda number=number: fuse.attempt(model, loss_of, number, engine),
                    Snapshot(model, engine.snapshot if engine else None),
                    lambda message: fuse.attempts in fuse.fails,
                )
            )
            if engine:
                assert (engine.held_bytes, engine.leased_pages) == (0, 0)
        record += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if engine:
            done = engine.finish_step()
            statistics.append(
                {"raw": done.raw_bytes, "held": done.held_bytes, "dropped": done.dropped_bytes, **done.stored_as}
            )
    state = [tensor.detach() for tensor in model.state_dict().values()]
    return [*record, *state, torch.get_rng_state()], statistics
