"""Rule 11: the same seed and the same run give the same bytes; another seed gives others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from tests.core.harness import LARGE, Scale, assert_same, engine_for, error, make_model, normal, pager_of, train, watch


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_rule_11_same_seed_same_run(name: str, rounding: Any) -> None:
    """Losses, gradients and weights of several steps repeat."""
    model, loss = make_model(name)
    config = DAFConfig(precision=4, rounding=rounding, seed=3)
    assert_same(train(model, loss, config), train(model, loss, config))


def _bytes(passes: int = 1, **options: Any) -> list[Tensor]:
    """What lies on the pages of one activation after each of several forward passes of the same data."""
    model = Scale()
    engine = engine_for(model, 4, **options)
    _clear_pages(engine)
    stored: list[Any] = []
    watch(engine, lambda packed: stored.append(getattr(packed, "stored", None)))
    for _ in range(passes):
        with engine.compress():
            loss = model(normal(*LARGE))
        del loss
    return [item.pager.pool.read(item.lease.pages) for item in stored if item is not None]


def _clear_pages(engine: ActivationEngine) -> None:
    """Zeroes the pages that are leased next: what an activation leaves of its last page is what was there before."""
    pool = pager_of(engine).pool
    pages = pool.take(16)
    pool.write(pages, torch.zeros(16, pool.page_bytes, dtype=torch.uint8))
    pool.give(pages)


def test_rule_11_bytes_repeat_and_depend_on_the_seed() -> None:
    """All 64 bits of the seed count."""
    seeds = [0, 1, 1 << 32, (1 << 64) - 1]
    pages = {seed: _bytes(rounding="stochastic", seed=seed)[0] for seed in seeds}
    for seed, content in pages.items():
        assert torch.equal(content, _bytes(rounding="stochastic", seed=seed)[0])
        others = [pages[other] for other in seeds if other != seed]
        assert not any(torch.equal(content, other) for other in others)


def test_rule_11_steps_draw_different_numbers() -> None:
    """The same data is rounded differently in the next forward pass, so that errors average out; nearest is not."""
    first, second = _bytes(2, rounding="stochastic")
    assert not torch.equal(first, second)
    assert torch.equal(*_bytes(2, rounding="nearest"))


def test_rule_11_sites_draw_different_numbers() -> None:
    """Equal tensors at two sites get independent rounding errors."""
    model = nn.Sequential(Scale(), Scale())
    engine = engine_for(model, 2, rounding="stochastic")
    with engine.compress():
        first, second = model[0](normal(*LARGE)), model[1](normal(*LARGE))
    assert not torch.equal(first.grad_fn._saved_self, second.grad_fn._saved_self)


def test_rule_11_stochastic_rounding_is_unbiased() -> None:
    """The mean over many passes is nearer to the value than one pass is."""
    model = Scale()
    engine = engine_for(model, 2, rounding="stochastic")
    x, decoded = normal(*LARGE), []
    for _ in range(64):
        with engine.compress():
            output = model(x)
        decoded.append(output.grad_fn._saved_self.detach())
    mean = torch.stack(decoded).mean(0)
    assert error([mean], [x]) < 0.35 * error([decoded[0]], [x])


def test_rule_11_recomputing_or_unpacking_twice_gives_the_same_bits() -> None:
    """Decoding draws no random number."""
    model = Scale()
    engine = engine_for(model, 4, rounding="stochastic")
    with engine.compress():
        output = model(normal(*LARGE))
    node: Any = output.grad_fn
    assert torch.equal(node._saved_self, node._saved_self)


def test_rule_11_seed_changes_gradients_only_a_little() -> None:
    """Seeds give different gradients of the same quality."""
    model, loss = make_model("mlp")
    runs = [train(model, loss, DAFConfig(precision=8, rounding="stochastic", seed=seed), 1) for seed in (1, 2)]
    count = len(list(model.parameters()))
    assert 0 < error(runs[0][1 : 1 + count], runs[1][1 : 1 + count]) < 0.1
