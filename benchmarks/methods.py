"""Ways to keep activations for the backward pass that the benchmarks compare."""

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer

from benchmarks.process_memory import SavedTensorCounter

Precision = Literal["exact", 8, 4, 2, 1]

DAF_PRECISIONS: dict[str, Precision] = {
    "daf-exact": "exact",
    "daf-8bit": 8,
    "daf-4bit": 4,
    "daf-2bit": 2,
    "daf-1bit": 1,
}
METHODS: tuple[str, ...] = ("plain", "checkpoint", *DAF_PRECISIONS)
"""Names of all methods; ``plain`` is the one that the others are compared with.

A DAF method may be given a memory budget, as in ``daf-4bit@40MB``, and a spill file, as in ``daf-4bit@40MB+spill``.
"""

_BUDGETED = re.compile(r"(?P<name>daf-\w+)@(?P<budget>[\w.]+)(?P<spill>\+spill)?")


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """Bytes of the activations saved in one step: as autograd saves them, and as they are held."""

    raw_bytes: int
    held_bytes: int
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    pager_seconds: float = 0.0


class Method(Protocol):
    """What a training loop needs of a method."""

    def compress(self) -> AbstractContextManager[object]:
        """Returns the context that forward and loss run in."""
        ...

    def finish_step(self) -> None:
        """Ends a step, after backward."""
        ...

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        """Runs one more forward and backward pass and returns what it saved."""
        ...

    def close(self) -> None:
        """Undoes what the method did to the model."""
        ...


def is_method(name: str) -> bool:
    """Says whether `open_method` knows the name."""
    budgeted = _BUDGETED.fullmatch(name)
    return name in METHODS or (budgeted is not None and budgeted["name"] in DAF_PRECISIONS)


def open_method(name: str, model: nn.Module) -> Method:
    """Returns the named method, at work on the model.

    ``checkpoint`` is activation checkpointing of every block, non-reentrant. What counts as held there are
    the inputs of the blocks and what is saved outside of blocks; a block's activations, which exist again
    while backward recomputes that block, do not count.

    Args:
        name: One of ``METHODS``, or a DAF method with a budget.
        model: A model of ``benchmarks.models``.
    """
    budgeted = _BUDGETED.fullmatch(name)
    if budgeted:
        return _Compressed(model, DAF_PRECISIONS[budgeted["name"]], budgeted["budget"], bool(budgeted["spill"]))
    if name in DAF_PRECISIONS:
        return _Compressed(model, DAF_PRECISIONS[name])
    if name == "checkpoint":
        _enable_checkpointing(model)
    return _Uncompressed(model)


class _Uncompressed:
    """Leaves the saved tensors alone, and counts them when asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def compress(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish_step(self) -> None:
        return

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        with SavedTensorCounter(self._model) as counter:
            loss = forward()
        loss.backward()
        return StoredBytes(raw_bytes=counter.bytes, held_bytes=counter.bytes)

    def close(self) -> None:
        return


class _Compressed:
    """Stores the saved tensors with DAF, at one precision or less where a budget asks for it."""

    def __init__(self, model: nn.Module, precision: Precision, budget: str | None = None, spill: bool = False) -> None:
        from daf_core import ActivationEngine, DAFConfig  # the other methods run without DAF

        spill_dir = tempfile.gettempdir() if spill else None
        self._engine = ActivationEngine(
            model, DAFConfig(precision=precision, memory_budget=budget, spill_dir=spill_dir)
        )

    def compress(self) -> AbstractContextManager[object]:
        return self._engine.compress()

    def finish_step(self) -> None:
        self._engine.finish_step()

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        with self.compress():
            loss = forward()
        loss.backward()
        step = self._engine.finish_step()
        return StoredBytes(
            raw_bytes=step.raw_bytes,
            held_bytes=step.held_bytes,
            pack_seconds=step.pack_seconds,
            unpack_seconds=step.unpack_seconds,
            dropped_bytes=step.dropped_bytes,
            spilled_bytes=step.spilled_bytes,
            pager_seconds=step.pager_seconds,
        )

    def close(self) -> None:
        self._engine.close()


def _enable_checkpointing(model: nn.Module) -> None:
    blocks = [module for module in model.modules() if isinstance(module, ResNetBasicLayer)]
    for block in blocks:  # transformers has no checkpointing for ResNet
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if not blocks:
        older_name = "gradient_checkpointing_enable"
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, older_name)
        enable({"use_reentrant": False})
