"""From measurements to figures: ratios within rounds, errors of gradients, and what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from daf_integrations.cli.bench.summary import (
    GradientComparison,
    Gradients,
    Reference,
    compare_gradients,
    compare_lora_gradients,
    paired_ratio,
    problem_of,
    summarize,
)
from daf_integrations.cli.bench.worker import DROPOUT, NO_DROPOUT, Measurement

MEASURED = Measurement(
    raw_bytes=100,
    held_bytes=100,
    pack_seconds=0.0,
    unpack_seconds=0.0,
    dropped_bytes=0,
    spilled_bytes=0,
    pager_seconds=0.0,
    audited_error=None,
    setup_rss_bytes=10,
    peak_bytes=1000,
    peak_rss_bytes=1000,
    step_seconds=1.0,
    device="cpu",
    dtype="fp32",
    allocator="glibc",
)
PLAIN = Gradients(2.0, {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})


def test_ratio_is_the_median_of_pairs() -> None:
    assert paired_ratio([2.0, 3.0, 40.0], [1.0, 2.0, 10.0]) == 2.0


@pytest.mark.parametrize(("values", "baseline"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_needs_pairs(values: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="pass one of each for every round"):
        paired_ratio(values, baseline)


def test_gradient_error_is_relative_over_all_parameters() -> None:
    found = {"b": torch.tensor([[4.0]]), "a": torch.tensor([0.0])}
    compared = compare_gradients(found, PLAIN.of)
    assert (compared.error, compared.cosine) == pytest.approx((3 / 5, 4 / 5))
    assert not compared.identical
    assert compare_gradients(PLAIN.of, PLAIN.of) == GradientComparison(error=0.0, cosine=1.0, identical=True)


def test_adapters_have_an_error_of_their_own() -> None:
    expected = {"layer.lora_A.weight": torch.ones(4), "classifier.weight": torch.full((4,), 1000.0)}
    found = expected | {"layer.lora_A.weight": torch.zeros(4)}
    compared = compare_lora_gradients(found, expected)
    assert compared is not None
    assert compared.error == 1.0
    assert compare_gradients(found, expected).error == pytest.approx(1e-3, rel=1e-3)
    assert compare_lora_gradients({"weight": torch.ones(1)}, {"weight": torch.ones(1)}) is None


@pytest.mark.parametrize(
    ("found", "message"), [({"b": torch.ones(1)}, r"\['a', 'b'\]"), ({"a": torch.ones(1)}, "gradient is zero")]
)
def test_gradients_must_be_comparable(found: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_gradients(found, {"a": torch.zeros(1)})


def moved(by: float) -> Gradients:
    return Gradients(2.0, {"a": torch.tensor([3.0 + by]), "b": torch.tensor([[4.0]])})


@pytest.mark.parametrize(
    ("method", "found", "problem"),
    [
        ("daf-4bit", moved(1.0), None),
        ("daf-exact", moved(1e-5), None),
        ("daf-exact", moved(1e-2), "it is to be exact, and its gradient differs from plain's by 0.002"),
        ("checkpoint", moved(1e-2), "it is to be exact"),
        ("bf16", moved(-20.0), "does not lead down"),
        ("bf16", moved(float("nan")), "its gradient is not finite"),
        ("bf16", replace(PLAIN, loss=2.1), "its loss is 2.1, and plain's is 2"),
        ("bf16", replace(PLAIN, loss=float("nan")), "its loss is nan"),
        ("bf16", Gradients(2.0, {}), "gradients of other parameters"),
        ("bf16", Gradients(2.0, {**PLAIN.of, "c": torch.ones(1)}), "gradients of other parameters"),
        ("elastic@0.5", Gradients(2.0, {"a": torch.tensor([3.0])}), None),
        ("daf-4bit", Gradients(2.0, {"a": torch.tensor([3.0])}), "gradients of other parameters"),
        ("elastic@0.5", Gradients(2.0, {"a": torch.tensor([3.1])}), "it is to be exact"),
    ],
)
def test_what_cannot_be_right_is_told(method: str, found: Gradients, problem: str | None) -> None:
    told = problem_of(method, found, PLAIN, 1e-4)
    assert told is None if problem is None else told is not None and problem in told


def test_figures_are_medians_and_ratios_are_within_rounds() -> None:
    plain = [replace(MEASURED, step_seconds=seconds, peak_bytes=10_000_000) for seconds in (1.0, 2.0, 10.0)]
    rounds = [
        replace(MEASURED, step_seconds=seconds, held_bytes=7, raw_bytes=7, peak_bytes=peak)
        for seconds, peak in ((2.0, 1_000_000), (3.0, 2_000_000), (40.0, 9_000_000))
    ]
    result = summarize("checkpoint", rounds, {DROPOUT: moved(0.0)}, Reference("plain", plain, {DROPOUT: PLAIN}))
    assert (result.raw_bytes, result.held_bytes) == (100, 7), "what plain saves is what checkpointing hides"
    assert (result.step_seconds, result.step_ratio) == (3.0, 2.0)
    assert (result.peak_bytes, result.peak_ratio) == (2_000_000, 0.2)
    assert result.gradients_identical
    assert result.problem is None
    assert [each["peak_bytes"] for each in result.rounds] == [1_000_000, 2_000_000, 9_000_000]


def test_where_plain_does_not_fit_something_exact_takes_its_place() -> None:
    counted = replace(MEASURED, raw_bytes=200)
    for name, raw in (("checkpoint", 0), ("daf-exact", 200)):
        reference = Reference(name, [counted], {DROPOUT: PLAIN})
        result = summarize("classic-4bit", [MEASURED], {DROPOUT: moved(-20.0)}, reference)
        assert result.raw_bytes == raw, "checkpointing does not know what plain training saves"
        assert result.problem is not None
        assert f"to {name}'s is" in result.problem


def test_rounding_of_bfloat16_is_larger() -> None:
    for dtype, wrong in (("fp32", True), ("bf16", False)):
        rounds = [replace(MEASURED, dtype=dtype)]
        result = summarize("daf-exact", rounds, {DROPOUT: moved(5e-3)}, Reference("plain", rounds, {DROPOUT: PLAIN}))
        assert (result.problem is not None) == wrong


def test_without_dropout_is_compared_with_that() -> None:
    undropped = Gradients(1.0, PLAIN.of)
    plain = Reference("plain", [MEASURED], {DROPOUT: PLAIN, NO_DROPOUT: undropped})
    assert summarize("daf-step@1MB", [MEASURED], {NO_DROPOUT: undropped}, plain).problem is None
    assert summarize("daf-step@1MB", [MEASURED], {NO_DROPOUT: PLAIN}, plain).problem is not None


def test_where_plain_takes_next_to_nothing_there_is_no_ratio_of_peaks() -> None:
    computed = {DROPOUT: PLAIN}
    assert summarize("plain", [MEASURED], computed, Reference("plain", [MEASURED], computed)).peak_ratio is None


def test_a_gradient_of_zeros_is_told() -> None:
    zeros = {DROPOUT: Gradients(2.0, {name: torch.zeros_like(each) for name, each in PLAIN.of.items()})}
    result = summarize("plain", [MEASURED], zeros, Reference("plain", [MEASURED], zeros))
    assert result.problem == "plain's gradient is zero everywhere, so that nothing can be compared"
    assert result.gradient_error is None
