"""Fused attentions of a GPU in compiled graphs: they run again on what is decoded, with the same dropout."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import SDPBackend, sdpa_kernel

from daf_core import ActivationEngine, DAFConfig
from daf_core.compiled.codes import Planes
from daf_core.compiled.decide import KEPT, UNREAD, Decision, Decisions
from daf_core.compiled.readers import name_of

aten = torch.ops.aten
ATTENTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "flash": lambda *heads, drop: aten._scaled_dot_product_flash_attention(*heads, drop, True),
    "efficient": lambda *heads, drop: aten._scaled_dot_product_efficient_attention(*heads, None, True, drop, True),
    "cudnn": lambda *heads, drop: aten._scaled_dot_product_cudnn_attention(*heads, None, True, drop, True),
}
OPERATORS = {kind: f"_scaled_dot_product_{kind}_attention" for kind in ATTENTIONS}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

pytestmark = [pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function:UserWarning")]


class Traced:
    """Forward and backward of an attention of a GPU, traced without one, and how its tensors are stored."""

    def __init__(self, kind: str, drop: float, width: int = 32) -> None:
        found = list[fx.Graph]()

        def keep(module: fx.GraphModule, _: object) -> fx.GraphModule:
            found.append(module.graph)
            return module

        def attend(*heads: Tensor) -> Tensor:
            return ATTENTIONS[kind](*(each @ each.mT @ each for each in heads), drop=drop)[0]

        heads = [torch.empty(2, 4, 64, width, device="meta", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        compiled = aot_function(attend, keep, keep, partition_fn=min_cut_rematerialization_partition)
        compiled(*heads).sum().backward()
        forward, backward = found
        [self.reader] = [node for node in backward.nodes if name_of(node) == f"{OPERATORS[kind]}_backward"]
        _, *self.inputs = self.reader.all_input_nodes[:4]
        self.results = [node for node in self.reader.all_input_nodes[4:] if node.meta["val"].dtype.is_floating_point]
        self.drawn = [node for node in self.reader.all_input_nodes[4:] if node not in self.results]
        decisions = Decisions(forward, backward, 4)
        self.stored = {node.name: decisions.of(node.name) for node in (*self.inputs, *self.results, *self.drawn)}

    def again(self) -> fx.Node:
        """Returns the attention that both results which its backward reads now come from."""
        read = [node for node in self.reader.all_input_nodes if node.target is operator.getitem]
        [attention] = {node.all_input_nodes[0] for node in read}
        assert [node.args[1] for node in read][:2] == [0, 1]
        return attention


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_runs_again_on_what_is_decoded(kind: str, drop: float) -> None:
    traced = Traced(kind, drop)
    assert len(traced.inputs) == 3
    assert len(traced.results) == 2
    assert all(traced.stored[each.name] == Decision(Planes(4, common=True)) for each in traced.inputs)
    assert all(traced.stored[each.name] == UNREAD for each in traced.results)
    attention = traced.again()
    assert name_of(attention) == OPERATORS[kind]
    assert [node for node in attention.all_input_nodes if node in traced.inputs] == traced.inputs


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_what_a_dropout_has_drawn_is_kept_and_drawn_again(kind: str) -> None:
    traced = Traced(kind, 0.1)
    assert traced.drawn
    assert all(traced.stored[each.name] == KEPT for each in traced.drawn)
    attention = traced.again()
    assert attention.args[0] == traced.drawn
    assert attention.target is getattr(torch.ops.daf, OPERATORS[kind]).default


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_narrow_heads_are_exact(kind: str) -> None:
    traced = Traced(kind, 0.1, width=4)
    assert all(traced.stored[each.name] == KEPT for each in traced.inputs)


def test_without_another_run_all_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of decoded scores and the sums of others do not sum to 1."""
    monkeypatch.setattr("daf_core.compiled.attention._drawn", lambda _: None)
    traced = Traced("cudnn", 0.1)
    assert all(traced.stored[each.name] == KEPT for each in (*traced.inputs, *traced.results))


class Attention(nn.Module):
    """Attention of two heads, between layers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(128, 384), nn.Linear(128, 128), drop

    def forward(self, inputs: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.first(inputs).chunk(3, -1)]
        drop = self.drop if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(*heads, dropout_p=drop)
        return self.last(mixed.transpose(1, 2).flatten(2)).square().mean()


@needs_gpu
@pytest.mark.parametrize(
    ("kind", "drop", "mode"),
    [*((kind, drop, "default") for kind in BACKENDS for drop in (0.0, 0.5)), ("cudnn", 0.5, "reduce-overhead")],
)
def test_gradients_on_a_gpu(kind: str, drop: float, mode: str) -> None:
    """With other dropouts the error were above .5, and with sums of other scores above .1."""
    torch.compiler.reset()
    model = Attention(drop).to("cuda", torch.bfloat16)
    inputs = 3 * torch.randn(8, 128, 128, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, mode=mode, dynamic=False)
    engine = ActivationEngine(model, DAFConfig(precision=8))
    gradients = list[Tensor]()
    for scope in (nullcontext, engine.compress):
        for _ in range(3):  # a CUDA graph is replayed from the third on
            torch.manual_seed(1)
            torch.compiler.cudagraph_mark_step_begin()
            with sdpa_kernel(BACKENDS[kind]), scope():
                loss = compiled(inputs)
            loss.backward()
            gradient = torch.cat([each.grad.float().flatten() for each in model.parameters() if each.grad is not None])
            model.zero_grad()
            stored = engine.finish_step().stored_as
        gradients.append(gradient)
    assert stored["attended"] >= 2
    assert stored["planes"] >= 3
    exact, found = gradients
    assert float((found - exact).norm() / exact.norm()) < 0.03
