"""What `daf profile` finds out: which modules and operators the bytes of saved activations belong to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from daf_core.config import DAFConfig, Precision
from daf_core.engine import ActivationEngine
from daf_core.errors import ProfileError
from daf_core.plan.observe.memory_curve import MemoryCurve, record_step
from daf_core.saved_tensors.itemize import PACKING, SavedItem
from daf_core.snapshots.measurement import measuring
from daf_core.telemetry import StepStatistics
from daf_integrations.cli.workload import BuiltWorkload

MODEL = "(the model itself)"  # stands for what is saved outside of the modules inside of the model, such as by its loss

STAGES = ("building the model", "exact", "compressed", "memory without DAF", "memory with DAF")

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """What modules, or operators, save in a step."""

    # Qualified name of the module, with `*` for the numbers of those that are counted together; or the autograd node.
    name: str
    kind: str  # class of the modules; "" for operators
    count: int  # modules that are counted together; for operators, tensors that they save
    raw_bytes: int  # bytes that autograd alone keeps, each storage counted for who saves it first
    exact_bytes: int  # bytes that are held with ``precision="exact"``
    held_bytes: int  # bytes that are held with the precision that was asked for


class Pass(NamedTuple):
    """What a forward pass saved, and what the engine says of it."""

    items: list[SavedItem]
    statistics: StepStatistics


class Profile(NamedTuple):
    """What `profile_step` has found: rows, those with the most bytes first, and memory without DAF and with it."""

    modules: list[Row]
    operators: list[Row]
    exact: Pass
    held: Pass
    plain_curve: MemoryCurve
    curve: MemoryCurve


def profile_step(sized: BuiltWorkload, precision: Precision, begin: Callable[[str], None]) -> Profile:
    """Runs forward passes of a batch, exact and with a precision, and steps whose memory is followed.

    "auto" stands for what it begins with, before any audit; `begin` is told which of `STAGES` begins.

    Raises:
        ProfileError: The passes did not save as much.
    """
    begin(STAGES[1])
    exact = _pass(sized, "exact")
    begin(STAGES[2])
    held = _pass(sized, precision)
    sizes = [each.statistics.raw_bytes for each in (exact, held)]
    if sizes[0] != sizes[1]:
        raise ProfileError(
            f"two forward passes with the same batch and random numbers saved {sizes[0]} and {sizes[1]} bytes, so that "
            "they cannot be compared. Make the forward pass repeatable: it may use a random generator of its own, or "
            "keep state from pass to pass"
        )
    begin(STAGES[3])
    plain_curve = record_step(sized.model, lambda: sized.loss(sized.batch), None)
    begin(STAGES[4])
    with closing(_engine(sized, precision)) as engine:
        curve = record_step(sized.model, lambda: sized.loss(sized.batch), engine)
    return Profile(_module_rows(sized, exact, held), _operator_rows(exact, held), exact, held, plain_curve, curve)


def fold(rows: Sequence[Row], top: int) -> list[Row]:
    """Returns the first rows, and the sum of the others as one more where there are any."""
    shown, others = list(rows[:top]), rows[top:]
    return [*shown, total(f"({len(others)} more)", others)] if others else shown


def total(name: str, rows: Sequence[Row]) -> Row:
    """Returns the sum of rows."""
    sizes = [(row.count, row.raw_bytes, row.exact_bytes, row.held_bytes) for row in rows] or [(0, 0, 0, 0)]
    return Row(name, "", *map(sum, zip(*sizes, strict=True)))


def pattern(name: str) -> str:
    """Returns the name of a module with a `*` for each number in it: blocks that repeat have numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _engine(sized: BuiltWorkload, precision: Precision) -> ActivationEngine:
    return ActivationEngine(sized.model, DAFConfig(precision=precision, packing="device"))


def _pass(sized: BuiltWorkload, precision: Precision) -> Pass:
    with closing(_engine(sized, precision)) as engine:
        with measuring(sized.model), engine.itemized() as items, engine.compress():
            loss = sized.loss(sized.batch)
        items.name_operators(loss)
        return Pass(items.at_peak(), engine.finish_step())


def _module_rows(sized: BuiltWorkload, exact: Pass, held: Pass) -> list[Row]:
    kinds = {name: type(module).__name__ for name, module in sized.model.named_modules(remove_duplicate=False)}

    def key(item: SavedItem) -> tuple[str, str]:
        name = item.site.module
        return (PACKING.op, "") if item.site == PACKING else (pattern(name), kinds[name])

    modules: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for item in (*exact.items, *held.items):
        modules[key(item)].add(item.site.module)
    rows: list[Row] = []
    for (name, kind), sizes in _sums(exact, held, key).items():
        names = modules[name, kind]
        shown = next(iter(names)) or MODEL if len(names) == 1 and kind else name
        rows.append(Row(shown, kind, len(names), *sizes))
    return sorted(rows, key=_order)


def _operator_rows(exact: Pass, held: Pass) -> list[Row]:
    saves = Counter(item.operator for item in exact.items)
    sums = _sums(exact, held, lambda item: item.operator)
    return sorted((Row(name, "", saves[name], *sizes) for name, sizes in sums.items()), key=_order)


def _sums(exact: Pass, held: Pass, key_of: Callable[[SavedItem], Key]) -> dict[Key, list[int]]:
    """Returns raw, exact and held bytes."""
    sums: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0, 0])
    for item in exact.items:
        sums[key_of(item)][0] += item.raw_bytes
        sums[key_of(item)][1] += item.held_bytes
    for item in held.items:
        sums[key_of(item)][2] += item.held_bytes
    return sums


def _order(row: Row) -> tuple[int, int, int, str]:
    return -row.raw_bytes, -row.exact_bytes, -row.held_bytes, row.name
