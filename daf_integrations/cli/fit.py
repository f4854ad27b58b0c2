"""Whether a model's training fits on a device: what a step takes, worked out without weights and without the device.

The model lies on torch's device "meta", where tensors have shapes and no values, and `TensorMeter` follows them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import click
import torch
from humanfriendly import format_size
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW

from daf_core.config import DAFConfig, Precision
from daf_core.engine import ActivationEngine
from daf_core.errors import ModelError
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.memory.system.available import beside_reserve
from daf_core.plan.cost.measure import measure
from daf_core.plan.observe.meter import TensorMeter
from daf_core.plan.observe.without_values import without_values
from daf_core.plan.run.runner import described
from daf_core.plan.search.planner import least_budget
from daf_core.rewrites.registry import OperatorRewrites
from daf_core.rewrites.while_training import rewrite_model
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.table import Context, unsupported_reasons
from daf_integrations.cli.bench.methods import open_method
from daf_integrations.cli.workload import BuiltWorkload, Workload, build

UNLIMITED = 1 << 62  # bytes; on "meta" passes of as many rows as one likes take none
SETTLING = 2  # passes until an engine knows the reader of each tensor, and its pool has its pages

LONGEST = 1 << 20  # tokens up to which texts are searched for models that know no longest one
NEAR = 1.05  # ratio to which the longest text is searched
FARTHEST = 32  # ratio of a length that is tried to the longest known one
STEP = 8  # tokens that lengths are multiples of

NOTE = (
    'Worked out on torch\'s device "meta", without weights. Peak: the most that a step takes beside weights and '
    "optimizer, with gradients. All: with both. One twentieth of the device stays free, for what its driver and its "
    "allocator take. The least memory_budget is for a plan that recomputes, compresses and splits as much as it can."
)


class Taken(NamedTuple):
    """The bytes of a step beside weights and optimizer.

    `peak` is the most at once, gradients among them. `activations` are saved for backward at the end of forward; None
    where that depends on a plan.
    """

    peak: int
    activations: int | None = None


class Device(NamedTuple):
    """A device of so many bytes; torch's optimizers update all weights at once on a GPU, and one by one on a CPU."""

    size: int
    is_gpu: bool = True

    @property
    def usable(self) -> int:
        """Bytes beside those that stay free."""
        return beside_reserve(self.size, self.size)


@dataclass(frozen=True)
class Standing:
    """The bytes that a training takes from its first step to its last, and those of its gradients.

    `updating` is the most that the optimizer's step takes: gradients, and what it computes.
    """

    weights: int
    optimizer: int
    gradients: int
    updating: int


class Row(NamedTuple):
    """What a treatment takes; `fits` says whether the whole of it does, `longest` tokens of a row that do, or 0."""

    treatment: str
    taken: Taken
    total: int
    fits: bool
    longest: int


Counts = Callable[[BuiltWorkload], Taken]
"""Counts a step with a batch of the model that it was made for."""


Treatment = Callable[[nn.Module], AbstractContextManager[Counts]]
"""Inside of what it returns a model's steps are treated so, and are counted by what it yields."""


def standing_of(model: nn.Module, device: Device) -> Standing:
    """Returns what training a model on "meta" takes whatever its batches, with AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    gradients = sum(parameter.nbytes for parameter in trained)
    optimizer = AdamW(trained, foreach=device.is_gpu)
    with TensorMeter() as meter:
        optimizer.step()
        state = meter.level
        meter.take_peak()
        optimizer.step()
        updating = gradients + meter.take_peak() - state
    model.zero_grad()
    return Standing(sum(each.nbytes for each in tensors.values()), state, gradients, updating)


@contextmanager
def uncompressed(model: nn.Module, name: str) -> Generator[Counts]:
    """A method of `daf bench` treats the model, and what autograd saves stays as it is."""
    method = open_method(name, model)
    try:
        yield partial(_count, model, None)
    finally:
        method.close()


@contextmanager
def compressed(model: nn.Module, bits: Precision) -> Generator[Counts]:
    """DAF stores all activations in so many bits, and rewrites what any training does."""
    config = DAFConfig(precision=bits, packing="device")
    undo = rewrite_model(config, model)
    engine = ActivationEngine(model, config)
    known = 0

    def count(sized: BuiltWorkload) -> Taken:
        nonlocal known
        while known < SETTLING:
            _count(model, engine, sized)
            known += 1
        return _count(model, engine, sized)

    try:
        yield count
    finally:
        engine.close()
        undo()


@contextmanager
def within_least_budget(model: nn.Module) -> Generator[Counts]:
    """DAF has the least budget that it makes a plan for: it recomputes, compresses and splits as much as it can."""
    config = DAFConfig()
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)

    def count(sized: BuiltWorkload) -> Taken:
        batch = described(model, sized.batch, sized.loss)
        whole = next(iter(unsupported_reasons(MICRO_BATCHES, Context(model, batch=sized.batch))), None)
        profile = measure(model, config, batch.loss_of, batch.rows, UNLIMITED)
        least = least_budget(profile, batch.size(batch.length), config, (whole or profile.whole) is None)
        return Taken(least + gradients)

    rewrites = OperatorRewrites(model)
    rewrites.apply()
    try:
        yield count
    finally:
        rewrites.undo()


TREATMENTS: dict[str, Treatment] = {
    "plain": partial(uncompressed, name="plain"),
    "checkpointing": partial(uncompressed, name="checkpoint"),
    "DAF, 8 bits": partial(compressed, bits=8),
    "DAF, 4 bits": partial(compressed, bits=4),
    "DAF, least budget": within_least_budget,
}


def _count(model: nn.Module, engine: ActivationEngine | None, sized: BuiltWorkload) -> Taken:
    """Counts a step. The engine's pool keeps its pages from step to step: they count from beginning to end."""
    with TensorMeter() as meter, nullcontext() if engine is None else engine.synchronous_packing():
        with nullcontext() if engine is None else engine.compress():
            loss = sized.loss(sized.batch)
        pages = 0 if engine is None else engine.leased_pages * PAGE_BYTES
        held = meter.level
        loss.backward()
        del loss
        peak = meter.take_peak()
    if engine is not None:
        engine.finish_step()
    model.zero_grad()
    return Taken(peak + pages, held + pages)


def row_of(name: str, sized: BuiltWorkload, standing: Standing, device: Device) -> Row:
    """Returns what a treatment takes with a batch, and the longest row that fits."""
    beside = standing.weights + standing.optimizer

    def total(taken: Taken) -> int:
        return beside + max(taken.peak, standing.updating)

    with TREATMENTS[name](sized.model) as count:
        taken = count(sized)
        known = {0: total(Taken(0)), length_of(sized): total(taken)}
        most = most_tokens(sized.model)
        longest = longest_row(lambda length: total(count(with_length(sized, length))), known, most, device.usable)
    return Row(name, taken, total(taken), total(taken) <= device.usable, longest)


def longest_row(total: Callable[[int], int], known: dict[int, int], most: int, room: int) -> int:
    """Returns the most tokens of a row that fit in so many bytes, to a ratio of `NEAR`; 0 where none do.

    Bytes grow with the length, nearly in proportion: each try is on the line through the two nearest known lengths.

    Args:
        total: Returns the bytes of a step with rows of so many tokens.
        known: These of two lengths or more, one of them 0; it gets those that are tried.
        most: Tokens of a row at most.
        room: Bytes.
    """
    if known[0] > room:
        return 0
    while True:
        low = max(length for length, size in known.items() if size <= room)
        high = min((length for length, size in known.items() if size > room), default=0)
        if low >= most or (high and high <= max(NEAR * low, low + STEP)):
            return low
        guess = max(_guess(known, low, high, room) // STEP * STEP, low + STEP)
        following = min(guess, high - 1 if high else most)
        known[following] = total(following)


def _guess(known: dict[int, int], low: int, high: int, room: int) -> int:
    """Returns where the line through two lengths has the room's bytes: those on its two sides, or the two longest."""
    if not high:
        before = max(length for length in known if length < low)
        rise = (known[low] - known[before]) / (low - before)
        return int(min(low + (room - known[low]) / rise if rise > 0 else 2 * low, FARTHEST * low))
    guess = low + (room - known[low]) * (high - low) / (known[high] - known[low])
    # A line between two sides may creep up to the end from one of them alone.
    edge = (high - low) // 16
    return int(min(max(guess, low + edge), high - edge))


def most_tokens(model: nn.Module) -> int:
    """Returns the longest row that a model knows positions of, or `LONGEST`."""
    named = _named_positions(model)
    if named is None:
        return LONGEST
    tables = _tables_of_positions(model, named)
    return named - max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def check_length(sized: BuiltWorkload, workload: Workload) -> None:
    """Refuses rows that are longer than a table of positions: without values no operator looks for the place in it.

    Raises:
        ModelError: They are.
    """
    named, most = _named_positions(sized.model), most_tokens(sized.model)
    if named is not None and _tables_of_positions(sized.model, named) and workload.length > most:
        raise ModelError(
            f"{workload.model} knows positions of {most} tokens, and --length is {workload.length}; pass a smaller one"
        )


def _named_positions(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    named = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    return named if isinstance(named, int) else None


def _tables_of_positions(model: nn.Module, positions: int) -> list[nn.Embedding]:
    return [each for each in model.modules() if isinstance(each, nn.Embedding) and each.num_embeddings == positions]


def length_of(sized: BuiltWorkload) -> int:
    """Returns the tokens of a row."""
    return max(tensor.shape[1] for tensor in sized.batch.values() if tensor.dim() > 1)


def with_length(sized: BuiltWorkload, length: int) -> BuiltWorkload:
    """Returns the same model with rows of another length, on "meta"."""

    def resized(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() < 2 else tensor.new_empty((len(tensor), length))

    return replace(sized, batch={name: resized(tensor) for name, tensor in sized.batch.items()})


def show_fit(workload: Workload, device: Device, as_json: bool) -> None:
    """Prints what fits; exits with 1 where nothing does.

    Raises:
        ModelError: There is no such model, or it does not do the task.
    """
    with without_values(drops_fused=device.is_gpu):
        sized = build(workload, "meta")
        check_length(sized, workload)
        standing = standing_of(sized.model, device)
        rows = [row_of(name, sized, standing, device) for name in TREATMENTS]
    if as_json:
        click.echo(json.dumps(_as_dict(sized, standing, device, rows), indent=2))
    else:
        _print(sized, standing, device, rows, Console())
    if not any(row.fits for row in rows):
        raise SystemExit(1)


def _as_dict(sized: BuiltWorkload, standing: Standing, device: Device, rows: Sequence[Row]) -> dict[str, object]:
    return {
        "task": sized.task,
        "dtype": sized.dtype,
        "device": {**device._asdict(), "usable_bytes": device.usable},
        "longest_known": most_tokens(sized.model),
        **{f"{name}_bytes": size for name, size in asdict(standing).items()},
        "treatments": [
            {
                "treatment": row.treatment,
                "activation_bytes": row.taken.activations,
                "peak_bytes": row.taken.peak,
                "total_bytes": row.total,
                "fits": row.fits,
                "longest": row.longest,
            }
            for row in rows
        ],
    }


def _print(sized: BuiltWorkload, standing: Standing, device: Device, rows: Sequence[Row], console: Console) -> None:
    console.print(
        f"Weights {format_size(standing.weights)}, gradients {format_size(standing.gradients)}, "
        f"AdamW {format_size(standing.optimizer)}",
        highlight=False,
    )
    batch = len(next(iter(sized.batch.values())))
    table = Table("", "activations", "peak", "all", f"fits {format_size(device.size)}", "longest row")
    table.title = f"{batch} x {length_of(sized)} tokens, {sized.dtype}"
    for row in rows:
        held = "-" if row.taken.activations is None else format_size(row.taken.activations)
        sizes = held, format_size(row.taken.peak), format_size(row.total)
        table.add_row(row.treatment, *sizes, "yes" if row.fits else "no", f"{row.longest:,}" if row.longest else "-")
    console.print(table)
    console.print(
        f"{sized.task}; the model knows rows of up to {most_tokens(sized.model):,} tokens. {NOTE}",
        markup=False,
        highlight=False,
        style="dim",
    )
