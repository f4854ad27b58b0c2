"""What each treatment of each block costs, in time and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from daf_core.autograd.sites import Site
from daf_core.codecs.plane_importance import LEVELS
from daf_core.plan.observe.trace import OUTSIDE, Observation, Phase

RANDOM_STATES = 10_112
"""Bytes of the states of torch's generator that a block keeps which is recomputed, one of the checkpoint and one of
`Recomputation`."""

DEARER = 1.001
"""Of two treatments that take the same time the more exact one is to be taken, though it takes more bytes."""

Numbers = npt.NDArray[np.float64]


class Treatment(IntEnum):
    """What happens to the activations of a block."""

    KEEP = 0
    COMPRESS = 1
    RECOMPUTE = 2
    RECOMPUTE_COMPRESSED = 3
    OFF = 4
    """It builds no graph, as nothing up to it is trained in the step: for elastic training, not to be chosen."""

    @property
    def recomputes(self) -> bool:
        """Whether the block is computed once more in backward."""
        return self in (Treatment.RECOMPUTE, Treatment.RECOMPUTE_COMPRESSED)

    @property
    def packs(self) -> bool:
        """Whether what is saved, of the block or as its input, is compressed."""
        return self in (Treatment.COMPRESS, Treatment.RECOMPUTE_COMPRESSED)


@dataclass(frozen=True)
class Costs:
    """What a pass with so many rows costs, for each treatment; arrays end with a dimension for `Treatment`.

    The first row of those for calls is what is outside of blocks, which is never recomputed: that is infinitely dear.

    Attributes:
        seconds: Of forward and backward, of each call.
        held: Bytes that are held of it for backward.
        forward_peak: Bytes of tensors at most while it runs, above what earlier calls hold.
        backward_peak: The same in backward, above what it and earlier calls hold.
        between: Bytes of tensors at most before each call, and after the last one, above what earlier calls hold.
    """

    seconds: Numbers
    held: Numbers
    forward_peak: Numbers
    backward_peak: Numbers
    between: Numbers


def costs_of(names: Sequence[str], compressed: Observation, recomputed: Observation, bits: int | None) -> Costs:
    """Returns the memory that a pass takes, and its time, from how it was observed.

    Args:
        names: Names of the model's blocks.
        compressed: A pass with everything compressed.
        recomputed: A pass of as many rows with all blocks recomputed from compressed inputs.
        bits: Precision that is planned with; None where nothing loses precision.
    """
    calls = len(compressed.blocks)
    packed = _Packed(names, compressed, bits)
    inputs = _Packed(names, recomputed, None if bits is None else LEVELS[-1])
    rows = [_outside(compressed, packed)]
    rows += [_of_call(call, compressed, recomputed, packed, inputs) for call in range(calls)]
    seconds, held, forward, backward = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    before = [phase for phase in compressed.phases if phase.kind == "before"]
    return Costs(seconds, held, forward, backward, np.array([phase.peak - phase.kept for phase in before], np.float64))


def between(few: Costs, many: Costs, share: float) -> Costs:
    """Returns costs on the line through those of few (share 0) and of many rows (share 1); none is negative."""
    values = {}
    for field in fields(Costs):
        first, second = getattr(few, field.name), getattr(many, field.name)
        second = np.maximum(first, second)  # more rows take no less, whatever clocks say
        with np.errstate(invalid="ignore"):  # infinities stay what they are
            values[field.name] = np.where(np.isinf(first), first, np.maximum(first + share * (second - first), 0))
    seconds = values["seconds"]
    for dearer in (Treatment.COMPRESS, Treatment.RECOMPUTE):  # beyond what was measured, lines with noise may cross
        seconds[:, dearer] = np.maximum(seconds[:, dearer], DEARER * seconds[:, Treatment.KEEP])
    exact, lossy = Treatment.RECOMPUTE, Treatment.RECOMPUTE_COMPRESSED
    seconds[:, lossy] = np.maximum(seconds[:, lossy], DEARER * seconds[:, exact])
    return Costs(**values)


class _Packed:
    """Bytes that activations take on pages, or are too small for them, at a precision."""

    def __init__(self, names: Sequence[str], observation: Observation, bits: int | None) -> None:
        self._observation = observation
        self._lossy = [0.0] * (len(names) + 1)
        if bits is not None:
            owners = {name: number for number, name in enumerate(names)}
            for site, sizes in observation.sizes.items():
                self._lossy[_owner(site, owners)] += sizes[LEVELS.index(bits)]

    def of(self, call: int, phases: Sequence[Phase]) -> float:
        """Returns the bytes that were added in these phases, but for the lossy part at the precision."""
        grown = sum(phase.end.held - phase.start.held - (phase.end.lossy - phase.start.lossy) for phase in phases)
        if call == OUTSIDE:
            return grown + self._lossy[OUTSIDE]
        block = self._observation.blocks[call]
        return grown + self._lossy[block] / self._observation.blocks.count(block)


def _owner(site: Site, owners: dict[str, int]) -> int:
    """Returns the number of the block that a site is in; `OUTSIDE` for none."""
    name = site.module
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition(".")[0]
    return OUTSIDE


def _outside(compressed: Observation, packed: _Packed) -> tuple[list[float], ...]:
    """Returns what is outside of blocks: seconds, held bytes, peaks, for each treatment."""
    before, head = compressed.of(OUTSIDE, "before"), compressed.of(OUTSIDE, "head")
    seconds = sum(_seconds(phase) for phase in (*before, *head))
    codec = sum(phase.end.codec - phase.start.codec for phase in (*before, *head))
    never = [np.inf] * (len(Treatment) - 2)
    raw = sum(phase.end.raw - phase.start.raw for phase in before)
    peak = max((phase.peak - phase.kept for phase in head), default=0)
    held = [raw, packed.of(OUTSIDE, before)]
    return [seconds - codec, seconds, *never], [*held, *never], [0, 0, *never], [peak, peak, *never]


def _of_call(
    call: int, compressed: Observation, recomputed: Observation, packed: _Packed, inputs: _Packed
) -> tuple[list[float], ...]:
    """Returns what a call of a block takes: seconds, held bytes, peaks, for each treatment."""
    forward, again = compressed.of(call, "forward"), recomputed.of(call, "forward")
    backward = compressed.of(call, "backward")
    twice, recompute = recomputed.of(call, "backward", "recompute"), recomputed.of(call, "recompute")
    raw = sum(phase.end.raw - phase.start.raw for phase in forward)
    raw_input = sum(phase.end.raw - phase.start.raw for phase in again)
    saved = sum(phase.end.level - phase.start.level for phase in recompute)
    inside = max((phase.peak - phase.start.level for phase in recompute), default=0)
    peak_twice, start = _peak(twice), sum(phase.start.level for phase in forward)
    recomputing = sum(map(_seconds, again)) + sum(map(_seconds, twice))
    keeping, packing = recomputing - sum(map(_seconds, recompute)), sum(map(_seconds, (*forward, *backward)))
    keeping = min(keeping, packing / DEARER)  # packing only adds to it, but clocks have noise
    seconds = [keeping, max(packing, DEARER * keeping), max(recomputing, DEARER * keeping)]
    held = [raw, packed.of(call, forward), raw_input + RANDOM_STATES, inputs.of(call, again) + RANDOM_STATES]
    computing = _peak(again)
    forward_peaks = [max(start + inside, computing), _peak(forward), computing, computing, computing]
    backward_peaks = [max(peak_twice - saved, 0), _peak(backward), peak_twice, peak_twice, 0]
    return [*seconds, DEARER * seconds[-1], sum(map(_seconds, again))], [*held, 0], forward_peaks, backward_peaks


def _seconds(phase: Phase) -> float:
    return phase.end.seconds - phase.start.seconds


def _peak(phases: Sequence[Phase]) -> float:
    return max((phase.peak - phase.kept for phase in phases), default=0)
