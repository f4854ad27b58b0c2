"""From measurements of single processes to the figures of a method."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import paired_ratio
from benchmarks.worker import GpuMeasurement, Measurement

ROUND_FIELDS = ("step_seconds", "peak_rss_bytes")
DEVICE_FIELDS = ("loaded_device_bytes", "peak_device_bytes")


@dataclass(frozen=True, kw_only=True)
class GradientComparison:
    """How far one gradient is from another: relative L2 error, cosine, and whether every bit is equal."""

    error: float
    cosine: float
    identical: bool


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """The figures of one method, as they stand in the JSON file.

    ``raw_bytes`` is what autograd saves without DAF, ``held_bytes`` what the method holds of it,
    ``peak_rss_bytes`` the peak above the loaded model, and above the ``setup_rss_bytes`` of code that it loaded,
    ``step_ratio`` the median over rounds of the step time over that of ``plain`` in the same round.
    ``gradient_error`` and ``gradient_cosine`` are over all trained parameters; the classifier of an encoder with
    random weights outweighs its adapters there, so these have figures of their own, or None without adapters.
    ``dropped_bytes``, ``spilled_bytes`` and ``pager_seconds`` are what a memory budget costs in a step,
    ``audit_seconds`` what all audits of a round took, and ``audited_error`` what the last one found.
    ``rounds`` has the measurements that the medians are of.
    """

    method: str
    raw_bytes: int
    held_bytes: int
    setup_rss_bytes: int
    peak_rss_bytes: int
    step_seconds: float
    step_ratio: float
    gradient_error: float
    gradient_cosine: float
    lora_gradient_error: float | None
    lora_gradient_cosine: float | None
    gradients_identical: bool
    pack_seconds: float
    unpack_seconds: float
    dropped_bytes: int
    spilled_bytes: int
    pager_seconds: float
    audit_seconds: float
    audited_error: float | None
    rounds: list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class GpuMethodResult(MethodResult):
    """The figures of one method on a GPU; its device's bytes are those of ``GpuMeasurement``."""

    loaded_device_bytes: int
    peak_device_bytes: int


def compare_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> GradientComparison:
    """Compares the gradients of all parameters, taken as one vector, in double precision.

    Args:
        found: Gradients by parameter name.
        expected: The gradients to compare with, by the same names.

    Raises:
        ValueError: If the names differ, or every expected gradient is zero.
    """
    if found.keys() != expected.keys():
        raise ValueError(
            f"got gradients of different parameters: {sorted(found.keys() ^ expected.keys())} are in one only; "
            "compare two runs of the same model"
        )
    found_vector = _concatenate(found[name] for name in expected)
    expected_vector = _concatenate(expected.values())
    length = expected_vector.norm()
    if length == 0:
        raise ValueError("every expected gradient is zero, so no error relative to them exists; check the loss")
    return GradientComparison(
        error=float((found_vector - expected_vector).norm() / length),
        cosine=float(torch.nn.functional.cosine_similarity(found_vector, expected_vector, dim=0)),
        identical=all(torch.equal(found[name], expected[name]) for name in expected),
    )


def compare_lora_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> GradientComparison | None:
    """Compares the gradients of the LoRA adapters alone; None if there are no adapters."""
    adapters = {name for name in expected if "lora_" in name}
    if not adapters:
        return None
    return compare_gradients({name: found[name] for name in adapters}, {name: expected[name] for name in adapters})


def load_gradients(path: Path) -> dict[str, Tensor]:
    """Returns the gradients that a worker saved."""
    return torch.load(path, weights_only=True, map_location="cpu")


def summarize(
    method: str,
    rounds: Sequence[Measurement],
    plain_rounds: Sequence[Measurement],
    gradients: GradientComparison,
    lora_gradients: GradientComparison | None,
) -> MethodResult:
    """Returns the figures of a method: medians over its rounds.

    Checkpointing hides most of what autograd would save, so its raw bytes are those counted for ``plain``.
    """
    seconds = [measured.step_seconds for measured in rounds]
    raw = plain_rounds if method == "checkpoint" else rounds
    on_gpu = all(isinstance(measured, GpuMeasurement) for measured in rounds)
    kind, fields = (GpuMethodResult, DEVICE_FIELDS) if on_gpu else (MethodResult, ())
    return kind(
        method=method,
        raw_bytes=int(_median(raw, "raw_bytes")),
        held_bytes=int(_median(rounds, "held_bytes")),
        setup_rss_bytes=int(_median(rounds, "setup_rss_bytes")),
        peak_rss_bytes=int(_median(rounds, "peak_rss_bytes")),
        step_seconds=statistics.median(seconds),
        step_ratio=paired_ratio(seconds, [measured.step_seconds for measured in plain_rounds]),
        gradient_error=gradients.error,
        gradient_cosine=gradients.cosine,
        lora_gradient_error=lora_gradients.error if lora_gradients else None,
        lora_gradient_cosine=lora_gradients.cosine if lora_gradients else None,
        gradients_identical=gradients.identical,
        pack_seconds=_median(rounds, "pack_seconds"),
        unpack_seconds=_median(rounds, "unpack_seconds"),
        dropped_bytes=int(_median(rounds, "dropped_bytes")),
        spilled_bytes=int(_median(rounds, "spilled_bytes")),
        pager_seconds=_median(rounds, "pager_seconds"),
        audit_seconds=_median(rounds, "audit_seconds"),
        audited_error=rounds[-1].audited_error,
        rounds=[{field: getattr(measured, field) for field in (*ROUND_FIELDS, *fields)} for measured in rounds],
        **{field: int(_median(rounds, field)) for field in fields},
    )


def _median(rounds: Sequence[Measurement], field: str) -> float:
    return statistics.median(getattr(measured, field) for measured in rounds)


def _concatenate(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])
