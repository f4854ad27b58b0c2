"""Runs passes of a few rows of a batch, to measure what a step of a model costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from daf_core.config import DAFConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import ProfileError
from daf_core.memory.system.available import device_memory
from daf_core.memory.system.release import release_memory
from daf_core.model.blocks import Block, blocks_of
from daf_core.model.caches import LeftEmptyError, holds_state, is_cache, layers_of
from daf_core.model.layer_drop import all_layers
from daf_core.model.treatments import Treatments
from daf_core.plan.cost.profile import Observed, Profile, planned_bits
from daf_core.plan.observe.meter import meter_on
from daf_core.plan.observe.repeats import unlike_blocks
from daf_core.plan.observe.trace import Observation, observe
from daf_core.plan.run.retry import is_out_of_memory
from daf_core.readers.places import BATCH_NORMS
from daf_core.snapshots.step import devices_of

REPEATS = 2  # passes with few rows whose shortest times count; of those with many rows one is enough
LossOfRows = Callable[[int], Tensor]  # returns the loss of the first N rows of a batch


def measure(model: nn.Module, config: DAFConfig, loss_of: LossOfRows, rows: int, limit: int) -> Profile:
    """Measures a pass of one row, and one of as many as fit in `limit` bytes twice, up to half of the batch.

    Where one row has no loss, it is the fewest rows that have one, as they are doubled.

    The larger pass shows which costs do not grow with rows. It is that of the whole batch where no part of it has a
    loss. Blocks that run differently from pass to pass, such as
    experts, are left out, and the modules around them may be blocks instead. Blocks that a pass changes are left out
    too: a second pass would find them changed. So are those that compute something else when they run again, as where
    they read a state of their own. Layers that training skips at random all run. Nothing may be compressed or
    recomputed in the model meanwhile.

    Raises:
        ProfileError: There is no memory for a pass of the fewest rows, or no rows have a loss.
    """
    left_out: set[str] = set()
    unlike: set[str] = set()
    while True:
        blocks = blocks_of(model, left_out)
        # A block that holds experts needs its exact input: one that lost precision may send rows to other experts.
        blocks = [replace(block, routes=_contains(block, left_out)) for block in blocks]
        passes = _Passes(model, blocks, config, loss_of)
        try:
            with all_layers(model):
                observed = passes.few_and_many(rows, limit)
        except CheckpointError:  # one draws from a generator that its second run finds as the first has left it
            unlike |= {block.name for block in blocks}
            left_out |= unlike
            continue
        unsteady = _unsteady(observed)
        unlike |= passes.unlike
        changed = passes.unlike | {block.name for block in blocks if _contains(block, passes.changed)}
        if not unsteady and not changed:
            return Profile(blocks, *observed, changed=passes.changed, unlike=unlike)
        containers = {blocks[number].name.rpartition(".")[0] for number in unsteady}
        left_out |= changed | {block.name for block in blocks if block.name.rpartition(".")[0] in containers}


class _Passes:
    """Runs passes beside a model's training.

    For `changed` and `unlike` see `Measurement.repeated_changes` and `unlike_blocks`. Blocks that are unlike are not
    recomputed.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], config: DAFConfig, loss_of: LossOfRows) -> None:
        self._model, self._blocks, self._config, self._loss_of = model, blocks, config, loss_of
        self._caches = _LastingCaches()
        self.changed: set[str] = set()
        self.unlike: set[str] = set()

    def few_and_many(self, rows: int, limit: int) -> list[Observed]:
        # Batch normalization of one value has no statistics.
        least = min(2 if any(isinstance(each, BATCH_NORMS) for each in self._model.modules()) else 1, rows)
        while True:
            try:
                few = self._observe_within(least, REPEATS)
                break
            except LeftEmptyError:  # the next pass fills the cache
                continue
            except ProfileError:  # losses of pairs, which are rows of their own, are of 2 rows at the least
                if least == rows:
                    raise
                least = min(2 * least, rows)
        if few is None:
            raise ProfileError(
                f"memory ran out when a step of {least} of {rows} rows was measured, to plan for "
                f"memory_budget={self._config.memory_budget!r}. Free memory, or train on shorter texts or smaller "
                'images; budget_covers="activations" needs no measurement'
            )
        if _unsteady([few]):
            return [few]
        profile, many = Profile(self._blocks, few), least
        while 2 * many <= max(rows // 2, 2 * least) and profile.observed_peak(2 * many) <= limit:
            many *= 2
        many = min(many, rows)
        _, available = device_memory(next(self._model.parameters()).device)
        fits = many > least and profile.observed_peak(rows) <= available
        while many > least:
            with suppress(ProfileError):  # so many rows have no loss
                found = self._observe_within(many, 1)
                if found is not None:
                    return [few, found]
                fits = False
            many //= 2
        # With a constant of the batch's size, such as noise, a loss takes all rows, or one, with which it broadcasts:
        # nothing then says what grows with rows, and a step of 6 MB was taken for one of 1.8 GB.
        with suppress(ProfileError):
            found = self._observe_within(rows, 1) if fits else None
            if found is not None:
                return [few, found]
        return [few]

    def _observe_within(self, rows: int, repeats: int) -> Observed | None:
        """Returns None, and releases memory, if memory has run out."""
        try:
            return self._observe(rows, repeats)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory(devices_of(self._model))
        return None

    def _observe(self, rows: int, repeats: int) -> Observed:
        # The configuration that takes the fewest bytes: a pass with it counts those of others.
        least = planned_bits(self._config)[-1]
        plain = {"min_precision": None, "max_gradient_error": None, "memory_budget": None, "plan_file": None}
        config = replace(self._config, precision=least or "exact", spill_dir=None, packing="device", **plain)
        engine = ActivationEngine(self._model, config)
        device = next(self._model.parameters()).device

        def loss() -> Tensor:
            self._caches.begin_pass()
            return self._loss_of(rows)

        run = partial(observe, self._model, self._blocks, engine, loss)

        def pair(metered: bool) -> tuple[Observation, Observation]:
            engine.treat(Treatments())
            compressed = run(meter=meter_on(device) if metered else None)
            # From an input that lost precision some blocks compute something else than before.
            engine.treat(Treatments({block.name: True for block in self._blocks if block.needs_exact_input}))
            repeatable = [block for block in self._blocks if block.name not in self.unlike]
            return compressed, run(recomputed=repeatable, meter=meter_on(device) if metered else None)

        watched = self._caches.watched(self._blocks)
        try:
            run(timed=False)  # a first pass keeps some values until it is known who reads them
            self.changed |= engine.measurement.repeated_changes(loss)
            with engine.measurement.running():
                self.unlike |= unlike_blocks(self._blocks, loss)
            metered, timed = pair(True), [pair(False) for _ in range(repeats)]
            return Observed(rows, least, metered, timed)
        finally:
            watched.close()
            engine.close()


class _LastingCaches:
    """Notices that passes hand blocks a cache that an earlier one had: what they add to it is not taken back."""

    def __init__(self) -> None:
        self._earlier, self._now = WeakSet[Any](), WeakSet[Any]()

    def begin_pass(self) -> None:
        self._earlier |= self._now

    def watched(self, blocks: Sequence[Block]) -> ExitStack:
        """Looks at what blocks are given, until what it returns is closed."""
        stack = ExitStack()
        for block in blocks:
            note = partial(self._note, layers_of(block.module))
            stack.callback(block.module.register_forward_pre_hook(note, with_kwargs=True).remove)
        return stack

    def _note(self, layers: frozenset[int], _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for cache in filter(is_cache, (*args, *kwargs.values())):
            if cache in self._earlier:
                raise ProfileError(
                    f"the loss gives the model a {type(cache).__name__} that was there before, and each pass that is "
                    "measured would add to it. Make it in the loss function, or train with "
                    'budget_covers="activations", which needs no measurement'
                )
            if holds_state(cache, layers):
                self._now.add(cache)


def _contains(block: Block, names: set[str]) -> bool:
    return any(name.startswith(f"{block.name}.") for name in names)


def _unsteady(observed: Sequence[Observed]) -> set[int]:
    """Returns the numbers of blocks that ran differently from pass to pass, such as experts without rows."""
    passes = [each.blocks for these in observed for pair in (these.metered, *these.timed) for each in pair]
    unlike = [pair for calls in passes for pair in zip_longest(passes[0], calls) if pair[0] != pair[1]]
    return {block for pair in unlike for block in pair if block is not None}
