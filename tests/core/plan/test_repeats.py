"""Blocks whose second run is not their first one again are found, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from daf_core import DAFConfig
from daf_core.model.blocks import Block, blocks_of
from daf_core.plan.cost.measure import measure
from daf_core.plan.observe.repeats import unlike_blocks
from daf_core.plan.run.runner import described
from daf_core.plan.search.planner import tried
from tests.core.harness import integers, normal
from tests.core.plan import nets

WIDTH = 8


class Layer(nn.Module):
    """Runs a function of itself and its input after two linear layers."""

    def __init__(self, run: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.state: Tensor | None = None
        self.generator = torch.Generator().manual_seed(0)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.second(self.linear(x)))


class Net(nn.Module):
    """Two layers, of which the second is as given; states begin anew in each pass."""

    def __init__(self, run: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(_dropped), Layer(run)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.state = None
            layer.mean.zero_()
            x = layer(x)
        return x


def _dropped(layer: Layer, x: Tensor) -> Tensor:
    return layer.drop(torch.tanh(x))


def _normalized(layer: Layer, x: Tensor) -> Tensor:
    return layer.norm(x)


def _noted(layer: Layer, x: Tensor) -> Tensor:
    layer.state = x.detach()
    return x.sin()


def _python_noise(_layer: Layer, x: Tensor) -> Tensor:
    return x * random.random() + float(np.random.rand())


def _masked_out(_layer: Layer, x: Tensor) -> Tensor:
    return torch.where(torch.arange(WIDTH) < 3, x / 0, x)


def _differentiated(_layer: Layer, x: Tensor) -> Tensor:
    inner = x.detach().requires_grad_()
    return x * torch.autograd.grad(inner.sin().sum(), inner)[0]


def _with_state(layer: Layer, x: Tensor) -> Tensor:
    result = torch.tanh(x if layer.state is None else x + layer.state)
    layer.state = result.detach()
    return result


def _with_state_in_graph(layer: Layer, x: Tensor) -> Tensor:
    """Adds nothing to the values, as where texts begin, and something to the graph."""
    result = torch.tanh(x + (torch.zeros_like(x) if layer.state is None else layer.state * torch.zeros(WIDTH)))
    layer.state = result
    return result


def _with_mean(layer: Layer, x: Tensor) -> Tensor:
    layer.mean.lerp_(x.detach().mean(0), 0.5)
    return x - layer.mean


def _own_noise(layer: Layer, x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=layer.generator)


def _wider(layer: Layer, x: Tensor) -> Tensor:
    layer.state = x.detach() if layer.state is None else torch.cat([layer.state, x.detach()])
    return x * len(layer.state)


def _counted(layer: Layer, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x * layer.calls


ALIKE = [_dropped, _normalized, _noted, _python_noise, _own_noise, _masked_out, _differentiated]
UNLIKE = [_counted, _with_state, _with_state_in_graph, _with_mean, _wider]


def _found(run: Callable[[Layer, Tensor], Tensor], loss: Callable[[Tensor], object] = torch.sum) -> set[str]:
    model = Net(run).train()
    blocks = [Block(name, model.get_submodule(name)) for name in ("layers.0", "layers.1")]
    x = normal(4, WIDTH)
    found = unlike_blocks(blocks, lambda: loss(model(x)))
    assert not any("forward" in vars(layer) for layer in model.layers)
    return found


@pytest.mark.parametrize("run", ALIKE)
def test_blocks_that_run_again_as_before_are_left(run: Callable[[Layer, Tensor], Tensor]) -> None:
    assert _found(run) == set()


@pytest.mark.parametrize("run", UNLIKE)
def test_blocks_with_a_state_of_their_own_are_found(run: Callable[[Layer, Tensor], Tensor]) -> None:
    assert _found(run) == {"layers.1"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "found"), [(0.5, set[str]()), (4.0, {"layers.1"})])
def test_rounding_is_no_difference(dtype: torch.dtype, share: float, found: set[str]) -> None:
    """As that of kernels which add up in any order."""
    calls: list[int] = []

    def run(_layer: Layer, x: Tensor) -> Tensor:
        calls.append(1)
        return (x.float() * (1 + share * max(2 * torch.finfo(dtype).eps, 1e-3) * (len(calls) % 2))).to(dtype)

    model = Net(run).to(dtype)
    blocks = [Block(name, model.get_submodule(name)) for name in ("layers.0", "layers.1")]
    assert unlike_blocks(blocks, lambda: model(normal(64, WIDTH).to(dtype))) == found


def test_a_pass_that_needs_gradients_ends_there() -> None:
    """What was found before is known."""
    assert _found(_with_state, lambda result: result.sum().backward()) == {"layers.1"}


def test_a_loss_that_takes_gradients_itself_is_measured() -> None:
    """Whatever it does with errors."""
    model, x = Net(_dropped).train(), normal(8, WIDTH)

    def loss(part: Tensor) -> Tensor:
        inner = part.detach().requires_grad_()
        try:
            return torch.autograd.grad(model(inner).sum(), inner, create_graph=True)[0].square().sum()
        except Exception as error:
            raise RuntimeError("no gradient") from error

    made = described(model, x, loss)
    profile = measure(model, DAFConfig(precision=4, memory_budget="64MB"), made.loss_of, 8, limit=1 << 30)
    assert profile.names == ["layers.0", "layers.1"]


def test_blocks_that_fail_when_they_run_again_are_found() -> None:
    """As those that take what an earlier one has left; a failure of any other does not count."""
    left: list[Tensor] = []

    def takes(_layer: Layer, x: Tensor) -> Tensor:
        return x + left.pop()

    model = Net(takes).train()
    blocks = [Block(name, model.get_submodule(name)) for name in ("layers.0", "layers.1")]

    def forward_pass() -> None:
        left[:] = [torch.ones(WIDTH)]
        model(normal(4, WIDTH))

    assert unlike_blocks(blocks, forward_pass) == {"layers.1"}


@pytest.mark.parametrize("run", [_with_state, _with_state_in_graph])
def test_they_are_never_recomputed(run: Callable[[Layer, Tensor], Tensor]) -> None:
    model = Net(run).train()
    made = described(model, normal(8, WIDTH), lambda part: model(part).sum())
    profile = measure(model, DAFConfig(precision=4, memory_budget="64MB"), made.loss_of, 8, limit=1 << 30)
    assert profile.names == ["layers.0"]
    assert "no recomputation of 1 blocks (layers.1 computes something else" in tried(DAFConfig(), profile, None)


def test_layers_of_transformers_are_recomputed_unless_they_hold_states() -> None:
    for make in (nets.gpt2, nets.llama):
        model = make().train()
        blocks = blocks_of(model)
        assert blocks
        assert unlike_blocks(blocks, lambda model=model: model(integers(64, 2, 16))) == set()
    sizes = {"hidden_size": 32, "lru_width": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = RecurrentGemmaConfig(vocab_size=64, num_hidden_layers=3, attention_window_size=8, **sizes)
    model = RecurrentGemmaForCausalLM(config).train()
    found = unlike_blocks(blocks_of(model), lambda: model(integers(64, 2, 16)))
    assert found == {"model.layers.0", "model.layers.1"}
