"""Costs of policies at rows that were not measured."""

from __future__ import annotations

import numpy as np
import pytest

from daf_core.config import DAFConfig
from daf_core.plan.cost.profile import Costs, PolicyCosts, interpolate, most_bits
from daf_core.plan.policies import POLICIES, RECOMPUTE


def costs(*seconds: float) -> Costs:
    """Costs of what is outside of blocks, which is never recomputed, and of one call."""
    rows, nothing = np.array([[1.0, 1.0, np.inf, np.inf], seconds]).T, np.zeros(2)
    found = {policy: PolicyCosts(row, nothing, nothing, nothing) for policy, row in zip(POLICIES, rows, strict=False)}
    return Costs(found, nothing)


def test_keeping_is_never_slower_than_packing_beyond_what_was_measured() -> None:
    # By these two alone, packing 8 rows would take 8.8 s, and keeping them 14 s.
    few, many = costs(2.0, 4.0, 4.0, 4.0), costs(6.0, 5.6, 5.0, 5.0)
    found = interpolate(few, many, 3.0)
    keep, *others = [each.seconds[1] for each in found.by_policy.values()]
    assert all(other > keep for other in others)
    assert np.isinf(found[RECOMPUTE].seconds[0])


@pytest.mark.parametrize(("precision", "bits"), [("auto", 8), ("exact", None), (4, 4), (1, 1)])
def test_room_is_filled_up_to_the_precision(precision: int | str, bits: int | None) -> None:
    assert most_bits(DAFConfig(precision=precision)) == bits
