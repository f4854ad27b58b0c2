"""Fused layers of other libraries: what is known of them takes few bits, and the rest stays exact."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.readers import table
from tests.integrations import fused_functions as fused

ROWS, TOKENS, WIDTH, HEADS = 8, 64, 128, 4

LOSSY = 9
"""Tensors in few bits: inputs of two normalizations, both of a product, and inputs of linear layers. Query, key, value
and result of FlashAttention stay exact: its backward takes the sums of exponentials that belong to them."""

Apply = Callable[..., Tensor]


class Block(nn.Module):
    """A block of a decoder with fused layers, as Liger and FlashAttention put them into models of transformers."""

    def __init__(self, product: Apply, sharpness: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.sharpness = product, sharpness
        self.projections, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.first, self.second = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(fused.LigerRMSNormFunction.apply(x, self.first, 1e-6))
        hidden = fused.LigerRMSNormFunction.apply(x, self.second, 1e-6)
        return x + self.down(self.product(self.gate(hidden), self.up(hidden)))

    def attention(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (HEADS, -1)) for each in self.projections(x).chunk(3, -1)]
        return self.output(fused.FlashAttnFunc.apply(self.sharpness * heads[0], *heads[1:]).flatten(-2))


def gradients(model: nn.Module, engine: ActivationEngine | None = None) -> tuple[Tensor, Counter[str]]:
    """Returns the gradient of a second pass, and how its tensors were stored."""
    found, stored = torch.empty(0), Counter[str]()
    for _ in range(2):
        x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if engine is None:
            loss = model(x).square().mean()
        else:
            with engine.compress():
                loss = model(x).square().mean()
        found = torch.cat([each.flatten() for each in torch.autograd.grad(loss, [x, *model.parameters()])])
        stored = Counter() if engine is None else engine.finish_step().stored_as
    return found, stored


@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("product", [fused.LigerSiLUMulFunction.apply, fused.LigerGELUMulFunction.apply])
def test_gradients_of_a_fused_block(product: Any, sharpness: float) -> None:
    expected, _ = gradients(Block(product, sharpness))
    found: dict[Any, Tensor] = {}
    stored: dict[Any, Counter[str]] = {}
    for precision in ("exact", 4):
        model = Block(product, sharpness)
        engine = ActivationEngine(model, DAFConfig(precision=precision, audit_every=None, packing="device"))
        found[precision], stored[precision] = gradients(model, engine)
        engine.close()
    assert torch.equal(found["exact"], expected)
    assert (found[4] - expected).norm() < 0.2 * expected.norm()
    assert stored[4]["planes"] == LOSSY


def test_names_are_those_of_liger() -> None:
    pytest.importorskip("liger_kernel", reason="needs liger_kernel")
    names = [name for name in table._FUNCTIONS if name.startswith("liger_kernel.")]
    assert len(names) > 3
    for name in names:
        module, _, function = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), function), torch.autograd.Function)
