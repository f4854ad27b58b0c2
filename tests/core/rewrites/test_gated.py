"""Gated MLPs that save two tensors instead of three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from daf_core.model.blocks import blocks_of
from daf_core.model.recompute import RecomputedBlock
from daf_core.rewrites import gated
from daf_core.rewrites.gated import find_gate, gated_product, rewrite_gated
from daf_core.rewrites.registry import OperatorRewrites
from tests.core.harness import normal
from tests.core.rewrites.steps import batch, step
from tests.core.rewrites.test_operators import kinds, saved_elements

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def llama_with_adapters() -> nn.Module:
    model = get_peft_model(llama(), LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "gate_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def gemma() -> nn.Module:
    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8, hidden_activation="gelu_pytorch_tanh")).train()


def mlp(**options: Any) -> Any:
    return LlamaMLP(LlamaConfig(**SIZES, **options))


class Doubled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Swapped(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class WithoutGradient(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class Dropping(LlamaMLP):
    """As that of SeedOss."""

    rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(x), self.rate, self.training)


def only_gated(model: nn.Module, run: Any) -> tuple[Any, Any]:
    """Returns what `run` returns before and after the rewrite of gated MLPs alone."""
    plain, rewrites = run(), OperatorRewrites(model)
    rewrites.steps = [found for found in rewrites.steps if found[0] == "gated-mlp"]
    rewrites.apply()
    try:
        return plain, run()
    finally:
        rewrites.undo()


@pytest.mark.parametrize("build", [llama, llama_with_adapters, gemma])
def test_gradients_have_the_same_bits(build: Any) -> None:
    model = build()
    assert kinds(model)["gated-mlp"] == 2
    plain, found = only_gated(model, lambda: step(model, **batch()))
    assert all(torch.equal(new, old) for new, old in zip(found, plain, strict=True))


def test_one_tensor_less_is_saved() -> None:
    model = llama_with_adapters()
    plain, found = only_gated(model, lambda: saved_elements(model, batch()))
    assert plain - found == SIZES["num_hidden_layers"] * batch()["input_ids"].numel() * SIZES["intermediate_size"]


def test_the_activation_is_recognized() -> None:
    inputs = torch.linspace(-3, 3, 50)
    for name, function in {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}.items():
        form = find_gate(mlp(hidden_act=name))
        assert form is not None
        assert torch.equal(form.value(inputs), function(inputs))


@pytest.mark.parametrize("activation", ["relu", "tanh", "relu2"])
def test_other_activations_are_left_alone(activation: str) -> None:
    assert find_gate(mlp(hidden_act=activation)) is None


@pytest.mark.parametrize("other", [Doubled, Swapped, WithoutGradient])
def test_other_formulas_are_left_alone(other: type[LlamaMLP]) -> None:
    assert find_gate(other(LlamaConfig(**SIZES))) is None


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_is_found_in_whatever_mode_a_module_is(training: bool) -> None:
    module = Dropping(LlamaConfig(**SIZES)).train(training)
    before = torch.get_rng_state()
    assert find_gate(module) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert {each.training for each in module.modules()} == {training}


def _with_a_dropout(module: Any) -> None:
    module.rate = 0.1


def _with_that_of_its_class(module: Any) -> None:
    del module.rate


def _with_another_activation(module: Any) -> None:
    module.act_fn = nn.Tanh()


def _with_another_form(module: Any) -> None:
    module.act_fn.approximate = "tanh"


@pytest.mark.parametrize(
    "change", [_with_a_dropout, _with_that_of_its_class, _with_another_activation, _with_another_form]
)
def test_a_formula_that_changes_is_followed(change: Callable[[Any], None]) -> None:
    module = Dropping(LlamaConfig(**SIZES))
    module.rate, module.act_fn = 0.0, nn.GELU()
    form, x = find_gate(module), normal(6, SIZES["hidden_size"])
    assert form is not None
    undo = rewrite_gated(module, form)
    made = module(x)  # torch 2.10 names no node that is gone
    assert made.grad_fn.next_functions[0][0].name() == "_GatedProductBackward"
    change(module)
    torch.manual_seed(0)
    found = module(x)
    undo()
    torch.manual_seed(0)
    assert torch.equal(found, module(x))


def test_modules_with_more_in_them_are_left_alone() -> None:
    module = mlp()
    handle = module.act_fn.register_forward_hook(lambda *_: None)
    assert find_gate(module) is None
    handle.remove()
    assert find_gate(module) is not None
    module.scale = nn.Parameter(torch.ones(()))
    assert find_gate(module) is None


def test_a_search_draws_no_random_number_and_changes_nothing() -> None:
    module = mlp()
    before, layers = torch.get_rng_state(), dict(module.named_children())
    find_gate(module)
    assert torch.equal(torch.get_rng_state(), before)
    assert dict(module.named_children()) == layers
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_frozen_gate_is_computed_as_written() -> None:
    module = mlp()
    module.gate_proj.weight.requires_grad_(False)
    inputs = torch.randn(4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, Tensor | None]:
        module.zero_grad()
        result = module(inputs)
        result.sum().backward()
        return result.detach(), module.up_proj.weight.grad.clone()

    plain, found = only_gated(module, run)
    assert all(torch.equal(new, old) for new, old in zip(found, plain, strict=True))


def test_half_precision_keeps_its_bits() -> None:
    form = find_gate(mlp())
    assert form is not None
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(64, 8, generator=generator).bfloat16().requires_grad_() for _ in range(2))
    plain = torch.autograd.grad((form.value(gate) * up).float().square().sum(), (gate, up))
    found = torch.autograd.grad(gated_product(gate, up, form).float().square().sum(), (gate, up))
    assert all(torch.equal(new, old) for new, old in zip(found, plain, strict=True))


def recomputed(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Returns what `run` returns while all blocks are recomputed."""
    blocks = [RecomputedBlock(block) for block in blocks_of(model)]
    try:
        return run()
    finally:
        for block in blocks:
            block.remove()


@pytest.mark.parametrize("build", [llama, llama_with_adapters, gemma])
def test_parts_of_long_rows_differ_by_rounding_alone(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "PART_BYTES", 4 * SIZES["intermediate_size"] * 20)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # parts draw other masks than the whole
    plain, found = only_gated(model, lambda: recomputed(model, lambda: step(model, **batch())))
    assert float((plain[1] - found[1]).norm() / plain[1].norm()) < 1e-12
    assert abs(float(plain[0] - found[0])) < 1e-12


def test_parts_repeat_their_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "PART_BYTES", 4 * SIZES["intermediate_size"] * 20)
    model = llama_with_adapters()
    first, second = (only_gated(model, lambda: recomputed(model, lambda: step(model, **batch())))[1] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("tokens", [20, 21, 64, 4096])
def test_no_result_of_a_layer_is_larger_than_a_part(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "PART_BYTES", 4 * SIZES["intermediate_size"] * 20)
    model: Any = llama()
    widest = 0

    def look(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal widest
        widest = max(widest, output.nbytes)

    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(look)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    rewrites = OperatorRewrites(model, {"gated-mlp"})
    rewrites.apply()
    recomputed(model, lambda: step(model, input_ids=ids, labels=ids))
    assert 0 < widest <= gated.PART_BYTES
    widest = 0
    step(model, input_ids=ids, labels=ids)
    assert widest == 4 * tokens * SIZES["intermediate_size"]
    rewrites.undo()
