"""Rule 1: without a lossy codec, training is bit-identical to training without DAF."""

from __future__ import annotations

import pytest
import torch

from daf_core import DAFConfig
from tests.core.harness import MODELS, assert_same, backward, engine_for, error, make_model, train, watch

EXACT = DAFConfig(precision="exact")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_rule_1_exact_mode_is_bit_identical(name: str, backend: str) -> None:
    """Losses, gradients, weights, buffers and torch's generator agree after several optimizer steps."""
    model, loss = make_model(name)
    config = DAFConfig(precision="exact", backend=backend)
    assert_same(train(model, loss, config), train(model, loss))


def test_exact_mode_still_shrinks_masks_and_indices() -> None:
    """The forms that are exact by themselves are used, so that the comparison above says something about them."""
    seen = {name: {saved.form for saved in _watch(name, "exact")} for name in ("transformer", "convnet")}
    assert seen["transformer"] == {"parameter", "raw", "bitmask", "product"}
    assert seen["convnet"] == {"parameter", "raw", "narrow_int"}


def _watch(name: str, precision: object) -> list:
    model, loss = make_model(name)
    engine = engine_for(model, precision)
    seen = watch(engine)
    backward(model, loss, engine)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_lossy_modes_are_lossy_and_close(name: str) -> None:
    """Gradients at 8 bits have a small error, those at 2 bits a larger one, and neither is zero."""
    model, loss = make_model(name)
    exact = backward(model, loss)
    errors = [error(backward(model, loss, engine_for(model, bits)), exact) for bits in (8, 4, 2)]
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_reference_backend_gives_the_kernels_gradients(name: str, bits: int) -> None:
    """The slow path works end to end and decodes the same bits."""
    model, loss = make_model(name)
    expected = backward(model, loss, engine_for(model, bits))
    assert_same(backward(model, loss, engine_for(model, bits, backend="reference")), expected)


def test_reference_backend_repeats_stochastic_rounding() -> None:
    """Both backends draw the same random numbers."""
    model, loss = make_model("mlp")
    engines = [engine_for(model, 4, backend=name, rounding="stochastic", seed=5) for name in ("auto", "reference")]
    assert_same(*(backward(model, loss, engine) for engine in engines))


@pytest.mark.parametrize("name", MODELS)
def test_generators_of_torch_are_untouched(name: str) -> None:
    """The stream of dropout masks is the same with lossy codecs and stochastic rounding as without DAF."""
    model, loss = make_model(name)
    config = DAFConfig(precision=2, rounding="stochastic")
    plain, compressed = train(model, loss, steps=2), train(model, loss, config, steps=2)
    assert torch.equal(plain[-1], compressed[-1])
    assert torch.equal(plain[0], compressed[0])
