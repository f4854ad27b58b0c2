"""From measurements of single processes to the figures of a method, and whether what it computes is right."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf_integrations.cli.bench.methods import StoredBytes, traits
from daf_integrations.cli.bench.worker import Measurement

ROUND_FIELDS = ("step_seconds", "peak_bytes", "peak_rss_bytes")
MEDIANS = (
    *("held_bytes", "pack_seconds", "unpack_seconds", "dropped_bytes", "spilled_bytes", "pager_seconds"),
    *("setup_rss_bytes", *ROUND_FIELDS),
)
"""Figures of a method that are medians over its rounds."""

LARGEST_ROUNDING = 1e-4
"""Relative difference up to which two float32 computations of the same are equal: sums are taken in other orders."""

LARGEST_BF16_ROUNDING = 2e-3
"""The same under autocast to bfloat16; activations in 8 bits would already make a difference of 8e-3."""

LEAST_PEAK = 5_000_000  # bytes that the reference takes at least where ratios of peaks say something


@dataclass(frozen=True)
class Gradients:
    """The loss that a method computed, and its gradients by parameter name."""

    loss: float
    of: dict[str, Tensor]


class Reference(NamedTuple):
    """The method that others are compared with: its rounds, and what it computed with dropout and without."""

    method: str
    rounds: Sequence[Measurement]
    computed: Mapping[str, Gradients]


class GradientComparison(NamedTuple):
    """How far one gradient is from another: relative L2 error, cosine, and whether every bit is equal."""

    error: float
    cosine: float
    identical: bool


@dataclass(frozen=True, kw_only=True)
class MethodResult(StoredBytes):
    """The figures of one method, as they stand in the JSON file: medians over rounds; see `Measurement`.

    ``raw_bytes`` are 0 where neither the method nor the reference knows them.

    Attributes:
        problem: Why its results are wrong; None where they are right. Times of a method with a problem mean nothing.
        peak_ratio: Peak over the reference's in the same round; None where the reference takes next to nothing.
        step_ratio: Step time over the reference's in the same round.
        gradient_error: L2 norm of the difference from the reference's gradient over the norm of the reference's, over
            all parameters that the method trained in that step.
        lora_gradient_error: The error over adapters alone: the classifier of an encoder with random weights outweighs
            them. None without adapters.
        rounds: The measurements that the medians are of.
    """

    method: str
    problem: str | None
    setup_rss_bytes: int
    peak_bytes: int
    peak_rss_bytes: int
    peak_ratio: float | None
    step_seconds: float
    step_ratio: float
    gradient_error: float | None
    gradient_cosine: float | None
    lora_gradient_error: float | None
    gradients_identical: bool
    rounds: list[dict[str, float]]


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the median of the ratios of values to their baseline in the same round.

    Pairing cancels what changes from round to round, such as the clock of a shared machine.

    Raises:
        ValueError: If the two do not have one entry for each round.
    """
    if not values or len(values) != len(baseline):
        raise ValueError(
            f"got {len(values)} values and {len(baseline)} of the baseline; "
            "pass one of each for every round, at least one"
        )
    return statistics.median(value / base for value, base in zip(values, baseline, strict=True))


def compare_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> GradientComparison:
    """Compares gradients by parameter name, taken as one vector, in double precision.

    Raises:
        ValueError: If the names differ, or every expected gradient is zero.
    """
    if found.keys() != expected.keys():
        raise ValueError(
            f"got gradients of different parameters: {sorted(found.keys() ^ expected.keys())} are in one only; "
            "compare two runs of the same model"
        )
    own, theirs = (torch.cat([each[name].double().flatten() for name in expected]) for each in (found, expected))
    length = theirs.norm()
    if length == 0:
        raise ValueError("every expected gradient is zero, so no error relative to them exists; check the loss")
    return GradientComparison(
        error=float((own - theirs).norm() / length),
        cosine=float(torch.nn.functional.cosine_similarity(own, theirs, dim=0)),
        identical=all(torch.equal(found[name], expected[name]) for name in expected),
    )


def compare_lora_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> GradientComparison | None:
    """Compares the gradients of the LoRA adapters alone; None if there are no adapters."""
    adapters = {name for name in expected if "lora_" in name}
    if not adapters:
        return None
    return compare_gradients({name: found[name] for name in adapters}, {name: expected[name] for name in adapters})


def load_gradients(path: Path) -> dict[str, Gradients]:
    """Returns what a worker saved: what was computed with dropout, without, or both."""
    saved = torch.load(path, weights_only=True, map_location="cpu")
    return {kind: Gradients(each["loss"], each["gradients"]) for kind, each in saved.items()}


def problem_of(
    method: str, found: Gradients, expected: Gradients, rounding: float, reference: str = "plain"
) -> str | None:
    """Returns why what a method computed cannot be right; None where it can.

    What is stored for backward changes no loss. Methods that lose nothing have the reference's gradient; others have
    one that is finite and leads down.

    Args:
        method: Its name.
        found: What it computed, perhaps of a part of the parameters.
        expected: What the reference computed.
        rounding: Relative difference up to which two computations are equal.
        reference: Name of the method that it is compared with.
    """
    theirs, loss = f"{reference}'s", expected.loss
    if not abs(found.loss - loss) <= rounding * max(abs(loss), 1.0):  # not >: NaN is a problem, too
        return f"its loss is {found.loss:.6g}, and {theirs} is {loss:.6g}"
    known = bool(found.of) and found.of.keys() <= expected.of.keys()
    if not known or (found.of.keys() != expected.of.keys() and not traits(method).partial):
        return f"it has gradients of other parameters than {reference}"
    own = {name: expected.of[name] for name in found.of}
    if not any(gradient.any() for gradient in own.values()):
        return f"{theirs} gradient is zero everywhere, so that nothing can be compared"
    compared = compare_gradients(found.of, own)
    if not compared.error < float("inf"):
        return "its gradient is not finite"
    if traits(method).exact and compared.error > rounding:
        return f"it is to be exact, and its gradient differs from {theirs} by {compared.error:.2g} of its length"
    if compared.cosine <= 0:
        return f"its gradient does not lead down: the cosine of its angle to {theirs} is {compared.cosine:.2g}"
    return None


def summarize(
    method: str, rounds: Sequence[Measurement], computed: Mapping[str, Gradients], reference: Reference
) -> MethodResult:
    """Returns the figures of a method beside the reference; `computed` is by whether there was dropout."""

    def ratio(field: str) -> float:
        return paired_ratio(_each(rounds, field), _each(reference.rounds, field))

    rounding = LARGEST_ROUNDING if rounds[0].dtype == "fp32" else LARGEST_BF16_ROUNDING
    kind, found = next(iter(computed.items()))
    known = reference.computed[kind]
    expected = {name: known.of[name] for name in found.of if name in known.of}
    comparable = {name: found.of[name] for name in expected}
    alive = any(gradient.any() for gradient in expected.values())
    gradients = compare_gradients(comparable, expected) if alive else None
    adapters = compare_lora_gradients(comparable, expected) if alive else None
    # Checkpointing hides most of what autograd would save, and baselines count only what they hold.
    counted = ((method, rounds), (reference.method, reference.rounds))
    knowing = next((each for name, each in counted if name.startswith(("plain", "daf"))), None)
    medians: dict[str, Any] = {name: statistics.median(_each(rounds, name)) for name in MEDIANS}
    medians["raw_bytes"] = 0 if knowing is None else statistics.median(_each(knowing, "raw_bytes"))
    return MethodResult(
        **{name: int(value) if name.endswith("_bytes") else value for name, value in medians.items()},
        method=method,
        problem=problem_of(method, found, known, rounding, reference.method),
        peak_ratio=ratio("peak_bytes") if min(_each(reference.rounds, "peak_bytes")) >= LEAST_PEAK else None,
        step_ratio=ratio("step_seconds"),
        gradient_error=gradients.error if gradients else None,
        gradient_cosine=gradients.cosine if gradients else None,
        lora_gradient_error=adapters.error if adapters else None,
        gradients_identical=gradients is not None and gradients.identical,
        audited_error=rounds[-1].audited_error,
        rounds=[{field: getattr(measured, field) for field in ROUND_FIELDS} for measured in rounds],
    )


def _each(rounds: Sequence[Measurement], field: str) -> list[float]:
    return [getattr(measured, field) for measured in rounds]
