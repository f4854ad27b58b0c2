"""What one would use instead of DAF: forms of saved tensors, and which tensors take them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from daf_core.errors import ConfigError
from daf_integrations.cli.bench.baselines import GROUP, Coding, Offload, Stores, in_bfloat16, in_bits

CPU = torch.device("cpu")


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
    stored = in_bits(bits, CPU)(tensor)
    found = stored.restore()
    assert found.shape == tensor.shape
    groups = -(-tensor.numel() // GROUP)
    assert stored.size == groups * (GROUP * bits // 8 + 8)
    step = (tensor.max() - tensor.min()) / (2**bits - 1)
    assert 0 < (found - tensor).abs().max() <= step


@pytest.mark.parametrize("value", [0.0, 3.5, -1e30])
def test_a_constant_comes_back(value: float) -> None:
    tensor = torch.full((2, GROUP), value)
    assert torch.equal(in_bits(2, CPU)(tensor).restore(), tensor)


def test_classic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    tensor = torch.rand(GROUP)
    code = in_bits(2, CPU)
    mean = torch.stack([code(tensor).restore() for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, tensor, rtol=0, atol=0.02)


@pytest.mark.parametrize(("code", "error"), [(in_bfloat16, 0.01), (in_bits(8, CPU), 0.02), (in_bits(4, CPU), 0.3)])
def test_gradients_are_near(code: Coding, error: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(128, 64)
    exact = gradient(model, x, None)
    for _ in range(3):  # in later steps memory is where something else was
        found = gradient(model, x, Stores(model, code))
        assert 0 < (found - exact).norm() / exact.norm() < error


def test_a_tensor_that_is_saved_twice_is_stored_once_and_weights_are_not() -> None:
    a, b = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(128, 64, requires_grad=True)
    store = Stores(nn.ModuleList([a, b]), in_bfloat16)
    with store.storing():
        (a(x) + b(x)).sum().backward()
    assert store.held_bytes == 2 * x.numel()


@pytest.mark.parametrize("trained", [True, False])
def test_casts_of_weights_are_no_activations(trained: bool) -> None:
    model = nn.Linear(96, 96).requires_grad_(trained)
    x = torch.randn(128, 96, requires_grad=True)
    store = Stores(model, in_bits(8, CPU))
    with torch.autocast("cpu", dtype=torch.bfloat16), store.storing():
        result = model(x)
    assert result.requires_grad
    groups = x.numel() // GROUP
    assert store.held_bytes == (groups * (GROUP + 8) if trained else 0)


def test_masks_small_tensors_and_statistics_stay() -> None:
    store = Stores(nn.Linear(1, 1), in_bfloat16)
    small, mask = torch.randn(10, requires_grad=True), torch.rand(8192) > 0.5
    x = torch.randn(8192, 64, requires_grad=True)
    with store.storing():
        results = small.exp(), torch.randn(8192, requires_grad=True).masked_fill(mask, 0)
        normal = nn.functional.layer_norm(x, (64,))
    assert all(result.requires_grad for result in (*results, normal))
    assert store.held_bytes == 40 + 8192 + 2 * x.numel() + 2 * 4 * 8192


def test_random_numbers_of_the_model_stay() -> None:
    code, x = in_bits(4, CPU), torch.randn(4096)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = code(x).restore(), code(x).restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("code", [in_bfloat16, in_bits(4, CPU)])
def test_nothing_of_the_original_is_kept(code: Coding) -> None:
    x = torch.randn(4096)
    stored, original = code(x), weakref.ref(x)
    del x
    assert original() is None
    assert stored.restore().shape == (4096,)


def test_offload_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match="runs on the CPU; leave it out"):
        Offload(nn.Linear(2, 2))
