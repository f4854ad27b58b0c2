"""In which order modules are called, and what has a graph begin where nothing is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core.elastic.call_order import ForwardTracer
from daf_core.errors import ConfigError, ElasticError
from daf_core.model.blocks import Block, layers_of
from tests.core.elastic.runs import DecoderFirst, Run, checkpoint, deep_gpt2, watched, with_adapters
from tests.core.plan import nets

Hooks = list[list[tuple[int, Any]]]


def hooks_of(model: nn.Module) -> Hooks:
    return [[*module._forward_hooks.items()] for module in model.modules()]


def lower_blocks(model: nn.Module) -> list[Block]:
    """Masks all blocks but the last, and returns these."""
    blocks = layers_of(model)[:-1]
    for block in blocks:
        block.module.requires_grad_(False)
    return blocks


def test_order_and_sizes() -> None:
    model = DecoderFirst()
    calls = watched(model, lambda: model(torch.zeros(2, 32))).calls
    names = [name for name in calls if name.count(".") == 1]
    assert names == ["earlier.0", "earlier.1", "later.0", "later.1"]
    assert next(iter(calls)) == ""
    assert (calls["earlier.0"], calls["earlier.0.up"]) == (64, 128)


def test_what_was_running_before_comes_first() -> None:
    """A model's forward begins a step, with what watches it, where the loop is the user's own."""
    model, watches = DecoderFirst(), list[ForwardTracer]()
    hook = model.register_forward_pre_hook(lambda module, _: watches.append(ForwardTracer(module)))
    model(torch.zeros(2, 32))
    hook.remove()
    [watch] = watches
    watch.stop()
    assert [*watch.calls][:2] == ["", "earlier.0"]
    assert watch.calls[""] == 64


def test_hooks_are_gone_afterwards() -> None:
    model = deep_gpt2(2)
    before = hooks_of(model)
    watched(model, lambda: nets._tokens(model, nets.tokens(2)))
    assert hooks_of(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_blocks_without_graphs_pass() -> None:
    model = deep_gpt2(4)
    blocks = lower_blocks(model)
    watched(model, lambda: nets._tokens(model, nets.tokens(2))).check_graphs(blocks)


def test_a_hook_that_has_a_graph_begin_is_named() -> None:
    def my_hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.requires_grad_(True)

    model = deep_gpt2(4)
    blocks = lower_blocks(model)
    model.get_input_embeddings().register_forward_hook(my_hook)
    watch = watched(model, lambda: nets._tokens(model, nets.tokens(2)))
    with pytest.raises(ElasticError, match=r"save nothing: what .*transformer\.wte returns .*my_hook"):
        watch.check_graphs(blocks)


def test_embeddings_that_require_a_gradient_are_named() -> None:
    model = deep_gpt2(4)
    blocks = lower_blocks(model)
    inputs = torch.zeros(2, 8, 32, requires_grad=True)
    watch = watched(model, lambda: model(inputs_embeds=inputs))
    with pytest.raises(ElasticError, match=r"transformer\.h\.0 is given an input that requires a gradient"):
        watch.check_graphs(blocks)


def test_training_ends_where_nothing_would_be_saved() -> None:
    model = deep_gpt2(4)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(True))
    run = Run(model, nets._tokens, time=0.8)
    with pytest.raises(ElasticError, match=r"\(its hooks: test_[a-z_]*\.<locals>\.<lambda>\)"):
        run.step(nets.tokens(2))
    run.close()
    assert all(each.requires_grad for name, each in model.named_parameters() if "lora" in name)


class Notes:
    """A hook of the user's."""

    def __call__(self, _module: nn.Module, _inputs: object, _output: object) -> None: ...


@pytest.mark.parametrize("whose", ["transformers", "peft"])
def test_hooks_for_inputs_that_require_a_gradient_are_put_back(whose: str) -> None:
    batch = nets.tokens(2)
    if whose == "transformers":
        model = deep_gpt2(4)
        model.enable_input_require_grads()
    else:
        base = nets.gpt2(4, 32)
        checkpoint(base, use_reentrant=False)
        base.disable_input_require_grads()
        model = with_adapters(base, "gpt2").train()
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(Notes())
    before = hooks_of(model)
    assert len(embedding._forward_hooks) == 2
    run = Run(model, nets._tokens, time=0.8)
    steps = run.steps(3, batch)
    assert steps[0].elastic.depth == 1
    run.close()
    assert hooks_of(model) == before
    assert embedding(batch["input_ids"]).requires_grad
    (model if whose == "transformers" else model.base_model.model).disable_input_require_grads()
    if whose == "transformers":
        assert not embedding(batch["input_ids"]).requires_grad


def test_hooks_that_were_removed_meanwhile_stay_away() -> None:
    model = deep_gpt2(4)
    model.enable_input_require_grads()
    run = Run(model, nets._tokens, time=0.8)
    run.step(nets.tokens(2))
    model.disable_input_require_grads()
    run.close()
    assert not model.get_input_embeddings()._forward_hooks


class TwoTowers(nn.Module):
    """One tower runs without recording anything."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.own = (nn.ModuleList(nets.FeedForward() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.frozen:
                x = block(x)
        for block in self.own:
            x = block(x)
        return x


def test_a_frozen_tower_is_left_out() -> None:
    """Its blocks are none of the chain; a run that goes on from a state knows it from the beginning."""
    model = TwoTowers()
    model.frozen.requires_grad_(False)
    run = Run(model, nets._squares, time=0.8)
    assert len(run.training._learned.units.blocks) == 6
    steps = run.steps(8, {"x": torch.randn(4, 32)})
    names = [block.name for block in run.training._learned.units.blocks]
    assert names == ["own.0", "own.1", "own.2"]
    assert {step.elastic.depth for step in steps} <= {1, 2, 3}
    state = run.training.state()
    run.close()
    after = Run(model, nets._squares, time=0.8)
    after.training.load(state)
    assert [block.name for block in after.training._learned.units.blocks] == names
    after.close()


def test_a_tower_that_is_trained_in_vain_is_named() -> None:
    run = Run(TwoTowers(), nets._squares, time=0.8)
    with pytest.raises(ConfigError, match=r"frozen.0 ran without recording a graph.*something in it is trained"):
        run.step({"x": torch.randn(4, 32)})
    run.close()
