"""The option `chunked_loss`: which models are recognized, and that nothing of it stays or goes unnoticed."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from daf_core import ConfigError, DAFConfig, ModifiedInPlaceError, ReaderError
from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites import chunked_loss
from daf_core.rewrites.base import Undo
from daf_core.rewrites.lazy_logits import LazyLogits
from daf_core.rewrites.loss_option import chunk_loss
from tests.core.rewrites.steps import VOCABULARY, batch, cohere, gemma, gpt2, gradient, granite, step

CLOSE = 2e-6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven rows, so that there are several."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 7 * 4 * VOCABULARY)


@pytest.fixture
def chunked() -> Iterator[GPT2LMHeadModel]:
    model = gpt2()
    undo = applied(model)
    yield model
    undo()


def applied(model: nn.Module, **options: Any) -> Undo:
    undo = chunk_loss(DAFConfig(**options), model)
    assert undo is not None
    return undo


def chunks(model: nn.Module) -> bool:
    """Says whether a step of a model computes no logits."""
    logits = model.train()(**batch()).logits
    return isinstance(logits, LazyLogits) and not logits.source.is_computed


def with_hook() -> nn.Module:
    model = gpt2()
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def with_own_forward() -> nn.Module:
    model = gpt2()
    ForwardPatch(model.lm_head, lambda forward, args, kwargs: forward(*args, **kwargs))
    return model


def with_own_loss() -> nn.Module:
    model = gpt2()
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    return model


def with_half_a_head() -> nn.Module:
    """As FullyShardedDataParallel leaves it with ``use_orig_params``."""
    model = gpt2(tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flatten()[:100])
    return model


def fused_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return GPT2LMHeadModel.forward(model, *args, **kwargs)


def with_fused_loss() -> nn.Module:
    model = gpt2()
    fused_forward.__module__ = "liger_kernel.transformers.model.gpt2"
    model.forward = fused_forward.__get__(model)
    return model


def with_wrapped_fused_loss() -> nn.Module:
    """As by TRL's trainers under mixed precision: each wrapper has the names of what it wraps."""
    model = gpt2()
    code = FunctionType(fused_forward.__code__, {**globals(), "__name__": "trl.trainer.utils"})
    fused = wraps(GPT2LMHeadModel.forward)(code)

    @wraps(fused)
    def in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        return fused(*args, **kwargs)

    model.forward = in_mixed_precision.__get__(model)
    return model


def compiled() -> nn.Module:
    model = gpt2()
    model.compile(backend="eager")
    return model


class FullyShardedDataParallel(nn.Module):
    """As the name says, by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = gpt2()


FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"


def t5() -> nn.Module:
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **shape, decoder_start_token_id=0))


OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential: there is no language model of transformers"),
    (with_hook, "GPT2LMHeadModel: its output projection has hooks"),
    (with_own_forward, "GPT2LMHeadModel: its output projection has hooks or a forward of its own"),
    (with_own_loss, "GPT2LMHeadModel: its loss is another"),
    (with_half_a_head, "GPT2LMHeadModel: the weight of its output projection is no plain parameter"),
    (with_fused_loss, "GPT2LMHeadModel: its forward computes a fused loss"),
    (with_wrapped_fused_loss, "GPT2LMHeadModel: its forward computes a fused loss"),
    (compiled, "GPT2LMHeadModel: torch.compile compiles it"),
    (FullyShardedDataParallel, "GPT2LMHeadModel: its weights are sharded by torch.distributed.fsdp"),
    (t5, "T5ForConditionalGeneration: its loss is another"),
]


@pytest.mark.parametrize(("make", "reason"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_models_are_left_alone_or_refused(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with caplog.at_level(logging.DEBUG, "daf"):
        assert chunk_loss(DAFConfig(), model) is None
    assert [record.levelname for record in caplog.records if record.name == "daf"] == ["DEBUG"]
    with pytest.raises(ConfigError, match=f"chunked_loss=True is not possible for {reason}"):
        chunk_loss(DAFConfig(chunked_loss=True), model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"precision": 4}, True),
        ({"precision": "exact"}, False),
        ({"precision": "exact", "chunked_loss": True}, True),
        ({"chunked_loss": True}, True),
        ({"chunked_loss": False}, False),
    ],
    ids=str,
)
def test_where_it_is_on(options: dict[str, Any], expected: bool) -> None:
    model = gpt2()
    undo = chunk_loss(DAFConfig(**options), model)
    assert chunks(model) is expected
    if undo is not None:
        undo()
    assert not chunks(model)


@pytest.mark.parametrize("make", [gemma, granite, cohere])
def test_models_that_change_their_logits_are_recognized(make: Callable[[], nn.Module]) -> None:
    model = make()
    undo = applied(model, chunked_loss=True)
    assert chunks(model)
    undo()
    assert not chunks(model)


class TestSeveralHolders:
    def test_the_last_one_gives_the_model_back(self) -> None:
        model = gpt2()
        first, second = applied(model), applied(model, chunked_loss=True)
        first()
        assert chunks(model)
        second()
        assert not chunks(model)
        assert "_loss_function" not in vars(model)
        assert "forward" not in vars(model.lm_head)

    def test_a_loss_function_that_is_set_meanwhile_stays(self) -> None:
        model, undo = (lambda model: (model, applied(model)))(gpt2())

        def own(logits: Tensor, *_: Any, **__: Any) -> Tensor:
            return logits.mean()

        model.loss_function = own
        undo()
        assert model.loss_function is own


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_are_plain_and_can_be_rewritten(self, copied: Any, chunked: GPT2LMHeadModel) -> None:
        twin = copied(chunked)
        assert not chunks(twin)
        undo = applied(twin, chunked_loss=True)
        assert chunks(twin)
        assert chunks(copy.deepcopy(twin)) is False
        undo()
        assert not chunks(twin)
        assert chunks(chunked)

    def test_pickles_need_no_daf(self, chunked: GPT2LMHeadModel, tmp_path: Path) -> None:
        file = tmp_path / "model.pickle"
        file.write_bytes(pickle.dumps(chunked))
        read = f"import pickle, sys; pickle.load(open({str(file)!r}, 'rb')); assert 'daf_core' not in sys.modules"
        subprocess.run(
            [sys.executable, "-c", read], check=True, cwd=tmp_path, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        )


class WritesData(torch.optim.SGD):
    """Leaves no trace in the versions of tensors, as optimizers with kernels of their own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1


class TestReaders:
    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, WritesData])
    def test_after_a_step_of_the_head_there_is_an_error(self, optimizer: Any, chunked: GPT2LMHeadModel) -> None:
        result = chunked(**batch())
        result.loss.backward()
        optimizer(chunked.parameters(), lr=0.1).step()
        with pytest.raises(ModifiedInPlaceError, match="chunked_loss=False"):
            result.logits.argmax(-1)

    def test_a_step_of_other_weights_changes_nothing(self, chunked: GPT2LMHeadModel) -> None:
        chunked.lm_head.requires_grad_(False)
        result = chunked(**batch())
        result.loss.backward()
        with torch.no_grad():
            expected = nn.functional.linear(result.logits.source.hidden, chunked.lm_head.weight)
        torch.optim.AdamW(chunked.transformer.h.parameters(), lr=0.1).step()
        WritesData([nn.Parameter(torch.ones(3))], lr=0.1).step()
        assert torch.equal(result.logits.detach(), expected)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda loss, logits: logits.retain_grad(),
            lambda loss, logits: logits.register_hook(print),
            lambda loss, logits: torch.autograd.grad(loss, logits),
            lambda loss, logits: torch.autograd.grad(loss, [logits]),
        ],
    )
    def test_a_gradient_of_logits_that_is_none_is_refused(self, ask: Any, chunked: GPT2LMHeadModel) -> None:
        result = chunked(**batch())
        with pytest.raises(ReaderError, match="chunked_loss=False"):
            ask(result.loss, result.logits)

    def test_a_gradient_of_logits_that_were_read_is_there(self, chunked: GPT2LMHeadModel) -> None:
        logits = chunked(input_ids=batch()["input_ids"]).logits
        logits.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        (logits * 3).sum().backward()
        assert (seen[0] == 3).all()
        assert (logits.grad == 3).all()

    def test_a_hook_that_comes_later_sees_logits(self, chunked: GPT2LMHeadModel) -> None:
        seen: list[type] = []
        handle = chunked.lm_head.register_forward_hook(lambda _module, _inputs, logits: seen.append(type(logits)))
        loss, slope = step(chunked, **batch())
        handle.remove()
        assert seen == [Tensor]
        again = step(chunked, **batch())
        assert torch.allclose(again[0], loss)
        assert float((again[1] - slope).norm() / slope.norm()) < CLOSE

    def test_a_weight_in_place_of_its_own_is_read_at_once(self, chunked: GPT2LMHeadModel) -> None:
        """As sharding puts one there for a forward pass, which only its owner updates."""
        chunked.lm_head.weight = nn.Parameter(chunked.lm_head.weight.detach().clone())
        assert not chunks(chunked)

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")
    def test_hooks_of_the_whole_model_see_gradients(self, chunked: GPT2LMHeadModel) -> None:
        plain = step(chunked, **batch())
        chunked.zero_grad()
        seen: list[Any] = []
        handle = chunked.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs))
        loss, logits = chunked(**batch(), return_dict=False, use_cache=False)
        loss.backward()
        handle.remove()
        assert len(seen) == 1
        assert torch.allclose(gradient(chunked), plain[1], rtol=1e-5, atol=1e-7)
        assert logits.shape == (4, 32, VOCABULARY)

    @pytest.mark.parametrize("of", ["weights", "inputs"])
    def test_functional_transforms_run_plain(self, of: str, chunked: GPT2LMHeadModel) -> None:
        weights, labels = dict(chunked.named_parameters()), batch()["labels"]
        embedded = chunked.transformer.wte(batch()["input_ids"]).detach().requires_grad_()

        def loss_of(values: dict[str, Tensor] | Tensor) -> Tensor:
            if isinstance(values, Tensor):
                return chunked(inputs_embeds=values, labels=labels).loss
            return torch.func.functional_call(chunked, values, kwargs=batch()).loss

        if of == "inputs":
            found = torch.func.grad(loss_of)(embedded.detach())
            chunked(inputs_embeds=embedded, labels=labels).loss.backward()
            slope = embedded.grad
        else:
            found = torch.func.grad(loss_of)(weights)["transformer.wte.weight"]
            step(chunked, **batch())
            slope = chunked.lm_head.weight.grad
        assert slope is not None
        assert float((found.detach() - slope).norm() / slope.norm()) < CLOSE

    def test_compiled_later_it_runs_plain(self, chunked: GPT2LMHeadModel) -> None:
        plain = step(chunked, **batch())
        chunked.zero_grad()
        loss = torch.compile(chunked, backend="eager")(**batch()).loss
        loss.backward()
        assert torch.allclose(loss, plain[0])
        assert float((gradient(chunked) - plain[1]).norm() / plain[1].norm()) < CLOSE
