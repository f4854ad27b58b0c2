"""Rule 8: normalization statistics, generator state, indices and targets are never quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.harness import Scale, engine_for, integers, normal, watch

Make = Callable[[Tensor], Tensor]


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.view(-1, 8), (8,), torch.ones(8))


def _group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x.view(1024, 16, 32), 8, torch.ones(16))


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.view(64, -1), None, None, training=True)


def _max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x.view(8, 16, 64, -1), 2)


def _gather(x: Tensor) -> Tensor:
    return x.view(-1, 64).gather(1, integers(64, x.numel() // 64, 64))


def _embedding(x: Tensor) -> Tensor:
    return F.embedding(integers(100, 8192), x.view(-1, 64))


def _cross_entropy(x: Tensor) -> Tensor:
    return F.nll_loss(x.view(-1, 16), integers(16, x.numel() // 16))


def _sort(x: Tensor) -> Tensor:
    return x.view(-1, 64).sort(-1).values


CASES: dict[str, tuple[Make, list[str]]] = {
    "layer-norm": (_layer_norm, ["result1", "result2"]),
    "group-norm": (_group_norm, ["result1", "result2"]),
    "batch-norm": (_batch_norm, ["result1", "result2"]),
    "max-pool": (_max_pool, ["result1"]),
    "gather": (_gather, ["index"]),
    "embedding": (_embedding, ["indices"]),
    "targets": (_cross_entropy, ["target"]),
    "sort": (_sort, ["indices"]),
}


def _node_with(output: Tensor, name: str) -> Any:
    """The first node behind a result that saved something under this name."""
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, f"_saved_{name}"):
            return node
        nodes += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError(f"nothing saved {name}")


@pytest.mark.parametrize("compiled", ["auto", "reference"])
@pytest.mark.parametrize(("make", "names"), CASES.values(), ids=CASES)
def test_rule_8_statistics_stay_exact(make: Make, names: list[str], compiled: str) -> None:
    """At 1 bit, the small exact things beside an activation unpack bit-identical; the activation itself does not."""
    model = nn.Linear(1, 1)
    engine = engine_for(model, 1, backend=compiled)
    x = normal(1 << 19).requires_grad_()
    plain = make(x * 1)
    with engine.compress():
        output = make(x * 1)
    assert torch.equal(output, plain)
    for name in names:
        actual = getattr(_node_with(output, name), f"_saved_{name}")
        assert torch.equal(actual, getattr(_node_with(plain, name), f"_saved_{name}")), name


def test_rule_8_only_the_call_that_saved_something_large_has_statistics() -> None:
    """The share is taken within one call of a module: a small first activation of the next call is compressed."""
    model = nn.Sequential(Scale(), Scale())
    engine = engine_for(model, 4)
    seen = watch(engine)
    with engine.compress():
        kept = [model[0](normal(16 * 8192)), model[1](normal(8192))]
    assert [saved.form for saved in seen if len(saved.shape) == 1] == ["planes", "planes"]
    del kept


class Reconstruction(nn.Module):
    """A layer to 16 times as many features and back, with its loss inside."""

    def __init__(self, column: bool) -> None:
        super().__init__()
        self.up, self.down, self.column = nn.Linear(64, 1024), nn.Linear(1024, 64), column

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.down(F.gelu(self.up(inputs)))
        pair = (each.unsqueeze(-1) if self.column else each for each in (found, inputs))
        return F.mse_loss(*pair)


@pytest.mark.parametrize("column", [False, True])
def test_rule_8_codes_do_not_serve_a_statistic(column: bool) -> None:
    """An input that was stored in few bits is read exactly by the loss: each step failed, as nobody could be learned.

    Beside features of 16 times as many elements, and as a column, it is a statistic.
    """
    model, inputs = Reconstruction(column), normal(256, 64)
    engine = engine_for(model, 8)
    for _ in range(4):
        with engine.compress():
            loss = model(inputs)
        (gradient,) = torch.autograd.grad(loss, model.down.bias)
        engine.finish_step()
    (exact,) = torch.autograd.grad(model(inputs), model.down.bias)
    assert (gradient - exact).norm() < 0.02 * exact.norm()


def test_rule_8_dropout_state_and_masks() -> None:
    """Gradients through dropout alone are exact at 1 bit: its mask is all that is saved."""
    results = []
    for compressed in (False, True):
        x = normal(128, 64).requires_grad_()
        engine = engine_for(nn.Linear(1, 1), 1)
        torch.manual_seed(3)
        if compressed:
            with engine.compress():
                loss = (F.dropout(x, 0.3) * 3).sum()
        else:
            loss = (F.dropout(x, 0.3) * 3).sum()
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)
