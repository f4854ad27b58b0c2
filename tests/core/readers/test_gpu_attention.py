"""Attentions of a GPU that run again in backward: with the dropout of forward, and without a wait for its seeds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from tests.core.harness import normal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
STEPS = 6


class Attention(nn.Module):
    """Two attentions, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = (nn.ModuleList(nn.Linear(256, wide) for _ in range(2)) for wide in (768, 256))

    def forward(self, x: Tensor) -> Tensor:
        for inputs, outputs in zip(self.inputs, self.outputs, strict=True):
            heads = inputs(x).view(*x.shape[:2], 12, 64).transpose(1, 2)
            attended = F.scaled_dot_product_attention(*heads.chunk(3, 1), dropout_p=0.2)
            x = x + outputs(attended.transpose(1, 2).flatten(2))
        return x


def gradients(model: nn.Module, engine: ActivationEngine | None, step: int) -> list[Tensor]:
    """Trains a step; the last may wait for nothing in backward, as torch sees it."""
    model.zero_grad()
    batch = normal(4, 128, 256, seed=step).to("cuda", torch.bfloat16)
    torch.manual_seed(step)
    if engine is None:
        model(batch).square().mean().backward()
    else:
        with engine.compress():
            loss = model(batch).square().mean()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step == STEPS - 1 else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.finish_step().stored_as["attended"] == 2 or step == 0
    return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]


@needs_gpu
def test_dropout_is_that_of_forward_and_is_not_waited_for() -> None:
    """Another mask would make an error of about 1."""
    torch.manual_seed(0)
    model = Attention().to("cuda", torch.bfloat16)
    engine = ActivationEngine(model, DAFConfig(precision=8, packing="device", audit_every=None))
    for step in range(STEPS):
        pairs = list(zip(gradients(model, engine, step), gradients(model, None, step), strict=True))
        error = sum(float((found - wanted).square().sum()) for found, wanted in pairs)
        assert error < 0.05**2 * sum(float(wanted.square().sum()) for _, wanted in pairs)
    engine.close()
