"""What one would use instead of DAF: forms of saved tensors, and which tensors take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from daf_core.errors import ConfigError
from daf_integrations.bench.rivals import GROUP, Form, Offload, Stores, in_bfloat16, in_bits


def gradient(model: nn.Module, x: Tensor, store: Stores | None) -> Tensor:
    model.zero_grad()
    if store is None:
        loss = model(x).square().mean()
    else:
        with store.storing():
            loss = model(x).square().mean()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", [(7, GROUP), (3, 5, 100), (1025,)])
def test_classic_codes_are_within_a_step(bits: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stored = in_bits(bits)(tensor)
    found = stored.restore()
    assert found.shape == tensor.shape
    groups = -(-tensor.numel() // GROUP)
    assert stored.size == groups * (GROUP * bits // 8 + 8)
    step = (tensor.max() - tensor.min()) / (2**bits - 1)
    assert 0 < (found - tensor).abs().max() <= step


@pytest.mark.parametrize("value", [0.0, 3.5, -1e30])
def test_a_constant_comes_back(value: float) -> None:
    tensor = torch.full((2, GROUP), value)
    assert torch.equal(in_bits(2)(tensor).restore(), tensor)


def test_classic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    tensor = torch.rand(GROUP)
    mean = torch.stack([in_bits(2)(tensor).restore() for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, tensor, rtol=0, atol=0.02)


@pytest.mark.parametrize(("form", "error"), [(in_bfloat16, 0.01), (in_bits(8), 0.02), (in_bits(4), 0.3)])
def test_gradients_are_near(form: Form, error: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(64, 64)
    exact = gradient(model, x, None)
    for _ in range(3):  # in later steps memory is where something else was
        found = gradient(model, x, Stores(model, form))
        assert 0 < (found - exact).norm() / exact.norm() < error


def test_a_tensor_that_is_saved_twice_is_stored_once_and_weights_are_not() -> None:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    model = nn.ModuleList([a, b])
    x = torch.randn(64, 32, requires_grad=True)
    store = Stores(model, in_bfloat16)
    with store.storing():
        (a(x) + b(x)).sum().backward()
    assert store.held_bytes == 2 * x.numel()


def test_masks_and_small_tensors_stay() -> None:
    store = Stores(nn.Linear(1, 1), in_bfloat16)
    small, mask = torch.randn(10, requires_grad=True), torch.rand(4096) > 0.5
    with store.storing():
        results = small.exp(), torch.randn(4096, requires_grad=True).masked_fill(mask, 0)
    assert all(result.requires_grad for result in results)
    assert store.held_bytes == 40 + 4096


def test_offload_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match="runs on the CPU; leave it out"):
        Offload(nn.Linear(2, 2))
