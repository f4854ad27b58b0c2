"""What is rewritten, that it is equal, and that nothing of it stays."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, RobertaConfig, RobertaForSequenceClassification
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    QuickGELUActivation,
)

from daf_core.rewrites.gelu import find_gelu, rewrite_gelu
from daf_core.rewrites.registry import OperatorRewrites
from tests.core.rewrites.steps import batch, compare, gpt2, step

CLOSE = 2e-6


def kinds(model: nn.Module) -> dict[str, int]:
    return Counter(kind for kind, _, _ in OperatorRewrites(model).steps)


def saved_elements(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    known = {tensor.data_ptr() for tensor in model.parameters()}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        if tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            total += tensor.numel()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = model(**inputs)
    del keep
    return total


def roberta() -> nn.Module:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        pad_token_id=1,
    )
    return RobertaForSequenceClassification(config).train()


def state(model: nn.Module) -> Iterator[tuple[str, type, dict[str, Any]]]:
    for name, module in model.named_modules():
        yield name, type(module), {key: id(value) for key, value in vars(module).items()}


def test_finds_what_is_there() -> None:
    assert kinds(gpt2(0.1)) == {"attention-dropout": 2, "gelu": 2, "causal-lm-loss": 1}
    assert kinds(gpt2()) == {"gelu": 2, "causal-lm-loss": 1}
    assert kinds(roberta()) == {"attention-dropout": 2}
    assert kinds(nn.Sequential(nn.Linear(2, 2), nn.GELU())) == {}


def test_names_are_those_of_the_modules() -> None:
    assert [step[:2] for step in OperatorRewrites(gpt2()).steps] == [
        ("causal-lm-loss", "lm_head"),
        ("gelu", "transformer.h.0.mlp.act"),
        ("gelu", "transformer.h.1.mlp.act"),
    ]


def test_constructor_changes_nothing() -> None:
    model = gpt2(0.1)
    before = list(state(model))
    OperatorRewrites(model)
    assert list(state(model)) == before


def test_undo_leaves_the_model_as_it_was() -> None:
    model = gpt2(0.1)
    before, loss = list(state(model)), step(model, **batch())[0]
    pickled = pickle.dumps(model.state_dict())
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    rewrites.apply()
    assert list(state(model)) != before
    step(model, **batch())
    rewrites.undo()
    rewrites.undo()
    assert list(state(model)) == before
    assert pickle.dumps(model.state_dict()) == pickled
    assert torch.equal(step(model, **batch())[0], loss)


def test_a_loss_function_of_ones_own_comes_back() -> None:
    model = gpt2()
    model.loss_function = model.loss_function
    own = vars(model)["_loss_function"]
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    rewrites.undo()
    assert vars(model)["_loss_function"] is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_plain(copied: Any) -> None:
    model = gpt2(0.1)
    plain = step(model, **batch())
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    twin = copied(model)
    rewrites.undo()
    found = step(twin, **batch())
    assert all(torch.equal(new, old) for new, old in zip(found, plain, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_are_equal(dropout: float) -> None:
    model = gpt2(dropout)
    assert max(compare(model, lambda: step(model, **batch()))) < CLOSE


def test_gradients_of_adapters_are_equal() -> None:
    model = get_peft_model(gpt2(0.1), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    assert kinds(model) == {"attention-dropout": 2, "gelu": 2, "causal-lm-loss": 1}
    assert max(compare(model, lambda: step(model, **batch()))) < CLOSE


def test_padded_rows_of_an_encoder_are_equal() -> None:
    model, inputs = roberta(), batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1:, 20:] = 0
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}
    assert max(compare(model, lambda: step(model, **inputs))) < CLOSE


def test_fewer_elements_are_saved() -> None:
    model = gpt2(0.1)
    plain = saved_elements(model, batch())
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    try:
        assert saved_elements(model, batch()) < 0.75 * plain
    finally:
        rewrites.undo()


def test_what_is_compiled_is_left_alone() -> None:
    model = gpt2(0.1)
    model.compile(backend="eager")
    assert kinds(model) == {}
    model = gpt2(0.1)
    model.transformer.h[0].compile(backend="eager")
    assert kinds(model) == {"attention-dropout": 1, "gelu": 1, "causal-lm-loss": 1}


class NewGELU(nn.Module):
    """Written by hand, under another name than transformers gives it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class OtherGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3)))


class GELUWithOtherGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh").detach() * 1.0 + (x - x.detach()) * x.detach().tanh()


class GELUOfTwo(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.gelu(x + y)


class GELUWithScale(NewGELU):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "module",
    [NewGELUActivation(), FastGELUActivation(), GELUTanh(True), GELUActivation(True), QuickGELUActivation(), NewGELU()],
    ids=lambda module: type(module).__name__,
)
def test_gelu_in_several_operators_is_recognized(module: nn.Module) -> None:
    form = find_gelu(module)
    assert form is not None
    inputs = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(form(inputs), module(inputs), rtol=1e-5, atol=2e-6)


class FloatGELU(NewGELU):
    """It gives another type than it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class NoisyGELU(NewGELU):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


class CountingGELU(NewGELU):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class NotingGELU(NewGELU):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x)


OTHERS = [
    GELUActivation(), GELUTanh(), OtherGELU(), GELUWithOtherGradient(), GELUOfTwo(), GELUWithScale(), nn.GELU(),
    FloatGELU(), NoisyGELU(), NoisyGELU().eval(), CountingGELU(), NotingGELU(),
]  # fmt: skip


@pytest.mark.parametrize("module", OTHERS, ids=lambda module: f"{type(module).__name__}-{module.training}")
def test_other_modules_are_left_alone_and_as_they_are(module: nn.Module) -> None:
    before, state = str(vars(module)), torch.get_rng_state()
    assert find_gelu(module) is None
    assert str(vars(module)) == before
    assert torch.equal(torch.get_rng_state(), state)


class ScheduledGELU(nn.Module):
    """Its factor may change while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.factor * x)


def test_a_module_that_has_changed_computes_what_it_says() -> None:
    module, inputs = ScheduledGELU(), torch.linspace(-4, 4, 100)
    form = find_gelu(module)
    assert form is not None
    undo = rewrite_gelu(module, form)
    assert torch.equal(module(inputs), form(inputs))
    module.factor = 3.0
    assert torch.equal(module(inputs), inputs * torch.sigmoid(3.0 * inputs))
    undo()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=str)
def test_other_types_are_computed_as_before(dtype: torch.dtype) -> None:
    """Half precision would overflow where the module's own formula does not."""
    module, plain = QuickGELUActivation(), QuickGELUActivation()
    form = find_gelu(module)
    assert form is not None
    undo = rewrite_gelu(module, form)
    inputs = torch.tensor([-60_000, -1, 0, 1, 60_000]).to(dtype)
    assert torch.equal(module(inputs), plain(inputs))
    undo()


def test_a_module_with_hooks_is_left_alone() -> None:
    module = NewGELUActivation()
    handle = module.register_forward_hook(lambda *_: None)
    assert find_gelu(module) is None
    handle.remove()
    assert find_gelu(module) is not None


def test_quick_gelu_in_a_model() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPTextModel(CLIPTextConfig(vocab_size=200, **shape)).train()
    assert kinds(model) == {"gelu": 2}
    ids = batch()["input_ids"]

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids).last_hidden_state.square().mean()
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert max(compare(model, run)) < CLOSE


def test_without_autograd_nothing_changes() -> None:
    model = gpt2(0.1)
    rewrites = OperatorRewrites(model)
    with torch.no_grad():
        model.eval()
        plain = model(**batch())
        rewrites.apply()
        found = model(**batch())
        tokens = model.generate(batch()["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    rewrites.undo()
    assert type(found.logits) is Tensor
    assert torch.equal(plain.logits, found.logits)
    assert torch.equal(plain.loss, found.loss)
    assert torch.equal(
        tokens, model.generate(batch()["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    )
