"""Codes of 1 and 2 bits between deviations from the mean, in groups that are more or less normal."""

from __future__ import annotations

import pytest
from torch import Tensor

from daf_kernels import Seed
from daf_kernels.backend import Backend
from tests.kernels.hard_inputs import normal
from tests.kernels.harness import CPU, REFERENCE, SEED, decode, encode

BACKENDS = pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
GROUPS, GROUP = 40, 192


def _decoded(backend: Backend, values: Tensor, planes: int, seed: Seed | None = None) -> Tensor:
    memory, _ = encode(backend, values, planes, seed)
    return decode(backend, memory, values, planes)


def _error(backend: Backend, values: Tensor, planes: int, seed: Seed | None = None) -> float:
    centred = values - values.mean(1, keepdim=True)
    return float((_decoded(backend, values, planes, seed) - values).norm() / centred.norm())


@BACKENDS
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("planes", "limit"), [(1, 0.64), (2, 0.36)])
def test_error_on_normal_values(backend: Backend, planes: int, limit: float, scale: float) -> None:
    """Close to the best four codes (.34) and two codes (.60) for a normal distribution, wherever its mean lies."""
    assert _error(backend, scale * normal(GROUPS, GROUP), planes) < limit
    assert _error(backend, scale * (normal(GROUPS, GROUP) + 20), planes) < limit


@BACKENDS
def test_more_bits_and_stochastic_codes_reach_the_extremes(backend: Backend) -> None:
    """Clipping would cost 4 bits more than it gains, and stochastic codes their mean."""
    values = normal(GROUPS, GROUP)
    assert _error(backend, values, 3) < 0.12
    assert _decoded(backend, values, 2).abs().max() < 2.1
    assert _decoded(backend, values, 2, SEED).abs().max() > 2.3


@BACKENDS
def test_an_outlier_is_not_clipped(backend: Backend) -> None:
    """It is most of its group's variance: in groups with one, codes lie between the extremes."""
    values = normal(GROUPS, GROUP)
    values[:, 7] = 40.0
    assert (_decoded(backend, values, 2)[:, 7] > 30).all()


@BACKENDS
def test_probabilities_are_not_clipped(backend: Backend) -> None:
    """Where most values lie at one end, the other end is a long tail that a symmetrical range would waste codes on."""
    values = (3 * normal(GROUPS, GROUP)).softmax(1)
    largest = values.argmax(1, keepdim=True)
    assert (_decoded(backend, values, 2).gather(1, largest) > 0.8 * values.gather(1, largest)).all()
