"""The precision of each site: what is planned from errors and bytes, when, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from daf_core import DAFConfig, StateError
from daf_core.autograd.sites import Site
from daf_core.codecs.plane_importance import LEVELS, SiteErrors
from daf_core.precision.calibration import Calibration
from daf_core.precision.policy import RECENT, PrecisionPolicy

GELU, NORM, SOFTMAX = sites = [
    Site("block.0", "GeluBackward0", 1),
    Site("block.0", "AddBackward0", 0),
    Site("", "SoftmaxBackward0", 7),
]
UNSEEN = Site("block.9", "GeluBackward0", 1)
ERRORS: SiteErrors = {
    GELU: [8.0, 4.0, 1.0, 0.1, 0.0],
    NORM: [0.8, 0.4, 0.1, 0.01, 0.001],
    SOFTMAX: [1.0, 0.9, 0.8, 0.2, 0.0],
}
SIZES = (10, 50, 90, 170, 330, 1000)
"""Bytes of 8 bits and less of a site whose activations take 1000."""

BOUND: dict[str, Any] = {"max_gradient_error": 0.1}
BUDGET: dict[str, Any] = {"memory_budget": 10_000}


def _policy(errors: SiteErrors | None = None, **options: Any) -> PrecisionPolicy:
    policy = PrecisionPolicy(DAFConfig(**options))
    policy.learn(Calibration(ERRORS if errors is None else errors), replace=True)
    return policy


def _sizes(scale: int = 1, names: list[Site] = sites) -> dict[Site, list[int]]:
    return {site: [scale * size for size in SIZES] for site in names}


def _bytes(plan: Mapping[Site, int | None], sizes: Mapping[Site, list[int]]) -> int:
    return sum(sizes[site][-1 if bits is None else LEVELS.index(bits)] for site, bits in plan.items())


def _levels(policy: PrecisionPolicy) -> list[int | None]:
    return [policy.plan[site] for site in sites]


@pytest.mark.parametrize(("options", "expected"), [({}, 4), (BUDGET, 8), (BOUND, 8), ({**BOUND, **BUDGET}, 8)])
def test_where_nothing_is_known(options: dict[str, Any], expected: int) -> None:
    """Four bits; eight where a budget can take them away again, or a bound has to be kept."""
    assert _policy({}, **options).precision(UNSEEN) == expected


@pytest.mark.parametrize("precision", [1, 2, 4, 8])
def test_fixed_precision_is_for_all_sites_and_stays(precision: int) -> None:
    """Whatever is learned and however the passes grow."""
    policy = _policy(precision=precision)
    policy.follow(_sizes(), 1)
    assert {policy.precision(site) for site in (*sites, UNSEEN)} == {precision}
    assert not policy.plan


def test_unseen_site_gets_eight_bits_once_there_is_a_plan() -> None:
    """What nobody has measured is not risked."""
    policy = _policy()
    assert policy.precision(UNSEEN) == 4
    policy.fill(_sizes(), 400)
    assert policy.precision(UNSEEN) == 8
    assert [policy.precision(site) for site in sites] == _levels(policy)


def test_unseen_site_counts_as_the_worst() -> None:
    """At each level the largest error of those that were seen; None where none was."""
    assert _policy().errors(UNSEEN) == [8.0, 4.0, 1.0, 0.2, 0.001]
    assert _policy().errors(NORM) == ERRORS[NORM]
    assert _policy({}).errors(UNSEEN) is None


def test_unseen_sites_are_planned_as_the_worst() -> None:
    """A site that no calibration saw gets at least the bits of each that one did."""
    policy = _policy()
    policy.fill(_sizes(names=[*sites, UNSEEN]), 600)
    assert all(policy.precision(UNSEEN) >= policy.precision(site) for site in sites)


@pytest.mark.parametrize(
    ("room", "expected"),
    [(0, [0, 0, 0]), (30, [0, 0, 0]), (110, [2, 0, 0]), (190, [4, 0, 0]), (350, [4, 2, 2]), (10_000, [8, 8, 8])],
)
def test_fill_takes_the_least_error_that_fits(room: int, expected: list[int]) -> None:
    """Bits go where they save the most error; where nothing fits, all sites have the fewest bytes."""
    policy = _policy()
    policy.fill(_sizes(), room)
    assert _levels(policy) == expected


@pytest.mark.parametrize(
    ("squared", "expected"),
    [(10.0, [0, 0, 0]), (0.31, [4, 4, 4]), (0.0011, [8, 8, 8]), (0.0005, [8, None, 8]), (0.0, [8, None, 8])],
)
def test_error_is_kept_with_the_fewest_bytes(squared: float, expected: list[int | None]) -> None:
    """Where eight bits are not enough, a site stays as it is."""
    policy = _policy()
    policy.keep_error(_sizes(), squared)
    assert _levels(policy) == expected
    assert policy.predict(policy.plan) <= squared


def test_least_bits_of_an_error_bound() -> None:
    """No site gets fewer than are asked for, however little it matters."""
    policy = _policy()
    policy.keep_error(_sizes(), 100.0, 8)
    assert _levels(policy) == [8, 8, 8]


@pytest.mark.parametrize("least", [1, 2, 4, 8])
def test_least_precision_is_respected(least: int) -> None:
    """By all that plans, and before anything is known."""
    policy = _policy({}, min_precision=least)
    assert policy.precision(GELU) >= least
    policy.learn(Calibration(ERRORS))
    policy.fill(_sizes(), 0)
    assert _levels(policy) == [least] * 3
    policy.keep_error(_sizes(), 100.0)
    assert _levels(policy) == [least] * 3
    policy.follow(_sizes(), 1)
    assert _levels(policy) == [least] * 3


def test_prediction_adds_squared_errors() -> None:
    """Exact activations add none, sites that were never seen the worst."""
    policy = _policy()
    assert policy.predict({GELU: 2, NORM: 4, SOFTMAX: None}) == pytest.approx(1.01)
    assert policy.predict({UNSEEN: 4}) == 0.2
    assert policy.predict({}) == _policy({}).predict({GELU: 0}) == 0.0


class TestLearning:
    def test_averages_calibrations(self) -> None:
        """Half of each error is of the last calibration; sites that it lacks keep theirs."""
        policy = _policy()
        policy.learn(Calibration({GELU: [0.0, 0.0, 0.0, 0.3, 0.0]}))
        assert policy.errors(GELU) == pytest.approx([4.0, 2.0, 0.5, 0.2, 0.0])
        assert policy.errors(NORM) == ERRORS[NORM]

    def test_may_replace_what_was_known(self) -> None:
        """What was found before the first steps says little of later ones."""
        policy = _policy()
        policy.learn(Calibration({GELU: ERRORS[NORM]}), replace=True)
        assert policy.errors(GELU) == ERRORS[NORM]

    def test_sites_without_a_gradient_count_as_usual(self) -> None:
        """What LoRA's first matrix reads matters from the second step on: it gets the median of the others."""
        zero = [0.0] * len(LEVELS)
        policy = _policy({**ERRORS, UNSEEN: zero})
        assert policy.errors(UNSEEN) == [1.0, 0.9, 0.8, 0.1, 0.0]

    def test_of_nothing_teaches_nothing(self) -> None:
        """Errors that are all zero, and no errors at all."""
        for found in ({}, {GELU: [0.0] * len(LEVELS)}):
            assert not _policy(found).calibrated


class TestFollowing:
    def test_takes_what_four_bits_would_without_a_budget(self) -> None:
        """In the same bytes, the error is smaller than with four bits everywhere."""
        policy = _policy({**ERRORS, GELU: [80.0, 40.0, 10.0, 1.0, 0.0], NORM: [0.001, 0.0, 0.0, 0.0, 0.0]})
        policy.follow(_sizes(), None)
        assert _bytes(policy.plan, _sizes()) <= 3 * 170
        assert policy.predict(policy.plan) < policy.predict(dict.fromkeys(sites, 4))

    @pytest.mark.parametrize("room", [0, 60, 300, 777])
    def test_keeps_to_the_room(self, room: int) -> None:
        """Where even the least does not fit, that is planned."""
        policy = _policy(**BUDGET)
        policy.follow(_sizes(), room)
        assert _bytes(policy.plan, _sizes()) <= max(room, 30)

    @pytest.mark.parametrize("options", [{"precision": 4}, {"precision": 8}, BOUND])
    def test_is_left_to_others(self, options: dict[str, Any]) -> None:
        """A fixed precision is fixed, and for an error bound audits do the planning."""
        policy = _policy(**options)
        policy.follow(_sizes(), 300)
        assert not policy.plan

    def test_waits_for_a_calibration(self) -> None:
        """Without one there is nothing to plan by."""
        policy = _policy({})
        policy.follow(_sizes(), 300)
        assert not policy.plan

    def test_plans_for_the_smallest_of_recent_passes(self) -> None:
        """A larger pass loses planes to the budget; planes that were never stored cannot be had back."""
        policy = _policy(**BUDGET)
        policy.follow(_sizes(4), 800)
        long = policy.plan
        policy.follow(_sizes(1), 800)
        short = policy.plan
        assert _bytes(long, _sizes(4)) <= 800
        assert _bytes(short, _sizes(1)) > _bytes(long, _sizes(1))
        for _ in range(RECENT - 1):
            policy.follow(_sizes(4), 800)
            assert policy.plan is short
        policy.follow(_sizes(4), 800)
        assert policy.plan == long

    @pytest.mark.parametrize(("scale", "room", "again"), [(100, 5000, False), (95, 5000, False), (85, 5000, True)])
    def test_plans_again_for_another_size(self, scale: int, room: int, again: bool) -> None:
        """More than a tenth away, not less: planning takes longer than a step of a small model."""
        _assert_plans_again(_sizes(scale), room, again)

    @pytest.mark.parametrize(("room", "again"), [(5300, False), (4800, False), (6000, True)])
    def test_plans_again_for_another_room(self, room: int, again: bool) -> None:
        """As with sizes."""
        _assert_plans_again(_sizes(100), room, again)

    def test_plans_again_for_other_sites(self) -> None:
        """A branch that was not taken before."""
        policy = _policy()
        policy.follow(_sizes(names=sites[:2]), 5000)
        for _ in range(RECENT):
            policy.follow(_sizes(), 5000)
        assert policy.plan.keys() == set(sites)

    def test_plans_again_after_a_calibration(self) -> None:
        """With what it has found, at the next pass of whatever size."""
        policy = _policy()
        policy.follow(_sizes(), 300)
        before = policy.plan
        policy.learn(Calibration({GELU: [0.0] * 4 + [1e-9], NORM: ERRORS[GELU]}), replace=True)
        assert policy.plan is before
        policy.follow(_sizes(), 300)
        assert policy.precision(NORM) > policy.precision(GELU)


def _assert_plans_again(sizes: dict[Site, list[int]], room: int, again: bool) -> None:
    policy = _policy()
    policy.follow(_sizes(100), 5000)
    before = policy.plan
    policy.follow(sizes, room)
    assert (policy.plan is not before) == again


class TestState:
    def test_comes_back_through_json(self) -> None:
        """Errors, slopes and plan, to the last bit, sites that stay exact among them."""
        policy, other = _policy(), PrecisionPolicy(DAFConfig())
        found = {site: [0.1 + value / 3 for value in errors] for site, errors in ERRORS.items()}
        policy.learn(Calibration(found, dict.fromkeys((SOFTMAX, GELU), "slopes")))
        policy.keep_error(_sizes(), 0.0)
        assert None in policy.plan.values()
        other.load(json.loads(json.dumps(policy.state())))
        assert other.state() == policy.state()
        assert other.plan == policy.plan
        assert [other.codec(site) for site in sites] == ["slopes", None, "slopes"]
        assert [other.errors(site) for site in sites] == [policy.errors(site) for site in sites]

    def test_of_a_new_policy_comes_back(self) -> None:
        """Nothing known, nothing planned."""
        policy = _policy()
        policy.load(PrecisionPolicy(DAFConfig()).state())
        assert not policy.calibrated
        assert not policy.plan

    @pytest.mark.parametrize(
        "entry",
        [
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0],
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0, -1.0],
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0, float("nan")],
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0, float("inf")],
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0, 10**400],
            ["a", "b", 0, 1.0, 1.0, 1.0, 1.0, "x"],
            ["a", "b", "0", 1.0, 1.0, 1.0, 1.0, 1.0],
            ["a", 1, 0, 1.0, 1.0, 1.0, 1.0, 1.0],
            [],
            3,
            None,
        ],
    )
    def test_with_broken_errors_is_refused(self, entry: Any) -> None:
        """Numbers of a site that are missing, negative, not finite or no numbers; names that are no names."""
        _assert_refused({"errors": [entry], "slopes": [], "plan": []})

    @pytest.mark.parametrize(
        "entry", [["a", "b"], ["a", "b", 0, 1], ["a", "b", "0"], ["a", None, 0], "abc", [], 3, None]
    )
    def test_with_broken_slopes_is_refused(self, entry: Any) -> None:
        """What names no site."""
        _assert_refused({"errors": [], "slopes": [entry], "plan": []})

    @pytest.mark.parametrize("entry", [["a", "b", 0], ["a", "b", 0, 3], ["a", "b", 0, "4"], ["a", 4], [], 7, None])
    def test_with_a_broken_plan_is_refused(self, entry: Any) -> None:
        """A precision that no kernel knows must not reach one."""
        _assert_refused({"errors": [["a", "b", 0, 1.0, 1.0, 1.0, 1.0, 1.0]], "slopes": [], "plan": [entry]})

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"errors": []},
            {"plan": []},
            {"errors": [], "plan": []},
            {"errors": 1, "slopes": [], "plan": []},
            {"errors": [], "slopes": 1, "plan": []},
            [],
            None,
        ],
    )
    def test_of_something_else_is_refused(self, state: Any) -> None:
        """Such as another program's."""
        _assert_refused(state)

    @pytest.mark.parametrize("broken", ["errors", "slopes", "plan"])
    def test_that_is_refused_changes_nothing(self, broken: str) -> None:
        """Whichever part of it is broken, what was known before is still known."""
        policy = _policy()
        policy.fill(_sizes(), 300)
        before = policy.state()
        with pytest.raises(StateError):
            policy.load({**_policy({UNSEEN: ERRORS[GELU]}).state(), broken: [None]})
        assert policy.state() == before


def _assert_refused(state: Any) -> None:
    with pytest.raises(StateError, match="no saved state"):
        PrecisionPolicy(DAFConfig()).load(state)
