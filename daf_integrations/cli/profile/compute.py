"""What `daf profile` finds out: which modules and operators the bytes of saved activations belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from daf_core.config import DAFConfig, Precision
from daf_core.engine import ActivationEngine
from daf_core.errors import ModelError, ProfileError
from daf_core.plan.observe.memory_curve import MemoryCurve, record_step
from daf_core.saved_tensors.itemize import PACKING, SavedItem
from daf_core.snapshots.measurement import measuring
from daf_core.telemetry import StepStatistics
from daf_integrations.cli.workload.build import BuiltWorkload

MODEL = "(the model itself)"
"""Stands for what is saved outside of the modules inside of the model, such as by its loss."""

STAGES = ("building the model", "exact", "compressed", "memory without DAF", "memory with DAF")

Key = TypeVar("Key", bound=Hashable)

Begin = Callable[[str], None]
"""Is told which of `STAGES` begins."""


@dataclass(frozen=True)
class Row:
    """What modules, or operators, save in a step.

    Attributes:
        name: Qualified name of the module, with `*` for the numbers of those that are counted together; or the
            autograd node.
        kind: Class of the modules; "" for operators.
        count: Modules that are counted together; for operators, tensors that they save.
        raw_bytes: Bytes that autograd alone keeps, each storage counted for who saves it first.
        exact_bytes: Bytes that are held with ``precision="exact"``.
        held_bytes: Bytes that are held with the precision that was asked for.
    """

    name: str
    kind: str
    count: int
    raw_bytes: int
    exact_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Pass:
    """What a forward pass saved, and what the engine says of it."""

    items: list[SavedItem]
    statistics: StepStatistics


@dataclass(frozen=True)
class Profile:
    """What `profile_step` has found.

    Attributes:
        modules: A row for each kind of module that saves anything; those with the most bytes first.
        operators: A row for each kind of autograd node.
        exact: The pass with ``precision="exact"``.
        held: The pass with the precision that was asked for.
        plain_curve: Memory of a step without DAF.
        curve: Memory of a step with it.
    """

    modules: list[Row]
    operators: list[Row]
    exact: Pass
    held: Pass
    plain_curve: MemoryCurve
    curve: MemoryCurve


def profile_step(sized: BuiltWorkload, precision: Precision, begin: Begin) -> Profile:
    """Runs forward passes of a batch, exact and with a precision, and steps whose memory is followed.

    Args:
        sized: The model and the batch.
        precision: As `DAFConfig.precision`; "auto" stands for what it begins with, before any audit.
        begin: Is told how far it is.

    Raises:
        ModelError: The loss has no gradient.
        ProfileError: The passes did not save as much.
    """
    begin(STAGES[1])
    exact = _pass(sized, "exact")
    begin(STAGES[2])
    held = _pass(sized, precision)
    _check_alike(exact, held)
    begin(STAGES[3])
    plain_curve = record_step(sized.model, lambda: sized.loss(sized.batch), None)
    begin(STAGES[4])
    engine = _engine(sized, precision)
    try:
        curve = record_step(sized.model, lambda: sized.loss(sized.batch), engine)
    finally:
        engine.close()
    modules, operators = _module_rows(sized.model, exact, held), _operator_rows(exact, held)
    return Profile(modules, operators, exact, held, plain_curve, curve)


def fold(rows: Sequence[Row], top: int) -> list[Row]:
    """Returns the first rows, and the sum of the others as one more where there are any."""
    shown, others = list(rows[:top]), rows[top:]
    if not others:
        return shown
    return [*shown, total(f"({len(others)} more)", others)]


def total(name: str, rows: Sequence[Row]) -> Row:
    """Returns the sum of rows."""
    sizes = zip(*((row.count, row.raw_bytes, row.exact_bytes, row.held_bytes) for row in rows), strict=True)
    return Row(name, "", *(sum(column) for column in sizes))


def pattern(name: str) -> str:
    """Returns the name of a module with a `*` for each number in it: blocks that repeat have numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _engine(sized: BuiltWorkload, precision: Precision) -> ActivationEngine:
    return ActivationEngine(sized.model, DAFConfig(precision=precision, packing="device"))


def _pass(sized: BuiltWorkload, precision: Precision) -> Pass:
    engine = _engine(sized, precision)
    try:
        with measuring(sized.model), engine.itemized() as items, engine.compress():
            loss = sized.loss(sized.batch)
        if not loss.requires_grad:
            raise ModelError("no gradient flows from the loss to the model; return the loss itself, not loss.detach()")
        items.name_operators(loss)
        return Pass(items.at_peak(), engine.finish_step())
    finally:
        engine.close()


def _check_alike(exact: Pass, held: Pass) -> None:
    """Refuses passes that cannot be shown side by side, as they did not save as much."""
    sizes = [passed.statistics.raw_bytes for passed in (exact, held)]
    if sizes[0] != sizes[1]:
        raise ProfileError(
            f"two forward passes with the same batch and random numbers saved {sizes[0]} and {sizes[1]} bytes, so that "
            "they cannot be compared. Make the forward pass repeatable: it may use a random generator of its own, or "
            "keep state from pass to pass"
        )


@dataclass
class _Sum:
    """The sum of items: the bytes of a `Row`, the modules that saved them, and how many they are."""

    modules: set[str] = field(default_factory=set[str])
    saves: int = 0
    raw: int = 0
    exact: int = 0
    held: int = 0


def _module_rows(model: nn.Module, exact: Pass, held: Pass) -> list[Row]:
    kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}

    def key(item: SavedItem) -> tuple[str, str]:
        name = item.site.module
        return (PACKING.op, "") if item.site == PACKING else (pattern(name), kinds[name])

    rows: list[Row] = []
    for (name, kind), found in _sums(exact, held, key).items():
        if len(found.modules) == 1 and kind:
            name = next(iter(found.modules)) or MODEL
        rows.append(Row(name, kind, len(found.modules), found.raw, found.exact, found.held))
    return sorted(rows, key=_order)


def _operator_rows(exact: Pass, held: Pass) -> list[Row]:
    sums = _sums(exact, held, lambda item: item.operator)
    rows = [Row(name, "", found.saves, found.raw, found.exact, found.held) for name, found in sums.items()]
    return sorted(rows, key=_order)


def _sums(exact: Pass, held: Pass, key_of: Callable[[SavedItem], Key]) -> dict[Key, _Sum]:
    sums: defaultdict[Key, _Sum] = defaultdict(_Sum)
    for item in exact.items:
        found = sums[key_of(item)]
        found.modules.add(item.site.module)
        found.saves += 1
        found.raw += item.raw_bytes
        found.exact += item.held_bytes
    for item in held.items:
        found = sums[key_of(item)]
        found.modules.add(item.site.module)
        found.held += item.held_bytes
    return sums


def _order(row: Row) -> tuple[int, int, int, str]:
    return -row.raw_bytes, -row.exact_bytes, -row.held_bytes, row.name
