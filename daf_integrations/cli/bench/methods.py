"""The methods that `daf bench` compares, by name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

from daf_core.config import Precision
from daf_core.errors import ConfigError
from daf_core.model.blocks import blocks_of
from daf_integrations.cli.bench.baselines import Offload, Stores, in_bfloat16, in_bits
from daf_integrations.cli.bench.process_memory import SavedTensorCounter, saved_by_graphs
from daf_integrations.loop import api
from daf_integrations.loop.training import training_of

DAF_PRECISIONS: dict[str, Precision] = {
    "daf-auto": "auto",
    "daf-exact": "exact",
    "daf-8bit": 8,
    "daf-4bit": 4,
    "daf-2bit": 2,
    "daf-1bit": 1,
}
CLASSIC_BITS = {"classic-8bit": 8, "classic-4bit": 4, "classic-2bit": 2}

METHODS: dict[str, str] = {
    "plain": "what torch does; the others are compared with it where it fits in memory",
    "checkpoint": "activation checkpointing of each block",
    "offload": "saved tensors in main memory, which do not count as held (torch.autograd.graph.save_on_cpu); GPUs only",
    "bf16": "saved tensors cast to bfloat16",
    **{name: f"{bits} bits between minimum and maximum, in torch operators" for name, bits in CLASSIC_BITS.items()},
    **{name: f'DAF with precision="{precision}"' for name, precision in DAF_PRECISIONS.items()},
    "daf-loss": 'the loss of a language model in chunks alone: DAF with precision="exact" and chunked_loss=True',
    "daf-4bit@40MB": "the same with a budget for saved activations; any precision and size",
    "daf-4bit@40MB+spill": "the same with a spill file for what does not fit",
    "daf-auto<0.05": "DAF with a bound for the error of the gradient; daf-auto<0.05/5 has an audit every 5 steps",
    "daf-step@600MB": "DAF with a budget for what a step takes beside the model, its gradients and the optimizer",
    "torch-budget@0.5": "with --compile: torch's activation_memory_budget, a share of what a compiled graph saves",
    "elastic@0.6": "elastic training within a share of the time, activations stored exactly",
}
"""Names of methods and what they are; sizes, bounds and shares are examples."""

_SIZE = r"@(?P<budget>\d+(\.\d+)?(?i:[kMG]?i?B))"
_STEP = re.compile(f"daf-step{_SIZE}")
_BUDGETED = re.compile(rf"(?P<name>daf-\w+){_SIZE}(?P<spill>(?i:\+spill))?")
_BOUNDED = re.compile(r"daf-auto<(?P<bound>0?\.\d*[1-9]\d*)(/(?P<every>[1-9]\d*))?")
_ELASTIC = re.compile(r"elastic@(?P<share>0?\.\d*[1-9]\d*)")
_TORCH_BUDGET = re.compile(r"torch-budget@(?P<share>0?\.\d*[1-9]\d*)")

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """Bytes that a step stored, and the seconds that storing cost.

    Attributes:
        raw_bytes: Bytes that autograd keeps of it without any method; 0 where the method does not know.
        pack_seconds: Time of the threads that train.
        dropped_bytes: Bytes given up to keep a budget.
        spilled_bytes: Bytes copied to a file, or to main memory, to keep it.
        pager_seconds: Time spent on keeping it.
        audited_error: Error of the gradient as DAF's last audit measured it.
    """

    raw_bytes: int
    held_bytes: int
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    pager_seconds: float = 0.0
    audited_error: float | None = None


class Method:
    """Runs the passes of training steps; with a store, saved tensors are kept in another form."""

    def __init__(
        self, model: nn.Module, store: Offload | Stores | None = None, undo: Callable[[], object] = lambda: None
    ) -> None:
        self._model, self._store, self._undo = model, store, undo

    def run(self, batch: Any, loss_of: Loss) -> Tensor:
        """Runs forward and backward pass of a step, which the optimizer's step ends; returns the loss, detached."""
        with nullcontext() if self._store is None else self._store.storing():
            loss = loss_of(batch)
        loss.backward()
        return loss.detach()

    def stored(self, batch: Any, loss_of: Loss) -> StoredBytes:
        """Returns what the last step stored, or runs one more to find out."""
        if self._store is not None:
            return StoredBytes(raw_bytes=0, held_bytes=self._store.held_bytes)
        if isinstance(self._model, OptimizedModule):
            loss = loss_of(batch)
            saved = saved_by_graphs(loss, self._model)
        else:
            with SavedTensorCounter(self._model) as counter:
                loss = loss_of(batch)
            saved = counter.bytes
        loss.backward()
        return StoredBytes(raw_bytes=saved, held_bytes=saved)

    def figures(self) -> dict[str, float]:
        """Returns what the method logs of the run so far."""
        return {}

    def close(self) -> None:
        """Leaves the model as it was."""
        self._undo()


class _DAF(Method):
    """Trains with DAF."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        training = training_of(api.prepare(model, **options))
        assert training is not None
        super().__init__(model, undo=training.stop)
        self._session = training.session

    def run(self, batch: Any, loss_of: Loss) -> Tensor:
        return api.step(self._model, batch, loss_of)

    def stored(self, batch: Any, loss_of: Loss) -> StoredBytes:
        last = self._session.last_step
        measured = {field.name: getattr(last, field.name) for field in fields(StoredBytes)[:-1]}
        return StoredBytes(**measured, audited_error=self._session.totals.gradient_error)

    def figures(self) -> dict[str, float]:
        totals = self._session.totals
        return totals.metrics() | {"audits": totals.audits, "audits_above": totals.audits_above}


def _checkpointed(model: nn.Module) -> Method:
    """Recomputes each block in the backward pass.

    What counts as held are the inputs of the blocks and what is saved outside of blocks; a block's activations, which
    exist again while backward recomputes that block, do not count. The peak has them.
    """
    for prefix in ("activation_checkpointing", "gradient_checkpointing"):  # transformers, and its older versions
        enable = getattr(model, f"{prefix}_enable", None)
        if enable is not None and getattr(model, "supports_gradient_checkpointing", True):
            enable({"use_reentrant": False})
            return Method(model, undo=getattr(model, f"{prefix}_disable"))
    blocks = [block.module for block in blocks_of(model)]
    if not blocks:
        raise ConfigError("the method 'checkpoint' finds no blocks in this model; leave it out")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return Method(model, undo=lambda: [delattr(block, "forward") for block in blocks])


def _within_torch_budget(model: nn.Module, share: float) -> Method:
    """Has graphs that are compiled from now on save a share of what they would save, and compute the rest again."""
    before = functorch.activation_memory_budget
    functorch.activation_memory_budget = share
    return Method(model, undo=partial(setattr, functorch, "activation_memory_budget", before))


def _classic(model: nn.Module, bits: int) -> Method:
    return Method(model, Stores(model, in_bits(bits, next(model.parameters()).device)))


@dataclass(frozen=True)
class Traits:
    """How to run and measure a method.

    Attributes:
        open: Puts it to work on a model.
        exact: Whether its gradients are those of plain training.
        settling: Steps before the first that counts; those of DAF have the audits of steps 1 and 3.
        alternates: Whether its steps differ by design, so that means over many steps count and not medians.
        partial: Whether a step may train a part of the parameters.
        splits: Whether it splits a batch, whose parts then have other dropout masks than the whole.
    """

    open: Callable[[nn.Module], Method]
    exact: bool = False
    settling: int = 2
    alternates: bool = False
    partial: bool = False
    splits: bool = False

    @property
    def can_be_reference(self) -> bool:
        """Whether others can be compared with it: it computes plain training's gradients of all parameters."""
        return self.exact and not self.partial


_NAMED: dict[str, Traits] = {
    "plain": Traits(Method, exact=True),
    "checkpoint": Traits(_checkpointed, exact=True),
    "offload": Traits(lambda model: Method(model, Offload(model)), exact=True),
    "bf16": Traits(lambda model: Method(model, Stores(model, in_bfloat16))),
    **{name: Traits(partial(_classic, bits=bits)) for name, bits in CLASSIC_BITS.items()},
    **{
        name: Traits(partial(_DAF, precision=precision), exact=precision == "exact", settling=3)
        for name, precision in DAF_PRECISIONS.items()
    },
    "daf-loss": Traits(partial(_DAF, precision="exact", chunked_loss=True), settling=3),
}


def _find(name: str) -> Traits | None:
    """Finds a method, whose name may hold a size, a bound or a share."""
    if found := _ELASTIC.fullmatch(name):
        trains = partial(_DAF, precision="exact", elastic={"time": float(found["share"])})
        return Traits(trains, exact=True, settling=12, alternates=True, partial=True)
    if found := _TORCH_BUDGET.fullmatch(name):
        return Traits(partial(_within_torch_budget, share=float(found["share"])), exact=True)
    if found := _STEP.fullmatch(name):
        return Traits(partial(_DAF, memory_budget=found["budget"]), settling=4, splits=True)
    if found := _BOUNDED.fullmatch(name):
        every = {} if found["every"] is None else {"audit_every": int(found["every"])}
        bounded = partial(_DAF, max_gradient_error=float(found["bound"]), **every)
        return Traits(bounded, settling=3, alternates=bool(every))
    if (found := _BUDGETED.fullmatch(name)) and found["name"] in DAF_PRECISIONS:
        free = _NAMED[found["name"]]
        spill = {"spill_dir": tempfile.gettempdir()} if found["spill"] else {}
        within = partial(free.open, memory_budget=found["budget"], budget_covers="activations", **spill)
        return replace(free, open=within)
    return _NAMED.get(name)


def is_method(name: str) -> bool:
    """Whether `open_method` knows the name."""
    return _find(name) is not None


def traits(name: str) -> Traits:
    """Returns how to run and measure the named method.

    Raises:
        ConfigError: There is none.
    """
    found = _find(name)
    if found is None:
        raise ConfigError(f"there is no method {name!r}; allowed are {', '.join(METHODS)}")
    return found


def open_method(name: str, model: nn.Module) -> Method:
    """Returns the named method, at work on a model that is to be trained.

    Raises:
        ConfigError: The method cannot be used here, or is not known.
        DAFError: DAF refuses the model.
    """
    return traits(name).open(model)


def parse_methods(
    text: str, known: Callable[[str], bool] = is_method, allowed: Iterable[str] = METHODS
) -> tuple[str, ...]:
    """Returns the methods of a comma-separated list; the message names those that are allowed.

    Raises:
        ConfigError: A name is unknown or repeated.
    """
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if not known(name)]
    if unknown:
        raise ConfigError(f"got {', '.join(map(repr, unknown))}; allowed are {', '.join(allowed)}; separated by commas")
    if len(set(names)) < len(names):
        raise ConfigError(f"got {text!r}, which repeats a method; name each one once")
    return names
