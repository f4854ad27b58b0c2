"""Sharp attention takes more bits for query and key: an error of a score is multiplied by its exponential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine
from daf_core.readers.sharpness import (
    MOST_HEADS,
    MOST_KEYS,
    MOST_QUERIES,
    SHARP,
    SHARP_FOR_BYTES,
    Looks,
    bits_for,
    score_deviation,
)
from daf_core.saved_tensors.attention_again import LOOKS
from tests.core.harness import assert_empty, engine_for, error, normal

SHAPE = (2, 4, 128, 64)


@pytest.mark.parametrize(
    ("bits", "deviation", "expected"),
    [
        (None, 99.0, None),
        (0, 99.0, 0),
        *((bits, SHARP - 0.01, bits) for bits in (1, 2, 4, 8)),
        *((bits, SHARP, 2 * bits) for bits in (1, 2, 4)),
        (8, SHARP, 8),
        (8, SHARP_FOR_BYTES - 0.01, 8),
        (8, SHARP_FOR_BYTES, None),
        (4, 99.0, 8),
    ],
)
def test_bits_double_where_scores_deviate(bits: int | None, deviation: float, expected: int | None) -> None:
    assert bits_for(bits, deviation) == expected


BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin, "cos": torch.cos, "atan": torch.atan, "asinh": torch.asinh, "glu": lambda x: F.glu(x, 1),
}  # fmt: skip


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("deviation", [1.0, 3.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("name", BENT)
def test_wide_arguments_keep_the_gradient(name: str, deviation: float, bits: int) -> None:
    """Where a derivative changes within a unit of its argument, code steps are smaller than that, or there are none."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), normal(512, 64)
    nn.init.normal_(layer.weight, std=deviation / 8)
    slope = normal(512, 64)[:, : BENT[name](torch.zeros(1, 64)).shape[1]]

    def gradient() -> list[Tensor]:
        assert layer.weight.grad is not None
        return [layer.weight.grad.clone()]

    (BENT[name](layer(x)) * slope).mean().backward()
    exact, engine = gradient(), engine_for(layer, bits)
    for _ in range(3):
        layer.zero_grad()
        with engine.compress():
            loss = (BENT[name](layer(x)) * slope).mean()
        loss.backward()
        assert error(gradient(), exact) < (0.05 if bits == 8 else 0.25)
    del loss
    assert_empty(engine)


class Decayed(nn.Module):
    """Linear attention whose keys lose weight with time, as fast as a gate says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.gate = nn.Linear(64, 4, bias=False)
        self.rate = 8.0
        self.masked = torch.ones(64, 64, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        passed = -self.rate * F.softplus(self.gate(x)).transpose(1, 2).cumsum(-1)
        decay = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).masked_fill(self.masked, -torch.inf).exp()
        return (query @ key.mT * decay @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("packing", ["device", "workers"])
def test_decays_keep_the_gradient_of_their_gate(later: bool, packing: Any) -> None:
    """Also where they get faster while a model trains: the error was .59."""
    net, x, slope = Decayed(), normal(4, 64, 64), normal(4, 64, 64, seed=1)
    engine = engine_for(net, 4, packing=packing)

    def gradient() -> list[Tensor]:
        return list(torch.autograd.grad((net(x) * slope).mean(), net.gate.weight))

    found: list[Tensor] = []
    for number in range(4 + Looks.EVERY):
        net.rate = 0.1 if later and number < 4 else 8.0
        with engine.compress():
            loss = (net(x) * slope).mean()
        found = list(torch.autograd.grad(loss, net.gate.weight))
    assert 0 < error(found, gradient()) < 0.35


def _entropy(windows: Tensor) -> Tensor:
    shares = (windows / windows.sum(-1, keepdim=True)).mean(1)
    return (shares * (shares + 1e-7).log()).sum()


def _distance(windows: Tensor) -> Tensor:
    return (windows.mean(1).cumsum(-1) - torch.linspace(0, 1, 24)).square().sum()


@pytest.mark.parametrize("of_histogram", [_entropy, _distance])
@pytest.mark.parametrize("packing", ["device", "workers"])
def test_what_is_almost_zero_of_a_window_stays_so(of_histogram: Callable[[Tensor], Tensor], packing: Any) -> None:
    """Its gradient is multiplied by how far a value is from the middle of a bin: errors were .05 and .09."""
    torch.manual_seed(0)
    net, middles = nn.Conv2d(1, 1, 3, padding=1), torch.linspace(0, 1, 24)
    engine = engine_for(net, 8, packing=packing)

    def loss(image: Tensor) -> Tensor:
        values = (image + 0.1 * net(image)).clamp(0, 1).flatten(1).unsqueeze(-1)
        return of_histogram((-1000 * (values - middles).square()).exp())

    for number in range(4):
        coarse = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(number))
        image = F.interpolate(coarse, size=48, mode="bicubic")
        exact = torch.autograd.grad(loss(image), list(net.parameters()))
        with engine.compress():
            value = loss(image)
        assert error(list(torch.autograd.grad(value, list(net.parameters()))), list(exact)) < 0.04
        engine.finish_step()


def test_a_look_at_decays_that_need_what_they_needed_changes_nothing() -> None:
    """Otherwise all that is saved at their place would go the full way again."""
    net, x = Decayed(), normal(4, 64, 64)
    engine = engine_for(net, 4)
    changes: list[int] = []
    for number in range(4 + Looks.EVERY):
        with engine.compress():
            loss = (net(x + number / 100)).square().mean()
        loss.backward()
        changes.append(engine._readers.changes)
    assert changes[3:] == changes[3:4] * (1 + Looks.EVERY)


class Node:
    """Stands for the node of an attention."""

    def __init__(self, name: str = "ScaledDotProductFlashAttentionForCpuBackward0", scale: float | None = None) -> None:
        self._name = name
        self._saved_scale = scale

    def name(self) -> str:
        return self._name


def of_all_scores(query: Tensor, key: Tensor, scale: float) -> float:
    """Returns the deviation of the scores of one query, in the sharpest head, of all heads and queries and keys."""
    keys = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    variances = (query.double() @ keys.double().mT * scale).var(-1)
    return float(variances.mean(-1).max().sqrt())


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], float | None]] = {
    "plain": (SHAPE, SHAPE, None),
    "scaled": (SHAPE, SHAPE, 0.7),
    "grouped": ((2, 8, 32, 64), (2, 2, 48, 64), None),
    "one head for all": ((2, 4, 32, 64), (2, 1, 48, 64), None),
    "narrow": ((1, 2, 64, 16), (1, 2, 64, 16), None),
    "no batch": ((4, 32, 64), (4, 32, 64), None),
    "one query": ((2, 4, 1, 64), SHAPE, None),
    "two keys": ((2, 4, 16, 64), (2, 4, 2, 64), None),
}


@pytest.mark.parametrize(
    ("name", "later", "bits", "bound"),
    [("sin", 10.0, 4, 0.25), ("sin", 10.0, 8, 0.03), ("sin", 60.0, 8, 0.03), ("glu", 60.0, 4, 0.25)],
)
@pytest.mark.parametrize("packing", ["device", "workers"])
def test_arguments_that_grow_are_noticed(name: str, later: float, bits: int, bound: float, packing: Any) -> None:
    """Where the first pass decided for all, errors stayed .79, .05, .31 and .96."""
    torch.manual_seed(0)
    first, inputs, bent = nn.Linear(64, 64), normal(256, 64), BENT[name]
    second = nn.Linear(bent(torch.zeros(1, 64)).shape[1], 64)
    engine, found = engine_for(nn.Sequential(first, second), bits, packing=packing), Tensor()

    def gradient(size: float) -> Tensor:
        (found,) = torch.autograd.grad(second(bent(size * first(inputs))).square().mean(), first.weight)
        return found

    for number in range(4 + Looks.EVERY):
        with engine.compress():
            size = 1.0 if number < 4 else later
            loss = second(bent(size * first(inputs))).square().mean()
        (found,) = torch.autograd.grad(loss, first.weight)
    assert 0 <= error([found], [gradient(later)]) < bound


@pytest.mark.parametrize(("queries", "keys", "scale"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("size", [0.5, 3.0])
def test_the_deviation_is_that_of_the_scores(
    queries: tuple[int, ...], keys: tuple[int, ...], scale: float | None, size: float
) -> None:
    query, key = normal(*queries) * size, normal(*keys, seed=1)
    expected = of_all_scores(query, key, queries[-1] ** -0.5 if scale is None else scale)
    assert score_deviation(Node(scale=scale), query, key) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_deviate_alike(dtype: torch.dtype) -> None:
    query, key = normal(*SHAPE) * 3, normal(*SHAPE, seed=1)
    found = score_deviation(Node(), query.to(dtype), key.to(dtype))
    assert found == pytest.approx(score_deviation(Node(), query, key), rel=0.02)


@pytest.mark.parametrize("sharp", range(4))
def test_the_sharpest_head_counts(sharp: int) -> None:
    query, key = normal(*SHAPE), normal(*SHAPE, seed=1)
    query[1, sharp] *= 10
    assert score_deviation(Node(), query, key) == pytest.approx(10, rel=0.2)


def test_a_head_that_others_share_counts_for_its_own_queries() -> None:
    """Query head 5 of 8 belongs to key head 1 of 2."""
    query, key = normal(1, 8, 32, 64) * 0.01, normal(1, 2, 64, 64, seed=1) * 0.01
    query[:, 5] *= 100
    key[:, 1] *= 1000
    assert score_deviation(Node(), query, key) == pytest.approx(10, rel=0.2)
    assert score_deviation(Node(), query, key.flip(1)) < 0.2


NESTED = ["FlashAttentionBackward0", "EfficientAttentionBackward0", "CudnnAttentionBackward0"]


@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_have_their_heads_behind_positions(name: str) -> None:
    query, key = normal(4, 96, 64) * 3, normal(4, 80, 64, seed=1)
    query[1] *= 4
    found = score_deviation(Node(name), query.transpose(0, 1), key.transpose(0, 1))
    assert found == pytest.approx(score_deviation(Node(), query, key))
    assert found == pytest.approx(12, rel=0.2)


def test_long_sequences_are_sampled() -> None:
    query, key = normal(2, 16, 3 * MOST_QUERIES + 5, 64) * 4, normal(2, 16, 3 * MOST_KEYS + 7, 64, seed=1)
    assert MOST_HEADS < 2 * 16
    found = score_deviation(Node(), query, key)
    assert found == pytest.approx(of_all_scores(query, key, 0.125), rel=0.2)


def test_one_key_has_no_deviation() -> None:
    assert score_deviation(Node(), normal(2, 4, 16, 64) * 99, normal(2, 4, 1, 64)) == 0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_has_no_deviation(value: float) -> None:
    query, key = normal(*SHAPE), normal(*SHAPE, seed=1)
    query[0, 0, 0, 0] = value
    assert 0 <= score_deviation(Node(), query, key) < SHARP


def attend(size: float, **options: Any) -> Callable[[], tuple[list[Tensor], Tensor]]:
    """Returns what makes query, key and value, of scores that deviate by a size, and the loss of their attention."""

    def make() -> tuple[list[Tensor], Tensor]:
        query, key, value = (normal(*SHAPE, seed=seed) for seed in range(3))
        leaves = [tensor.requires_grad_() for tensor in (query * size**0.5, key * size**0.5, value)]
        result = F.scaled_dot_product_attention(*leaves, **options)
        return leaves, (result * normal(*SHAPE, seed=5)).sum()

    return make


def written_out(size: float) -> tuple[list[Tensor], Tensor]:
    """As `attend`, of operators of their own."""
    query, key, value = (normal(*SHAPE, seed=seed) for seed in range(3))
    leaves = [tensor.requires_grad_() for tensor in (query * size**0.5, key * size**0.5, value)]
    result = (leaves[0] @ leaves[1].mT / SHAPE[-1] ** 0.5).softmax(-1) @ leaves[2]
    return leaves, (result * normal(*SHAPE, seed=5)).sum()


def gradients_of(
    make: Callable[[], tuple[list[Tensor], Tensor]], engine: ActivationEngine | None = None
) -> tuple[list[Tensor], list[int | None]]:
    """Returns gradients, and the bits in which query, key and value are stored; None where they are exact."""
    if engine is None:
        leaves, loss = make()
        return list(torch.autograd.grad(loss, leaves)), []
    with engine.compress():
        leaves, loss = make()
    product: Any = loss.grad_fn.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess]
    node = product.next_functions[0][0]
    packed = [getattr(node, f"_raw_saved_{name}", None) for name in ("query", "key", "value")]
    bits = [_bits(each.data) for each in packed if each is not None]
    return list(torch.autograd.grad(loss, leaves)), bits


def _bits(packed: Any) -> int | None:
    stored = getattr(getattr(packed, "packed", packed), "stored", None)
    return getattr(stored, "precision", None) if stored is not None and stored.name == "planes" else None


def fresh(bits: Any, **options: Any) -> ActivationEngine:
    return engine_for(nn.Linear(1, 1), bits, **options)


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize(
    ("bits", "size", "expected"),
    [
        (4, 1.0, [4, 4, 4]),
        (4, 4.0, [8, 8, 4]),
        (2, 1.0, [2, 2, 2]),
        (2, 4.0, [4, 4, 2]),
        (1, 4.0, [2, 2, 1]),
        (8, 4.0, [8, 8, 8]),
        (8, 8.0, [None, None, 8]),
    ],
)
def test_a_first_pass_knows_how_sharp_it_is(bits: int, size: float, expected: list[int | None], packing: Any) -> None:
    engine = fresh(bits, packing=packing)
    for _ in range(3):
        _, found = gradients_of(attend(size), engine)
        assert found == expected
        assert_empty(engine)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 1.0}, {"attn_mask": normal(128, 128, seed=8) > 0}])
def test_options_of_an_attention_are_known(options: dict[str, Any]) -> None:
    """With a scale of 1 in place of 1/8, scores deviate by 8."""
    sharp = "scale" in options
    engine = fresh(4)
    for _ in range(2):
        assert gradients_of(attend(1.0, **options), engine)[1] == ([8, 8, 4] if sharp else [4, 4, 4])


@pytest.mark.parametrize("size", [3.0, 6.0, 10.0])
@pytest.mark.parametrize("bits", [4, 2])
def test_the_error_is_about_that_of_attention_written_out(size: float, bits: int) -> None:
    errors: list[float] = []
    for make in (attend(size), lambda: written_out(size)):
        exact, engine = gradients_of(make)[0], fresh(bits)
        with engine.compress():
            leaves, loss = make()
        errors.append(error(list(torch.autograd.grad(loss, leaves)), exact))
    fused, plain = errors
    assert fused < 1.5 * plain


@pytest.mark.parametrize("packing", ["device", "workers"])
def test_what_gets_sharp_later_is_noticed(packing: Any) -> None:
    engine = fresh(4, packing=packing)
    sizes = [1.0, *[6.0] * (LOOKS + 1), *[1.0] * LOOKS]
    found = [gradients_of(attend(size), engine)[1] for size in sizes]
    assert found[:LOOKS] == [[4, 4, 4]] * LOOKS
    assert found[LOOKS : 2 * LOOKS] == [[8, 8, 4]] * LOOKS
    assert found[2 * LOOKS :] == [[4, 4, 4]] * 2


def test_what_is_mild_stays_as_it_is() -> None:
    engine = fresh(4)
    assert [gradients_of(attend(1.0), engine)[1] for _ in range(LOOKS + 2)] == [[4, 4, 4]] * (LOOKS + 2)


def test_sharper_codes_are_no_second_codes() -> None:
    """What waited for its reader is stored once: bytes and counts are those of the second pass."""
    engine = fresh(4)
    seen: list[tuple[int, dict[str, int]]] = []
    for _ in range(2):
        with engine.compress():
            leaves, loss = attend(6.0)()
        held = engine.held_bytes
        torch.autograd.grad(loss, leaves)
        del loss
        seen.append((held, engine.finish_step().stored_as))
    assert seen[0] == seen[1]


def _planned(engine: ActivationEngine, bits: int) -> None:
    """Has an engine follow a plan that gives all sites the same bits."""
    sites = list(engine.pass_sizes)
    assert sites
    errors = [1.0, 0.5, 0.25, 0.1, 0.01]
    engine._policy.load(
        {
            "errors": [[*site, *errors] for site in sites],
            "slopes": [],
            "plan": [[*site, bits] for site in sites],
        }
    )
    engine._policy.follow = lambda *_: None


def test_a_plan_is_left_alone() -> None:
    engine = fresh("auto")
    assert gradients_of(attend(6.0), engine)[1] == [8, 8, 4]
    _planned(engine, 4)
    found = [gradients_of(attend(6.0), engine)[1] for _ in range(LOOKS + 2)]
    assert found == [[4, 4, 4]] * (LOOKS + 2)


def test_a_plan_is_left_alone_in_a_first_pass() -> None:
    other, engine = fresh("auto"), fresh("auto")
    gradients_of(attend(6.0), other)
    gradients_of(attend(6.0), engine)
    _planned(engine, 2)
    engine._readers._readings.clear()
    engine._readers._own.unknown = True
    assert gradients_of(attend(6.0), engine)[1] == [2, 2, 2]
    assert gradients_of(attend(6.0), other)[1] == [8, 8, 4]


def test_values_that_others_share_get_the_bits_that_each_needs() -> None:
    """A query that another operator reads as well, before and after the attention, has codes of its own."""

    def make() -> tuple[list[Tensor], Tensor]:
        query, key, value = (normal(*SHAPE, seed=seed) * 2.5 for seed in range(3))
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        before = (leaves[0] * 1).sin().mean() + leaves[0].cos().mean()
        result = F.scaled_dot_product_attention(*leaves)
        return leaves, before + (result * normal(*SHAPE, seed=5)).sum() + leaves[0].sin().mean()

    exact, engine = gradients_of(make)[0], fresh(4)
    for _ in range(3):
        with engine.compress():
            leaves, loss = make()
        assert error(list(torch.autograd.grad(loss, leaves)), exact) < 0.25
        del loss
        assert_empty(engine)


def test_one_tensor_may_be_query_and_key() -> None:
    def make() -> tuple[list[Tensor], Tensor]:
        x = (normal(*SHAPE) * 1.5).requires_grad_()
        return [x], (F.scaled_dot_product_attention(x, x, x) * normal(*SHAPE, seed=5)).sum()

    exact, engine = gradients_of(make)[0], fresh(4)
    for _ in range(3):
        with engine.compress():
            leaves, loss = make()
        assert error(list(torch.autograd.grad(loss, leaves)), exact) < 0.25
        del loss
        assert_empty(engine)
