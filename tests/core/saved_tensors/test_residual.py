"""The result of a ReLU follows from a normalization of the batch, and from what a residual block began with."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from daf_core import ModifiedInPlaceError
from daf_core.saved_tensors.derive import LONGEST_SUM
from tests.core.harness import assert_empty, assert_same, engine_for, error, normal, trainable
from tests.core.residual import (
    NORMALIZED,
    PLAIN,
    RELUS,
    SHAPES,
    SUM,
    Net,
    blocks,
    forward,
    gradients_of,
    train,
)


@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_residual_block(dims: int, relu: Callable[[Tensor], Tensor], short: bool) -> None:
    """Both results of a block follow, in any number of dimensions."""
    found, forms = train(Net(dims=dims), lambda net, x: blocks(net, x, relu, short))
    assert forms == [NORMALIZED, SUM]
    assert found < 0.012


@pytest.mark.parametrize(("precision", "bound"), [(8, 0.012), (4, 0.25), (2, 1.1)])
@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
def test_derived_gradient_is_as_good_as_a_stored_one(
    short: bool, precision: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deriving adds little error of its own, and holds less."""

    def function(net: Net, x: Tensor) -> Tensor:
        return blocks(net, x, short=short)

    derived, forms = train(Net(3), function, precision=precision)
    assert forms == ([NORMALIZED, SUM] * 3 if short else [NORMALIZED, SUM, NORMALIZED, SUM, NORMALIZED, PLAIN])
    monkeypatch.setattr("daf_core.saved_tensors.hooks.Derivation.argument_of", lambda *_: None)
    stored, forms = train(Net(3), function, precision=precision)
    assert forms == [PLAIN] * 6
    assert derived < min(bound, 1.5 * stored)


@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
def test_channels_last(relu: Callable[[Tensor], Tensor], short: bool) -> None:
    """In the other memory format too."""
    inputs = normal(*SHAPES[2]).contiguous(memory_format=torch.channels_last)
    net = Net().to(memory_format=torch.channels_last)
    found, forms = train(net, lambda net, x: blocks(net, x, relu, short), inputs)
    assert forms == [NORMALIZED, SUM]
    assert found < 0.012


def test_chain_of_identities_is_cut() -> None:
    """Each adds the decoding of a tensor: after so many sums one is stored."""
    found, forms = train(Net(2 * LONGEST_SUM + 3), blocks)
    sums = forms[1::2]
    assert sums == ([SUM] * LONGEST_SUM + [PLAIN]) * 2 + [SUM]
    assert found < 0.012


def _sequence(net: Net, x: Tensor) -> Tensor:
    return net.norm_1[0](x.flatten(2).transpose(1, 2).flatten(0, 1)).relu()


def test_features_without_positions() -> None:
    """A batch normalization of vectors."""
    net = Net(dims=1)
    net.head = nn.Linear(16, 8)
    found, forms = train(net, _sequence)
    assert (forms, found < 0.012) == ([NORMALIZED], True)


def test_what_is_held() -> None:
    """Of a block three inputs at 8 bits and two tensors of signs; what stem and loss save comes on top."""
    net = Net()
    engine = engine_for(net, 8)
    loss = forward(net, blocks, normal(*SHAPES[2]), engine, [])
    stored = engine.finish_step().stored_as
    assert (stored["planes"] - 2, stored["signs"], stored["rectified"]) == (3, 2, 2)
    loss.backward()
    assert_empty(engine)


@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
def test_graph_may_run_backward_twice(short: bool) -> None:
    """A recipe reads its sources as often as it is asked."""
    net = Net(2)
    engine = engine_for(net, 4)
    loss = forward(net, lambda net, x: blocks(net, x, short=short), normal(*SHAPES[2]), engine, [])
    results = []
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        results.append(gradients_of(net))
        net.zero_grad()
    assert_same(*results)
    assert_empty(engine)


@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
def test_graph_that_dies_leaves_nothing(short: bool) -> None:
    """Recipes tie no knot: no collector is needed."""
    net = Net(3)
    engine = engine_for(net, 4)
    gc.collect()
    gc.disable()
    try:
        loss = forward(net, lambda net, x: blocks(net, x, short=short), normal(*SHAPES[2]), engine, [])
        assert engine.held_bytes
        del loss
        assert_empty(engine)
    finally:
        gc.enable()


def test_changed_weight_or_bias_is_an_error() -> None:
    """The result is computed again with them, so they must be those of forward."""
    for name in ("weight", "bias"):
        net = Net()
        engine = engine_for(net, 8)
        loss = forward(net, blocks, normal(*SHAPES[2]), engine, [])
        with torch.no_grad():
            getattr(net.norm_1[0], name).mul_(2)
        with pytest.raises(ModifiedInPlaceError):
            loss.backward()


def test_pressure_takes_bits_of_the_sources() -> None:
    """The results lose what their sources lose, never their signs."""
    net = Net(2)
    engine = engine_for(net, 8, memory_budget="100KB")
    loss = forward(net, blocks, normal(*SHAPES[2]), engine, [])
    assert engine.held_bytes <= 100_000
    loss.backward()
    assert engine.finish_step().dropped_planes > 0
    assert all(gradient.isfinite().all() for gradient in gradients_of(net))
    assert_empty(engine)


@pytest.mark.parametrize("short", [False, True], ids=["identity", "shortcut"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_rehearsal(layout: torch.memory_format, short: bool) -> None:
    """Exact activations give the plain gradient, bit by bit but for what is computed again; 8 bits are close."""
    net = Net(3).to(memory_format=layout)
    x = normal(*SHAPES[2]).contiguous(memory_format=layout)

    def loss_of() -> Tensor:
        outputs = net.head(blocks(net, net.stem(x), short=short))
        return (outputs * normal(*outputs.shape, seed=1)).sum()

    plain = torch.autograd.grad(loss_of(), trainable(net), allow_unused=True)
    engine = engine_for(net, 8)
    with engine.probe_pass(loss_of) as rehearsal:
        exact = rehearsal.gradients({})
        eight = rehearsal.compare({site: 8 for site, _ in rehearsal.activations})
        reads = rehearsal.take_reads()
    kept = [gradient for gradient in plain if gradient is not None]
    assert error([gradient for gradient in exact if gradient is not None], kept) < 1e-5
    assert eight.error < 0.02
    assert len(reads) == len(rehearsal.activations)
    del rehearsal, reads
    assert_empty(engine)
