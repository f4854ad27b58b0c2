"""Ways to keep activations for the backward pass that the benchmarks compare."""

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from daf_integrations.bench.process_memory import SavedTensorCounter

Precision = Literal["auto", "exact", 8, 4, 2, 1]

DAF_PRECISIONS: dict[str, Precision] = {
    "daf-auto": "auto",
    "daf-exact": "exact",
    "daf-8bit": 8,
    "daf-4bit": 4,
    "daf-2bit": 2,
    "daf-1bit": 1,
}
METHODS: tuple[str, ...] = ("plain", "checkpoint", *DAF_PRECISIONS)
"""Names of all methods; ``plain`` is the one that the others are compared with.

A DAF method may be given a memory budget, as in ``daf-4bit@40MB``, and a spill file, as in ``daf-4bit@40MB+spill``.
``daf-auto`` may be given a bound for the error of the gradient, as in ``daf-auto<0.05``, or ``daf-auto<0.05/5`` with an
audit every 5 steps. ``elastic@0.7`` trains what pays in 70% of the time, ``random@0.7`` what chance says and
``top-half@0.7`` the upper half of the blocks.
"""

_BUDGETED = re.compile(r"(?P<name>daf-\w+)@(?P<budget>[\w.]+)(?P<spill>\+spill)?")
_ELASTIC = re.compile(r"(?P<kind>elastic|random|top-half)@(?P<share>0?\.\d+)")
_BOUNDED = re.compile(r"daf-auto<(?P<bound>[\d.]+)(/(?P<every>\d+))?")


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
    audit_seconds: float = 0.0
    audited_error: float | None = None


class Method(Protocol):
    """What a training loop needs of a method."""

    def audit(self, batch: dict[str, Tensor], loss_function: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """Measures the error of the gradient on some rows of the batch, if the method does that now."""
        ...

    def compress(self) -> AbstractContextManager[object]:
        """Returns the context that forward and loss run in."""
        ...

    def update(self, optimizer: Optimizer) -> None:
        """Has the optimizer step, after backward."""
        ...

    def finish_step(self) -> None:
        """Ends a step."""
        ...

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        """Runs one more forward and backward pass and returns what it saved."""
        ...

    def figures(self) -> dict[str, float]:
        """Returns what the method logs about the run so far."""
        ...

    def close(self) -> None:
        """Undoes what the method did to the model."""
        ...


def is_method(name: str) -> bool:
    """Says whether `open_method` knows the name."""
    budgeted = _BUDGETED.fullmatch(name)
    budgeted_method = budgeted is not None and budgeted["name"] in DAF_PRECISIONS
    others = (_BOUNDED, _ELASTIC)
    return name in METHODS or budgeted_method or any(pattern.fullmatch(name) for pattern in others)


def time_share(name: str) -> float:
    """Returns the part of a plain step's time that a method's steps are to take."""
    elastic = _ELASTIC.fullmatch(name)
    return 1.0 if elastic is None else float(elastic["share"])


def open_method(name: str, model: nn.Module) -> Method:
    """Returns the named method, at work on the model.

    ``checkpoint`` is activation checkpointing of every block, non-reentrant. What counts as held there are
    the inputs of the blocks and what is saved outside of blocks; a block's activations, which exist again
    while backward recomputes that block, do not count.

    Args:
        name: One of ``METHODS``, or a DAF method with a budget.
        model: A model of ``benchmarks.models``.
    """
    if budgeted := _BUDGETED.fullmatch(name):
        spill_dir = tempfile.gettempdir() if budgeted["spill"] else None
        precision = DAF_PRECISIONS[budgeted["name"]]
        budget: dict[str, Any] = {"memory_budget": budgeted["budget"], "budget_covers": "activations"}
        return _Compressed(model, precision=precision, spill_dir=spill_dir, **budget)
    if bounded := _BOUNDED.fullmatch(name):
        every = {} if bounded["every"] is None else {"audit_every": int(bounded["every"])}
        return _Compressed(model, max_gradient_error=float(bounded["bound"]), **every)
    if elastic := _ELASTIC.fullmatch(name):
        from benchmarks.elastic_methods import ElasticMethod

        return ElasticMethod(model, elastic["kind"], float(elastic["share"]))
    if name in DAF_PRECISIONS:
        return _Compressed(model, precision=DAF_PRECISIONS[name])
    if name == "checkpoint":
        _enable_checkpointing(model)
    return _Uncompressed(model)


class _Uncompressed:
    """Leaves the saved tensors alone, and counts them when asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def audit(self, batch: dict[str, Tensor], loss_function: Callable[[dict[str, Tensor]], Tensor]) -> None:
        return

    def compress(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def finish_step(self) -> None:
        return

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        with SavedTensorCounter(self._model) as counter:
            loss = forward()
        loss.backward()
        return StoredBytes(raw_bytes=counter.bytes, held_bytes=counter.bytes)

    def figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return


class _Compressed:
    """Stores the saved tensors with DAF."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        # The other methods run without DAF.
        from daf_core import DAFConfig
        from daf_integrations.session import DAFSession

        self._model = model
        self._session = DAFSession(DAFConfig(**options))
        self._session.attach(model)

    def audit(self, batch: dict[str, Tensor], loss_function: Callable[[dict[str, Tensor]], Tensor]) -> None:
        self._session.audit(self._model, batch, loss_function)

    def compress(self) -> AbstractContextManager[object]:
        return self._session.scope()

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def finish_step(self) -> None:
        self._session.finish_step()

    def measure(self, forward: Callable[[], Tensor]) -> StoredBytes:
        with self.compress():
            loss = forward()
        loss.backward()
        step = self._session.finish_step()
        assert step is not None
        return StoredBytes(
            raw_bytes=step.raw_bytes,
            held_bytes=step.held_bytes,
            pack_seconds=step.pack_seconds,
            unpack_seconds=step.unpack_seconds,
            dropped_bytes=step.dropped_bytes,
            spilled_bytes=step.spilled_bytes,
            pager_seconds=step.pager_seconds,
            audit_seconds=self._session.totals.audit_seconds,
            audited_error=self._session.totals.gradient_error,
        )

    def figures(self) -> dict[str, float]:
        totals = self._session.totals
        return totals.metrics() | {"audits": totals.audits, "audits_above": totals.audits_above}

    def close(self) -> None:
        self._session.detach()


def _enable_checkpointing(model: nn.Module) -> None:
    from transformers.models.resnet.modeling_resnet import ResNetBasicLayer  # benchmarks of kernels run without it

    blocks = [module for module in model.modules() if isinstance(module, ResNetBasicLayer)]
    for block in blocks:  # transformers has no checkpointing for ResNet
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if not blocks:
        older_name = "gradient_checkpointing_enable"
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, older_name)
        enable({"use_reentrant": False})
