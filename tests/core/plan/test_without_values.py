"""Training passes without values: they count what passes with values do, and make no tensor that has any."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from daf_core.config import DAFConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import UnsupportedDeviceError
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.plan.observe.meter import TensorMeter
from daf_core.plan.observe.without_values import without_values
from daf_core.rewrites.chunked_loss import linear_cross_entropy_sum

WIDTH, HEADS, TOKENS, VOCABULARY = 64, 4, 96, 100  # logits that are small: other devices store them in other steps


class Layer(nn.Module):
    """A transformer's layer with fused causal attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.inner(self.norm(inputs)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        inputs = inputs + self.dropout(attended.transpose(1, 2).flatten(2))
        return inputs + self.dropout(self.down(functional.gelu(self.up(inputs))))


class Model(nn.Module):
    """Embeddings, layers and a loss."""

    def __init__(self, dropout: float = 0.0, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Made(TorchDispatchMode):
    """Adds up the bytes of all tensors that operators return and that have values."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes += sum(
            each.untyped_storage().nbytes()
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and not each.is_meta
        )
        return result


@contextmanager
def on_meta() -> Generator[None]:
    with without_values(), torch.device("meta"):
        yield


def counted(make: Callable[[], nn.Module], precision: Any) -> tuple[int, int]:
    """Returns held bytes and the peak of tensors in the third step of a model."""
    torch.manual_seed(0)
    model = make()
    tokens = torch.randint(VOCABULARY, (4, TOKENS))
    engine = ActivationEngine(model, DAFConfig(precision=precision, packing="device"))
    held = peak = 0
    for _ in range(3):
        model.zero_grad()
        with TensorMeter() as meter, engine.synchronous_packing():
            with engine.compress():
                loss = model(tokens)
            loss.backward()
            del loss
            peak = meter.take_peak()
        held = engine.finish_step().held_bytes
    engine.close()
    return held, peak


@pytest.mark.parametrize("precision", ["exact", 8, 4])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"recomputes": True}], ids=str)
def test_counts_are_those_of_passes_with_values(precision: Any, options: dict[str, Any]) -> None:
    with on_meta():
        held, peak = counted(lambda: Model(**options), precision)
    real_held, real_peak = counted(lambda: Model(**options), precision)
    # Indices take one byte where nobody knows how large they are.
    assert abs(held - real_held) <= 2 * PAGE_BYTES
    assert peak == pytest.approx(real_peak, rel=0.02)


def test_nothing_has_values() -> None:
    with Made() as made, on_meta():
        counted(Model, 4)
    assert made.bytes < 1 << 10


def test_attention_that_is_recomputed_is_fused() -> None:
    with on_meta(), TensorMeter() as meter:
        Model(recomputes=True)(torch.empty(1, 8192, dtype=torch.long)).backward()
        assert meter.take_peak() < 8192 * 8192 * 4


def test_attention_is_fused_with_dropout_where_that_is_asked_for() -> None:
    for fused in (False, True):
        with without_values(drops_fused=fused):
            parts = [torch.empty(1, HEADS, TOKENS, WIDTH, device="meta", requires_grad=True) for _ in range(3)]
            result = functional.scaled_dot_product_attention(*parts, dropout_p=0.5)
        assert ("FlashAttention" in type(result.grad_fn).__name__) is fused


def test_every_row_of_a_loss_counts() -> None:
    with on_meta(), TensorMeter() as meter:
        hidden, weight = torch.empty(50, 8, requires_grad=True), torch.empty(VOCABULARY, 8)
        targets = torch.empty(50, dtype=torch.long)
        linear_cross_entropy_sum(hidden, weight, None, targets, -100, torch.float32).backward()
        assert meter.take_peak() > 50 * VOCABULARY * 4
    assert hidden.grad is not None


def test_full_rows_have_no_mask_and_nothing_special() -> None:
    with on_meta():
        mask = torch.ones(2, 5)
        assert mask.bool().all()
        assert mask.sum() == 10
        assert not (mask == 0).any()
        assert not mask.isnan().any()


def test_models_without_values_are_refused_outside() -> None:
    attention = functional.scaled_dot_product_attention
    with on_meta():
        model = Model()
    assert functional.scaled_dot_product_attention is attention
    with pytest.raises(UnsupportedDeviceError, match="meta"):
        ActivationEngine(model, DAFConfig())
