"""What a randomized ReLU writes after it has saved it comes back as it is then, in every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.harness import Loss, assert_empty, backward, engine_for, normal

PASSES = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "exact": {"precision": "exact"},
    "8 bits": {"precision": 8},
    "in the background": {"precision": "exact", "packing": "workers"},
}
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "slopes of another": lambda x: torch.where(normal(*x.shape, seed=9) > 0, 1.0, 0.2),
    "numbers": lambda x: normal(*x.shape, seed=9),
}
"""What the memory of new noise may hold: what was freed there last."""


def leaky(by: str, slopes: tuple[float, float]) -> Loss:
    """Returns the loss of a randomized ReLU whose noise is new memory, which holds what `by` says."""

    def loss(model: nn.Module, _step: int) -> Tensor:
        x = model(normal(128, 64))
        return torch._C._nn.rrelu_with_noise(x, MEMORY[by](x), *slopes, True).sum()

    return loss


@pytest.mark.parametrize("by", MEMORY)
@pytest.mark.parametrize("slopes", [(0.1, 0.9), (0.2, 0.2)], ids=["random", "one"])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_noise_that_is_written_after_it_is_saved_is_read_as_written(
    options: dict[str, Any], slopes: tuple[float, float], by: str
) -> None:
    model, loss = nn.Linear(64, 64), leaky(by, slopes)
    engine = engine_for(model, **options)
    for step in range(PASSES):
        expected = backward(model, loss, seed=step)
        found = backward(model, loss, engine, seed=step)
        # Without an error in what the operator has read, only that of the layer's input is left.
        error = 0 if options["precision"] == "exact" else 0.02
        for mine, other in zip(found, expected, strict=True):
            assert (mine - other).norm() <= error * other.norm()
        assert_empty(engine)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.RReLU(),
    "in place": nn.RReLU(inplace=True),
    "one slope": nn.RReLU(0.3, 0.3),
    "function": lambda x: F.rrelu(x, training=True),
    "operator": lambda x: torch.rrelu(x, training=True),
    "operator in place": lambda x: torch.rrelu_(x, training=True),
}


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_way_of_calling_it_is_as_in_plain_torch(name: str, precision: int | str) -> None:
    model = nn.Linear(64, 64)
    engine = engine_for(model, precision)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = model(normal(128, 64))
        torch.zeros(128, 64)  # what new memory holds next
        return FUNCTIONS[name](x * 2).sum()

    for step in range(PASSES):
        expected = backward(model, loss, seed=step)
        found = backward(model, loss, engine, seed=step)
        error = 0 if precision == "exact" else 0.2
        for mine, other in zip(found, expected, strict=True):
            assert (mine - other).norm() <= error * other.norm()


def test_only_the_noise_stays_as_it_is() -> None:
    """The operator reads the side of zero of its input, in passes that are replayed as well."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    for step in range(PASSES):
        backward(model, lambda model, _: F.rrelu(model(normal(128, 64)), training=True).sum(), engine, seed=step)
        stored = engine.finish_step().stored_as
        assert stored["raw"] == 1
        assert stored["sides"] == 1
