"""What the rows of a tensor have in common, inside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from daf_core import ActivationEngine, DAFConfig
from daf_core.compiled.codes import Like, Planes
from daf_core.compiled.common_row import across_rows, common_row
from daf_core.compiled.groups import shape_of
from tests.core.compiled.graphs import BACKEND, error_of_weight
from tests.core.harness import normal

SHAPED: dict[str, Callable[[], Tensor]] = {
    "tokens": lambda: normal(512, 256),
    "rows of tokens": lambda: normal(4, 128, 256),
    "heads": lambda: normal(2, 128, 4, 64).transpose(1, 2),
    "heads, copied": lambda: normal(2, 4, 128, 64),
    "columns": lambda: normal(256, 512).t(),
    "filled up": lambda: normal(128, 131),
    "bfloat16": lambda: normal(4, 128, 256).bfloat16(),
}


def restored(values: Tensor, common: bool, bits: int = 4) -> tuple[Tensor, int]:
    """Returns what comes back, and the bytes that were stored."""
    shape, code = shape_of(values), Planes(bits, common=common)
    stored = code.encode(values, shape)
    found = code.decode(stored, Like(values.shape, values.dtype, shape))
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    return found, sum(each.nbytes for each in stored)


def error(found: Tensor, exact: Tensor, spread: Tensor) -> float:
    """Returns the error, beside what rows differ by."""
    return float((found - exact).float().norm() / spread.float().norm())


def common_in_codes(model: nn.Module, inputs: Tensor, bits: int) -> set[bool]:
    """Returns the `Planes.common` of what a compiled model stores."""
    asked, encode = set[bool](), Planes.encode
    compiled, engine = torch.compile(model, backend=BACKEND), ActivationEngine(model, {"precision": bits})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planes, "encode", lambda code, *given: asked.add(code.common) or encode(code, *given))
        with engine.compress():
            loss = compiled(inputs).square().mean()
        loss.backward()
    return asked


@pytest.mark.parametrize("name", SHAPED)
def test_a_bias_of_channels_makes_no_larger_error(name: str) -> None:
    spread = SHAPED[name]()
    order = shape_of(spread).order
    tokens = max(order[:-1], key=lambda dim: spread.shape[dim])
    bias = 10 * normal(*(1 if dim in (tokens, 0) and dim != order[-1] else n for dim, n in enumerate(spread.shape)))
    values = spread + bias.to(spread.dtype)
    own = values.float() - bias.to(spread.dtype).float()
    (plain, few), (found, held) = restored(values, common=False), restored(values, common=True)
    unbiased, _ = restored(spread, common=True)
    assert error(plain, values, own) > 0.5
    assert error(found, values, own) < 1.1 * error(unbiased, spread, spread) + 0.01
    assert few < held <= few + values.numel() / 32


def test_channels_decide_for_themselves() -> None:
    values = normal(256, 128)
    values[:, 3] += 30
    values[:, 7] += 0.2
    row = common_row(values, across_rows(values.shape, (0, 1)))
    assert row.shape == (1, 128)
    assert row.dtype is torch.bfloat16
    assert float(row[0, 3]) == pytest.approx(30, rel=0.02)
    assert row.count_nonzero() == 1


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("token", [0, 12, 127, slice(None, None, 8)])  # token 12 is looked at in 8 rows of 197
def test_tokens_that_are_far_larger_than_others_spoil_nothing(rows: int, token: int | slice) -> None:
    values = normal(rows, 197, 256)
    values[:, token, :4] += 100
    others = torch.ones(197, dtype=torch.bool)
    others[token] = False
    (plain, _), (found, _) = restored(values, common=False), restored(values, common=True)
    own = values[:, others]
    assert error(found[:, others], own, own) <= 1.01 * error(plain[:, others], own, own)


FEW_LEVELS = {
    "bits": lambda: (normal(256, 256) > 0.3).float(),
    "one of 64": lambda: nn.functional.one_hot(normal(256, 64).argsort(1)[:, 0], 64).float().repeat(1, 4),
}


@pytest.mark.parametrize("bits", [4, 2, 1])
@pytest.mark.parametrize("name", FEW_LEVELS)
def test_what_codes_hit_they_still_hit(name: str, bits: int) -> None:
    values = FEW_LEVELS[name]()
    assert torch.equal(restored(values, common=True, bits=bits)[0], restored(values, common=False, bits=bits)[0])


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 3e38])
def test_what_is_not_finite_is_not_hidden(number: float) -> None:
    values = normal(128, 256)
    values[0, 5] = number
    found, _ = restored(values, common=True)
    assert torch.equal(found.isfinite().all(1), values.isfinite().all(1) & (values.abs() < 1e38).all(1))
    assert error(found[1:], values[1:], values[1:]) < 0.15


@pytest.mark.parametrize(
    ("sizes", "order", "expected"),
    [
        ((4096, 768), (0, 1), (0,)),
        ((8, 512, 768), (0, 1, 2), (0, 1)),  # tokens of all rows of a batch
        ((8, 512, 12, 64), (0, 1, 2, 3), (1,)),  # tokens of a row, with all heads
        ((8, 12, 512, 64), (0, 1, 2, 3), (2,)),
        ((8, 12, 512, 64), (0, 2, 1, 3), (2,)),
        ((96, 512, 64), (0, 1, 2), (1,)),  # products of the heads of a batch
        ((16, 48, 64), (0, 1, 2), (0, 1)),  # too few tokens for each row
        ((2, 16, 768), (0, 1, 2), ()),
        ((768,), (0,), ()),
        ((), (), ()),
    ],
)
def test_rows_are_those_of_tokens(sizes: tuple[int, ...], order: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert across_rows(sizes, order) == expected


@pytest.mark.parametrize(("bits", "common"), [(8, True), (4, True), (2, False)])
def test_means_take_little_beside_codes(bits: int, common: bool) -> None:
    """64 rows do, at 4 bits."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    assert common_in_codes(model, normal(64, 128), bits) == {common}


def test_lengths_may_vary() -> None:
    """Also below the rows that are looked at; another length has nothing compiled again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 1))
    counter = CompileCounterWithBackend(BACKEND)
    compiled, engine = torch.compile(model, backend=counter), ActivationEngine(model, DAFConfig(precision=4))
    for length in (1024, 300, 30, 5):
        inputs = 3 + normal(2, length, 64)
        torch._dynamo.mark_dynamic(inputs, 1)
        with engine.compress():
            loss = compiled(inputs).square().mean()
        loss.backward()
        exact = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        off = torch.cat([(found - each).flatten() for found, each in zip(gradients, exact, strict=True)])
        assert float(off.norm() / torch.cat([each.flatten() for each in exact]).norm()) < 0.15
        model.zero_grad()
    assert counter.frame_count == 1


class Attention(nn.Module):
    """Keys and values with a bias, which their sums and the softmax take no notice of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Linear(64, 3 * 64)
        nn.init.constant_(self.parts.bias, 5.0)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.parts(inputs).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2) / 8).softmax(-1)
        return (weights @ value).tanh().square().mean()


def test_gradients_behind_biases() -> None:
    model = Attention()
    error, step = error_of_weight(model, model.parts.weight, normal(4, 128, 64), bits=4)
    assert step.ratio > 3
    assert 0 < error < 0.3


class Convolutions(nn.Module):
    """Convolutions and a function between them, whose argument is what is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(nn.functional.silu(self.first(inputs))).mean()


def test_convolutions_do_not_say_which_dimension_is_that_of_channels() -> None:
    assert common_in_codes(Convolutions(), normal(4, 8, 32, 32), bits=4) == {False}
