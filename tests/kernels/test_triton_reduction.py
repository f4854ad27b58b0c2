"""Ranges of groups: every strategy gives what torch gives, and one of them is chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daf_kernels.triton import autotune
from daf_kernels.triton.autotune import Selector, problem_class
from daf_kernels.triton.reduction import CHUNK, LARGEST_FUSED, WIDTH, group_ranges, strategies
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal
from tests.kernels.harness import REFERENCE, layout_of
from tests.kernels.triton_device import DEVICE, TRITON

CPU = torch.device("cpu")


def check(values: Tensor, group: int) -> None:
    """Compares every strategy with torch; zeros of both signs are equal, NaNs too."""
    rows = values.float().view(-1, group)
    expected = torch.stack([rows.amin(1), rows.amax(1)])
    for strategy in strategies(group):
        found = torch.stack(group_ranges(values.to(DEVICE), group, strategy)).cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_ranges_are_those_of_torch(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype).reshape(-1).contiguous()
    check(values, values.numel())


@pytest.mark.parametrize("special", [math.nan, -math.nan, math.inf, -math.inf, -0.0])
@pytest.mark.parametrize("group", [WIDTH + 1, LARGEST_FUSED, CHUNK + 3])
def test_what_is_special_is_seen_anywhere_in_a_group(group: int, special: float) -> None:
    values = normal(3 * group)
    values[[group, 2 * group - 1]] = special
    check(values, group)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize(("groups", "group"), [(70, 5), (5, 1025), (2, 3 * CHUNK), (1, 66 * CHUNK + 1)])
def test_ranges_of_many_and_of_large_groups(groups: int, group: int, dtype: torch.dtype) -> None:
    check((normal(groups * group) - 5).to(dtype), group)


def test_groups_are_whole_and_strategies_known() -> None:
    with pytest.raises(ValueError, match="10 elements are no whole groups of 4"):
        group_ranges(torch.zeros(10), 4, "fused")
    with pytest.raises(ValueError, match="'atomic' is no strategy for groups of 5 elements; allowed: fused"):
        group_ranges(torch.zeros(10), 5, "atomic")


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_relative_ranges_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype)
    expected = REFERENCE.relative_range(values, layout_of(values))
    assert TRITON.relative_range(values.to(DEVICE), layout_of(values)) == pytest.approx(expected, nan_ok=True)


class Clock:
    """A timer that gives each way the time that a table says, and counts."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.calls = 0

    def __call__(self, way: Callable[[], str]) -> float:
        self.calls += 1
        return self.times[way()]


WAYS = {"rule": lambda: "rule", "other": lambda: "other"}


def test_the_fastest_way_is_measured_once(tmp_path: Path) -> None:
    clock, file = Clock({"rule": 2.0, "other": 1.0}), tmp_path / "deep" / "choices.json"
    selector = Selector(CPU, clock, file)
    assert selector.choose("problem", WAYS) == "other"
    measured = clock.calls
    assert selector.choose("problem", WAYS) == "other"
    assert Selector(CPU, clock, file).choose("problem", WAYS) == "other"
    assert clock.calls == measured > 0


def test_the_first_call_of_a_way_does_not_count() -> None:
    """It may compile."""
    taken: list[str] = []

    def timer(way: Callable[[], str]) -> float:
        name = way()
        taken.append(name)
        return 100.0 if taken.count(name) == 1 and name == "rule" else {"rule": 1.0, "other": 2.0}[name]

    assert Selector(CPU, timer).choose("problem", WAYS) == "rule"
    assert taken[:4] == ["rule", "other", "rule", "other"]


def test_without_a_timer_the_rule_decides() -> None:
    assert Selector(CPU).choose("problem", WAYS) == "rule"


def test_a_single_way_is_not_measured() -> None:
    clock = Clock({})
    assert Selector(CPU, clock).choose("problem", {"only": lambda: "only"}) == "only"
    assert not clock.calls


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"rule": 2.0, "other": 1.0})
    selector = Selector(CPU, clock)
    monkeypatch.setattr(autotune, "is_capturing", lambda: True)
    assert selector.choose("problem", WAYS) == "rule"
    assert not clock.calls
    monkeypatch.undo()
    assert selector.choose("problem", WAYS) == "other"


@pytest.mark.parametrize("content", ["", "[1]", '{"cpu": 3}', "\x00"])
def test_a_broken_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    assert Selector(CPU, Clock({"rule": 2.0, "other": 1.0}), file).choose("problem", WAYS) == "other"
    assert json.loads(file.read_text()) == {"cpu": {"problem": "other"}}


def test_a_choice_that_is_no_more_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text('{"cpu": {"problem": "gone"}, "another": {"problem": "rule"}}')
    assert Selector(CPU, Clock({"rule": 1.0, "other": 2.0}), file).choose("problem", WAYS) == "rule"
    assert json.loads(file.read_text())["another"] == {"problem": "rule"}


def test_a_folder_that_takes_no_file_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    selector = Selector(CPU, Clock({"rule": 2.0, "other": 1.0}), tmp_path / "file" / "choices.json")
    assert selector.choose("problem", WAYS) == "other"


def test_problems_of_about_one_size_are_one() -> None:
    assert problem_class("range", torch.bfloat16, 1000, 256) == problem_class("range", torch.bfloat16, 600, 300)
    assert problem_class("range", torch.bfloat16, 1000, 256) != problem_class("range", torch.bfloat16, 2000, 256)
    assert problem_class("range", torch.bfloat16, 1000, 256) != problem_class("range", torch.float16, 1000, 256)
