"""Gradients stay within the bounds, in the first pass of an engine and in the second, and exact in exact mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.core.harness import engine_for, error, gradients, normal
from tests.fidelity import chosen, trained
from tests.fidelity.measure import BOUNDS, Case, Problem, Result, measure


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _by_name(cases: Iterator[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


def _says(result: Result) -> str:
    return f"{result.bits}: {', '.join(f'{each:.3g}' for each in result.errors)} {result.complaint}"


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
@pytest.mark.parametrize("case", _by_name(chosen.cases()))
def test_the_gradient_is_within_the_bounds(case: Case) -> None:
    wrong = [_says(result) for result in measure(case) if result.complaint]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("case", _by_name(trained.cases()))
def test_what_all_tokens_share_does_not_spoil_the_gradient(case: Case) -> None:
    """Below half of the bounds: at 4 bits .16 at most where it cancels, as without it, and .27 behind rotations."""
    wrong = [
        _says(result) for result in measure(case) if result.bits != "exact" and result.error > BOUNDS[result.bits] * 0.6
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("case", _by_name(chosen.exact_cases()))
def test_what_no_precision_may_change_stays_exact(case: Case) -> None:
    assert all(result.identical for result in measure(case))


class Branching(nn.Module):
    """A layer, and another operator at the same place in some of the steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 128)
        self.by_largest = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return (hidden.amax(1) if self.by_largest else hidden.square().mean(1)).sum()


@pytest.mark.parametrize("bits", BOUNDS)
def test_an_operator_that_comes_later_at_a_known_place_is_within_the_bounds(bits: Literal[8, 4]) -> None:
    model, x, found = Branching(), normal(128, 64), list[list[Tensor]]()
    for engine in (None, engine_for(model, bits)):
        for model.by_largest in (False, True):
            model.zero_grad()
            if engine is None:
                loss = model(x)
            else:
                with engine.compress():
                    loss = model(x)
            loss.backward()
        found.append(gradients(model))
    assert error(found[1], found[0]) <= BOUNDS[bits]


def test_small_problems_are_coded() -> None:
    """The harness itself: with tensors of their own sizes most of torch's modules would be kept as they are."""
    layer, inputs = nn.Linear(8, 8), normal(32, 8).requires_grad_()
    problem = Problem(lambda: layer(inputs).sin(), [inputs, *layer.parameters()], layer, small=True)
    lossy = [result for result in measure(Case("", lambda: problem)) if result.bits != "exact"]
    assert all(result.coded and not result.identical for result in lossy)


def test_a_gradient_that_is_wrong_is_told() -> None:
    """The harness itself: what decodes wrong is above the bound, and what is exact is identical."""
    assert Result("", "", 8, (0.01, 0.06)).complaint == "above 0.05"
    assert not Result("", "", 4, (0.01, 0.4)).complaint
    assert Result("", "", 2, (0.1, float("nan"))).complaint == "not finite"
    assert Result("", "", "exact", (0.0, 0.0)).complaint == "differs in exact mode"
    assert not Result("", "", "exact", (0.0, 0.0), identical=True).complaint
