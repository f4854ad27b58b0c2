"""Logarithms of probabilities in few bits keep the gradient of the cross entropy, however sure a model is."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine
from daf_core.codecs import logarithms
from tests.core.harness import assert_empty, engine_for, error, integers, normal, outside_bytes

BOUNDS = {8: 0.005, 4: 0.02, 2: 0.06}

Loss = Callable[[Tensor], Tensor]


def gradient(loss: Loss, scores: Tensor, engine: ActivationEngine | None = None) -> Tensor:
    """Returns the gradient of a loss for its scores."""
    leaf = scores.clone().requires_grad_()
    if engine is None:
        value = loss(leaf.clone())  # a leaf that has a gradient stays as it is
    else:
        with engine.compress():
            value = loss(leaf.clone())
    (found,) = torch.autograd.grad(value, leaf)
    return found


def fresh(bits: int = 4, **options: Any) -> ActivationEngine:
    return engine_for(nn.Linear(1, 1), bits, **options)


def errors(loss: Loss, scores: Tensor, bits: int, passes: int = 2) -> list[float]:
    """Returns the errors of a first pass and of later ones; logarithms must have been stored in few bits."""
    exact, engine = gradient(loss, scores), fresh(bits)
    found: list[float] = []
    for _ in range(passes):
        found.append(error([gradient(loss, scores, engine)], [exact]))
        assert engine.finish_step().stored_as["logarithms"] > 0
    assert_empty(engine)
    return found


def sure(rows: int, words: int, probability: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns scores, and targets that have about a probability."""
    scores, targets = normal(rows, words), integers(words, rows)
    others = scores.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    target_scores = others + math.log(probability / (1 - probability))
    return scores.scatter(1, targets[:, None], target_scores[:, None]).to(dtype), targets


def by_logsumexp(scores: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy by hand, of probabilities that are not normalized, as libraries for alignment compute it."""
    return (scores.logsumexp(1) - scores.gather(1, targets[:, None])[:, 0]).mean()


CROSS_ENTROPIES = {"log_softmax": F.cross_entropy, "logsumexp": by_logsumexp}
each_way = pytest.mark.parametrize("cross_entropy", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
CrossEntropy = Callable[[Tensor, Tensor], Tensor]

PROBABILITIES = [0.0003, 0.003, 0.03, 0.3, 0.5, 0.9, 0.99, 0.999, 0.9999]


@each_way
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("probability", PROBABILITIES)
def test_the_error_does_not_grow_with_probability(probability: float, bits: int, cross_entropy: CrossEntropy) -> None:
    scores, targets = sure(32, 1000, probability)
    assert max(errors(lambda x: cross_entropy(x, targets), scores, bits)) < BOUNDS[bits]


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("level", [100.0, -1e4, -1e9])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_may_be_at_any_level(dim: int, level: float, bits: int) -> None:
    """Also where several share a group: they are short, or lie beside each other."""
    levels = level * (torch.arange(40) % 3 == 0)
    scores = normal(1024, 40) * 3 if dim else normal(512, 40) * 3
    scores += (level * (torch.arange(1024) % 3 == 0))[:, None] if dim else levels
    assert max(errors(lambda x: x.logsumexp(dim).mean(), scores, bits)) < 4 * BOUNDS[bits]


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("offset", [-300.0, 80.0, 300.0])
def test_the_scale_of_probabilities_does_not_matter(offset: float, bits: int) -> None:
    """Their exponentials are 0, or infinite, in 32 bits: only their ratios to the largest of a row are used."""
    scores, targets = sure(32, 1000, 0.9)
    assert max(errors(lambda x: by_logsumexp(x, targets), scores + offset, bits)) < BOUNDS[bits]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("probability", [1 - 1e-6, 1 - 1e-9, 1 - 1e-12])
def test_tiny_probabilities_sum_to_what_they_did(probability: float, bits: int) -> None:
    """They are far below the range of codes; of the target's gradient torch itself leaves only rounding."""
    scores, targets = sure(32, 1000, probability)
    others = torch.ones_like(scores, dtype=torch.bool).scatter(1, targets[:, None], False)
    exact, engine = gradient(lambda x: F.cross_entropy(x, targets), scores)[others], fresh(bits)
    for _ in range(2):
        found = gradient(lambda x: F.cross_entropy(x, targets), scores, engine)[others]
        assert float(found.sum()) == pytest.approx(float(exact.sum()), rel=1e-3)
        assert error([found], [exact]) < (0.01 if bits == 8 else 0.12)


@each_way
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("words", [500, 2048, 10_007, 50_000])
def test_any_number_of_words(words: int, bits: int, cross_entropy: CrossEntropy) -> None:
    for probability in (0.001, 0.99):
        scores, targets = sure(16, words, probability)
        assert max(errors(lambda x, targets=targets: cross_entropy(x, targets), scores, bits)) < BOUNDS[bits]


@each_way
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("mask", [-65504.0, -1e9, -torch.inf])
@pytest.mark.parametrize("probability", [0.01, 0.9, 0.999])
def test_masked_words_spoil_nothing(probability: float, mask: float, bits: int, cross_entropy: CrossEntropy) -> None:
    scores, targets = sure(32, 1000, probability)
    masked = (normal(32, 1000, seed=3) > 0).scatter(1, targets[:, None], torch.zeros(32, 1, dtype=torch.bool))
    scores = scores.masked_fill(masked, mask)
    exact, engine = gradient(lambda x: cross_entropy(x, targets), scores), fresh(bits)
    for _ in range(2):
        found = gradient(lambda x: cross_entropy(x, targets), scores, engine)
        assert error([found], [exact]) < BOUNDS[bits]
        assert not found.isnan().any()


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", [(64, 48, 40), (24, 32, 20, 24)])
def test_any_dimension(shape: tuple[int, ...], dim: int, bits: int) -> None:
    scores = normal(*shape) * 3
    best = scores.argmax(dim, keepdim=True)
    found = errors(lambda x: -x.log_softmax(dim).gather(dim, best).mean(), scores, bits)
    assert max(found) < 2 * BOUNDS[bits]
    for keepdim in (True, False):
        assert max(errors(lambda x, keep=keepdim: x.logsumexp(dim, keep).square().mean(), scores, bits)) < BOUNDS[bits]


@pytest.mark.parametrize("dims", [(0, 1), (0, -1)])
def test_sums_over_several_dimensions_stay_exact(dims: tuple[int, ...]) -> None:
    scores, engine = normal(64, 48, 40), fresh(2)
    exact = gradient(lambda x: x.logsumexp(dims).mean(), scores)
    for _ in range(2):
        assert torch.equal(gradient(lambda x: x.logsumexp(dims).mean(), scores, engine), exact)


@pytest.mark.parametrize("bits", BOUNDS)
def test_maps_of_classes(bits: int) -> None:
    scores, targets = normal(4, 21, 16, 16) * 3, integers(21, 4, 16, 16)
    assert max(errors(lambda x: F.cross_entropy(x, targets), scores, bits)) < 2 * BOUNDS[bits]


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x.permute(2, 0, 1),
        lambda x: x.unflatten(2, (2, 24)).permute(0, 3, 2, 1),
    ],
    ids=["transposed", "turned", "holes", "permuted", "four"],
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_layout(layout: Callable[[Tensor], Tensor], dim: int) -> None:
    scores = normal(32, 64, 48) * 3

    def loss(x: Tensor) -> Tensor:
        viewed = layout(x)
        return -viewed.log_softmax(dim).gather(dim, viewed.detach().argmax(dim, keepdim=True)).mean()

    assert max(errors(loss, scores, 4)) < 0.04


@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("probability", [0.003, 0.5, 0.9])
def test_types_of_half_the_size(probability: float, bits: int, dtype: torch.dtype, cross_entropy: CrossEntropy) -> None:
    scores, targets = sure(32, 1000, probability, dtype)
    found = errors(lambda x: cross_entropy(x, targets), scores, bits)
    assert max(found) < BOUNDS[bits] + 0.02


@each_way
@pytest.mark.parametrize("words", [2, 3, 5, 8, 9, 10, 16])
def test_few_words_stay_right(words: int, cross_entropy: CrossEntropy) -> None:
    """Where what stays exact is as much as all of it, all of it does."""
    rows = 16384 // words
    scores, targets = normal(rows, words) * 4, integers(words, rows)
    exact, engine = gradient(lambda x: cross_entropy(x, targets), scores), fresh(4)
    for _ in range(2):
        found = gradient(lambda x: cross_entropy(x, targets), scores, engine)
        assert error([found], [exact]) < 0.02
    if words < 10:
        assert torch.equal(found, exact)  # pyright: ignore[reportPossiblyUnboundVariable]


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda x: x.index_fill(0, torch.tensor([3, 7]), -torch.inf),
    "no number": lambda x: x.index_fill(0, torch.tensor([3]), torch.nan),
    "one of no number": lambda x: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 1234, torch.nan),
    "infinite": lambda x: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 1234, torch.inf),
    "several infinite": lambda x: x.masked_fill((torch.arange(x.numel()).view(x.shape) - 1234).abs() < 20, torch.inf),
}


@each_way
@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("bits", [8, 2])
def test_rows_that_are_spoiled_stay_so(name: str, bits: int, cross_entropy: CrossEntropy) -> None:
    scores, targets = sure(32, 1000, 0.9)
    scores = SPOILED[name](scores)
    exact, engine = gradient(lambda x: cross_entropy(x, targets), scores), fresh(bits)
    assert exact.isnan().any()
    for _ in range(2):
        found = gradient(lambda x: cross_entropy(x, targets), scores, engine)
        assert torch.equal(found.isnan(), exact.isnan())
        assert error([found.nan_to_num()], [exact.nan_to_num()]) < BOUNDS[bits]


@pytest.mark.parametrize("bits", BOUNDS)
def test_all_bytes_are_counted(bits: int) -> None:
    """Beside the planes are 9 logarithms of a row, their places, and a sum, each of 4 bytes."""
    rows, words = 64, 1000
    scores, targets = sure(rows, words, 0.9)
    engine, leaf = fresh(bits), scores.clone().requires_grad_()
    for _ in range(2):
        with engine.compress():
            value = leaf.log_softmax(-1)
            loss = value.gather(1, targets[:, None]).sum()
            node: Any = value.grad_fn
            del value
            gc.collect()
        beside = outside_bytes(engine)
        stored = node._raw_saved_result.data.stored
        assert stored.name == "logarithms"
        assert stored.held_bytes == engine.held_bytes - beside + rows * (9 * 8 + 4)
        assert beside >= rows * (9 * 8 + 4)
        assert engine.leased_pages > 0
        assert engine.held_bytes < scores.nbytes
        loss.backward()
        del loss, node, stored
        assert_empty(engine)


def test_a_budget_takes_planes() -> None:
    """Error grows, and what is exact stays: the gradient of sure rows is still that of the target."""
    scores, targets = sure(64, 4000, 0.99)
    exact = gradient(lambda x: F.cross_entropy(x, targets), scores)
    engine = fresh(8, memory_budget=160 << 10)
    for _ in range(3):
        found = gradient(lambda x: F.cross_entropy(x, targets), scores, engine)
        statistics = engine.finish_step()
        assert statistics.held_bytes <= 160 << 10
        assert statistics.dropped_planes > 0
        assert error([found], [exact]) < 0.1
    assert_empty(engine)


def test_rounding_at_random_is_repeatable() -> None:
    scores, targets = sure(32, 1000, 0.9)
    found = [
        [gradient(lambda x: F.cross_entropy(x, targets), scores, engine) for _ in range(3)]
        for engine in (fresh(2, seed=seed, rounding="stochastic") for seed in (5, 5, 6))
    ]
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][1], found[0][2])


def test_others_may_read_them_too() -> None:
    scores, targets = sure(64, 1000, 0.9)
    weights = normal(64, 1000, seed=4).mul(0.01).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        found = x.log_softmax(-1)
        return F.nll_loss(found, targets) + (found * weights).mean() + F.nll_loss(found * 1.5, targets)

    exact = gradient(loss, scores)
    leaf = scores.clone().requires_grad_()
    (of_weights,) = torch.autograd.grad(loss(leaf), weights)
    engine = fresh(8)
    for _ in range(3):
        assert error([gradient(loss, scores, engine)], [exact]) < 0.01
        with engine.compress():
            value = loss(leaf)
        assert error(list(torch.autograd.grad(value, [weights])), [of_weights]) < 0.05


@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"reduction": "sum"}, {"ignore_index": 3}, {"weight": torch.arange(1000) % 7.0}],
)
def test_options_of_the_cross_entropy(options: dict[str, Any], bits: int) -> None:
    scores, targets = sure(32, 1000, 0.9)
    targets[::5] = options.get("ignore_index", 0)
    assert max(errors(lambda x: F.cross_entropy(x, targets, **options), scores, bits)) < 2 * BOUNDS[bits]


def _mean_of_words(chosen: Tensor) -> Tensor:
    words = torch.arange(chosen.numel()).view(8, -1) % 3 > 0
    return (chosen.view(8, -1) * words).sum(-1) / words.sum(-1)


def _odds(mean: Tensor) -> Tensor:
    ratio = (mean[:4] - mean[4:]) - (torch.log1p(-mean[:4].exp()) - torch.log1p(-mean[4:].exp()))
    return -F.logsigmoid(ratio).mean()


ALIGNMENT: dict[str, Loss] = {
    "unlikelihood": lambda chosen: -torch.log1p(-chosen.exp()).mean(),
    "odds ratio": lambda chosen: _odds(_mean_of_words(chosen)),
    "preference": lambda chosen: -F.logsigmoid(2 * (_mean_of_words(chosen)[:4] - _mean_of_words(chosen)[4:])).mean(),
    "perplexity": lambda chosen: (-_mean_of_words(chosen)).exp().mean(),
    "logarithm of the loss": lambda chosen: (1e-6 - chosen).log().mean(),
    "power of the probability": lambda chosen: -chosen.exp().sqrt().mean(),
}


@pytest.mark.parametrize("loss", ALIGNMENT.values(), ids=ALIGNMENT)
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("probability", [0.003, 0.5, 0.99])
def test_a_pole_may_follow(loss: Loss, bits: int, probability: float, normalized: bool) -> None:
    """As 1 / (1 - p): it is a factor of the row's gradient, whose relative error does not grow with it."""
    scores, targets = sure(48, 1000, probability)

    def aligned(x: Tensor) -> Tensor:
        found = x.log_softmax(-1) if normalized else x - x.logsumexp(-1, keepdim=True)
        return loss(found.gather(1, targets[:, None])[:, 0])

    assert max(errors(aligned, scores, bits)) < BOUNDS[bits]


def _of_likely(x: Tensor) -> Tensor:
    likely = x.detach() > x.detach().mean(1, keepdim=True) - 1
    return x.logsumexp(1) - x.masked_fill(~likely, -1e9).logsumexp(1)


def _to_components(x: Tensor) -> Tensor:
    grid = torch.linspace(-3, 3, 64)
    return -(-8 * (x[:, :8, None] - grid).square()).logsumexp(2)


def _overlap(x: Tensor) -> Tensor:
    other = (x.detach() + 0.1 * normal(*x.shape, seed=9)).softmax(1)
    return -(x.log_softmax(1).exp() * other).sqrt().sum(1)


CANCELLING: dict[str, Loss] = {
    "part of all": lambda x: _of_likely(x).mean(),
    "part of all, the other way round": lambda x: (-x[:, 1:].logsumexp(1) + x.logsumexp(1)).mean(),
    "squared difference": lambda x: (x.logsumexp(1) - (1.01 * x).logsumexp(1)).square().mean(),
    "marginal": lambda x: -x.log_softmax(1)[:, :900].logsumexp(1).mean(),
    "mixture": lambda x: _to_components(x).mean(),
    "overlap": lambda x: _overlap(x).mean(),
}


@pytest.mark.parametrize("loss", CANCELLING.values(), ids=CANCELLING)
@pytest.mark.parametrize("bits", [8, 2])
def test_probabilities_that_cancel_stay_exact(loss: Loss, bits: int) -> None:
    """The gradient is a difference of them: with codes errors were up to 5.5 at 8 bits."""
    scores = normal(512, 1000)
    exact, engine = gradient(loss, scores), fresh(bits)
    for _ in range(3):
        assert error([gradient(loss, scores, engine)], [exact]) < 1e-4


@pytest.mark.parametrize("rows", [8, 40])
def test_a_loop_may_take_one_row_after_the_other(rows: int) -> None:
    """Each is much smaller than all of them, which something else has saved, and is no statistic for that."""
    scores, engine = normal(rows, 16, 1000), fresh(4)
    targets = integers(1000, rows, 16)

    def loss(x: Tensor) -> Tensor:
        chosen = x.gather(-1, targets[..., None])[..., 0]
        return (torch.stack([row.logsumexp(-1) for row in x]) - chosen).mean()

    exact = gradient(loss, scores)
    for _ in range(3):
        assert error([gradient(loss, scores, engine)], [exact]) < BOUNDS[4]
        statistics = engine.finish_step()
    assert statistics.stored_as["logarithms"] == rows  # pyright: ignore[reportPossiblyUnboundVariable]
    assert statistics.held_bytes < statistics.raw_bytes / 3  # pyright: ignore[reportPossiblyUnboundVariable]


def test_probabilities_of_a_row_sum_to_one() -> None:
    scores, _ = sure(64, 1000, 0.5)
    engine, leaf = fresh(2), scores.clone().requires_grad_()
    with engine.compress():
        value: Any = leaf.log_softmax(-1)
    decoded = value.grad_fn._saved_result
    assert not torch.equal(decoded, value)
    assert torch.allclose(decoded.exp().sum(-1), torch.ones(64), atol=1e-5)
    best, places = value.topk(8)
    assert torch.equal(decoded.gather(-1, places), best)


@each_way
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("mask", [-1e9, -torch.inf])
@pytest.mark.parametrize("probability", [0.01, 0.999, 0.9999])
def test_masked_words_of_long_rows(probability: float, mask: float, bits: int, cross_entropy: CrossEntropy) -> None:
    """Where a value is far below the largest, long rows are bounded as short ones are."""
    scores, targets = sure(8, logarithms.LONG, probability)
    masked = (normal(8, logarithms.LONG, seed=3) > 2).scatter(1, targets[:, None], torch.zeros(8, 1, dtype=torch.bool))
    scores = scores.masked_fill(masked, mask)
    assert max(errors(lambda x: cross_entropy(x, targets), scores, bits)) < BOUNDS[bits]


@pytest.mark.parametrize("words", [logarithms.LONG, logarithms.LONG + 1, logarithms.LONG + logarithms.BLOCK - 1])
@pytest.mark.parametrize("first", [0, 5000, -12])
def test_the_largest_of_long_rows(words: int, first: int) -> None:
    """They may be in one block, or in what is left after the last one."""
    rows = normal(4, words).view(4, words)
    rows[:, first:][:, :12] = torch.arange(10.0, 22.0)
    rows[2] = rows[2].flip(0)
    best, places = logarithms._largest(rows[:, :, None], 9)
    expected = rows.topk(9, dim=1)
    assert torch.equal(best[:, :, 0], expected.values)
    assert torch.equal(places[:, :, 0], expected.indices)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("words", [1000, logarithms.LONG])
def test_a_device_does_not_have_the_host_wait(words: int, normalized: bool) -> None:
    rows = torch.empty(16, words, 1, device="meta")  # which raises where the host asks for a value
    best, places = logarithms._largest(rows, logarithms.LARGEST + 1)
    others = logarithms._bounded(rows, best)
    total = logarithms._total(others, best[:, :-1], places[:, :-1], normalized)
    assert total.shape == (16, 1, 1)


def test_a_device_finds_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds up all rows, where a CPU takes the difference to 1 for those of which that is exact enough."""
    rows = F.log_softmax(normal(64, 500, 1) * 4, dim=1)
    best, places = logarithms._largest(rows, logarithms.LARGEST)
    found = logarithms._total(rows, best, places, normalized=True)
    monkeypatch.setattr(logarithms, "LEAST_DIFFERENCE", math.inf)
    assert torch.allclose(found, logarithms._total(rows, best, places, normalized=True), rtol=1e-4)
    monkeypatch.undo()
    assert torch.allclose(found, logarithms._total(rows, best, places, normalized=False), rtol=1e-4)
