"""The loss of a causal language model without logits, and logits that are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother

from daf_core import ActivationEngine, DAFConfig, ModifiedInPlaceError, ReaderError
from daf_core.rewrites import chunked_loss
from daf_core.rewrites.causal_lm import find_head, smoothed_loss
from daf_core.rewrites.lazy_logits import LazyLogits, LogitsSource
from daf_core.rewrites.registry import OperatorRewrites
from tests.core.rewrites.steps import (
    VOCABULARY,
    batch,
    cohere,
    compare,
    gemma,
    gpt2,
    gradient,
    granite,
    step,
    with_bias,
)
from tests.kernels.pretended_gpu import PretendedGpu, PretendedGraph

CLOSE = 2e-6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven rows, so that there are several."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 7 * 4 * VOCABULARY)


@pytest.fixture
def rewritten() -> Iterator[GPT2LMHeadModel]:
    model = gpt2()
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    yield model
    rewrites.undo()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": torch.tensor(50)},
        {"num_items_in_batch": 50},
        {"shift_labels": batch(3)["labels"]},
        {"ignore_index": 5},
    ],
    ids=lambda options: next(iter(options), "none"),
)
def test_loss_is_equal(options: dict[str, Any]) -> None:
    model, inputs = gpt2(), batch(0 if "ignore_index" in options else 10)
    assert max(compare(model, lambda: step(model, **inputs, **options))) < CLOSE


@pytest.mark.parametrize("frozen", [False, True])
def test_bias_is_equal(frozen: bool) -> None:
    model = with_bias()
    model.lm_head.requires_grad_(not frozen)
    assert find_head(model) is model.lm_head
    assert max(compare(model, lambda: step(model, **batch()))) < CLOSE


@pytest.mark.parametrize("trains_weight", [False, True])
def test_logits_never_exist(rewritten: GPT2LMHeadModel, trains_weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten.lm_head.weight.requires_grad_(trains_weight)

    def refuse(_: LogitsSource) -> Tensor:
        raise AssertionError("the logits were computed")

    monkeypatch.setattr(LogitsSource, "logits", refuse)
    result = rewritten(**batch())
    result.loss.backward()
    assert isinstance(result.logits, LazyLogits)
    assert result.logits.shape == (4, 32, VOCABULARY)
    assert result.logits.requires_grad
    assert result.logits.dtype is torch.float32


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize(("make", "steps"), [(gpt2, 1), (gemma, 10)])
def test_autocast_differs_by_its_own_rounding(
    make: Callable[[], nn.Module], steps: int, dtype: torch.dtype, close: float
) -> None:
    """Plain rounds each change of the logits, of which gemma's have three."""
    model = make()

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(**batch()).loss
        assert loss.dtype is torch.float32
        loss.backward()
        return loss.detach(), gradient(model)

    loss, slope = compare(model, run)
    assert loss < steps * 1e-5
    assert slope < close


def test_weights_of_sixteen_bits() -> None:
    model = gpt2().to(torch.bfloat16)
    loss, slope = compare(model, lambda: step(model, **batch()))
    assert loss < 1e-5
    assert slope < 2e-2


@pytest.mark.parametrize("make", [gemma, granite, cohere])
@pytest.mark.parametrize("trains_weight", [True, False])
def test_logits_that_a_model_changes(make: Callable[[], nn.Module], trains_weight: bool) -> None:
    model = make()
    model.get_output_embeddings().requires_grad_(trains_weight)
    assert max(compare(model, lambda: step(model, **batch()))) < CLOSE


@pytest.mark.parametrize("make", [gemma, granite, cohere])
def test_changed_logits_do_not_exist_until_they_are_read(make: Callable[[], nn.Module]) -> None:
    model = make()
    plain = model(**batch()).logits
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    result = model(**batch())
    result.loss.backward()
    assert isinstance(result.logits, LazyLogits)
    assert not result.logits.source.is_computed
    assert torch.equal(result.logits.argmax(-1), plain.argmax(-1))
    assert torch.equal(result.logits.detach(), plain.detach())
    result.logits.div_(2.0)
    assert torch.equal(result.logits.detach(), plain.detach() / 2)
    rewrites.undo()


@pytest.mark.parametrize("make", [gemma, granite, cohere])
def test_changed_logits_have_the_gradient_of_plain(make: Callable[[], nn.Module]) -> None:
    model = make()

    def own(read: Callable[[Tensor], Tensor]) -> Tensor:
        model.zero_grad()
        read(model(input_ids=batch()["input_ids"]).logits).backward()
        return gradient(model)

    readers = [OwnLoss.apply, lambda logits: logits.square().sum()]
    plain = [own(read) for read in readers]
    rewrites = OperatorRewrites(model)
    rewrites.apply()
    for read, expected in zip(readers, plain, strict=True):
        assert torch.allclose(own(read), expected, rtol=1e-4, atol=1e-5)
    rewrites.undo()


def test_a_second_tanh_is_computed(rewritten: GPT2LMHeadModel) -> None:
    logits = rewritten(**batch()).logits
    once = torch.tanh(2 * logits / 4.0)
    assert type(once) is LazyLogits
    assert once.bend == (0.5, 1.0)
    assert type(once * 3) is LazyLogits
    assert type(once.tanh()) is Tensor
    exact = torch.tanh(logits.computed() * 2 / 4.0)
    assert torch.equal(once.detach(), exact.detach())


@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)])
@pytest.mark.parametrize("make", [gpt2, gemma])
def test_smoothed_labels(make: Callable[[], nn.Module], items: Any) -> None:
    model, inputs = make(), batch()
    options: dict[str, Any] = {"shift_labels": True, "num_items_in_batch": items}

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        outputs = model(input_ids=inputs["input_ids"])
        loss = smoothed_loss(outputs.logits, inputs["labels"], 0.1, **options)
        assert (loss is not None) is isinstance(outputs.logits, LazyLogits)
        loss = LabelSmoother(0.1)(outputs, inputs["labels"], **options) if loss is None else loss
        loss.backward()
        return loss.detach(), gradient(model)

    assert max(compare(model, run)) < CLOSE


def test_scaled_loss_of_float16_keeps_small_gradients() -> None:
    hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    weight = torch.randn(20000, 16, generator=torch.Generator().manual_seed(1)).half() * 0.05
    targets = torch.arange(8)
    loss = chunked_loss.linear_cross_entropy_sum(hidden, weight, None, targets, -100, torch.float16)
    (found,) = torch.autograd.grad(loss, hidden)
    wide = hidden.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(functional.cross_entropy(wide @ weight.double().t(), targets, reduction="sum"), wide)
    assert (found - exact).norm() / exact.norm() < 2e-3


@pytest.mark.parametrize("ignored", [0, 3, 9], ids=["all count", "some count", "none counts"])
@pytest.mark.parametrize("bend", [chunked_loss.STRAIGHT, chunked_loss.Bend(0.5, 3.0)], ids=["straight", "bent"])
def test_a_cuda_graph_is_given_the_same_rows_each_time(
    ignored: int, bend: chunked_loss.Bend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows count is not known to the host; loss and gradients are the same."""
    hidden, weight, bias = torch.randn(9, 8), torch.randn(20, 8), torch.randn(20)
    targets = torch.arange(9)
    targets[:ignored] = -100
    results = list[list[Tensor]]()
    for captured in (False, True):
        given = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
        with PretendedGraph(PretendedGpu()).capturing(monkeypatch) if captured else nullcontext():
            loss = chunked_loss.linear_cross_entropy_sum(*given, targets, -100, torch.float32, bend, 0.1)
            slopes = torch.autograd.grad(loss, given)
        results.append([loss.detach(), *slopes])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_no_label_counts(rewritten: GPT2LMHeadModel) -> None:
    inputs = batch(32)
    loss, slope = step(rewritten, **inputs)
    assert loss.isnan()
    assert not slope.any()
    loss, slope = step(rewritten, **inputs, num_items_in_batch=torch.tensor(4))
    assert loss == 0
    assert not slope.any()


def test_a_label_outside_of_the_vocabulary_is_refused(rewritten: GPT2LMHeadModel) -> None:
    inputs = batch()
    inputs["labels"][0, 20] = VOCABULARY
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        rewritten(**inputs)


def test_second_derivatives_are_refused(rewritten: GPT2LMHeadModel) -> None:
    """Torch's own decorator lets them pass, as far as they come by the loss: a penalty's gradient was off by .7."""
    loss = rewritten(**batch()).loss
    with pytest.raises(ReaderError, match="chunked_loss=False"):
        torch.autograd.grad(loss, list(rewritten.parameters()), create_graph=True)


def test_second_derivatives_by_other_ways_are_refused() -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8)
    targets = torch.arange(6)
    loss = chunked_loss.linear_cross_entropy_sum(hidden, weight, None, targets, -100, torch.float32)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss * hidden.sum(), hidden, create_graph=True)


def test_a_loss_of_the_users_own_reads_logits(rewritten: GPT2LMHeadModel) -> None:
    inputs = batch()

    def own() -> tuple[Tensor, Tensor]:
        rewritten.zero_grad()
        logits = rewritten(input_ids=inputs["input_ids"]).logits
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY), inputs["labels"].view(-1)) + logits[0, 0, 0] ** 2
        loss.backward()
        return loss.detach(), gradient(rewritten)

    found = own()
    rewritten.eval()  # the logits are those of the output projection
    plain = own()
    assert all(torch.allclose(new, old, rtol=1e-5, atol=1e-7) for new, old in zip(found, plain, strict=True))


class OwnLoss(torch.autograd.Function):
    """What fused losses are: autograd sees no operator."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


def test_a_function_of_the_users_own_reads_logits(rewritten: GPT2LMHeadModel) -> None:
    def own() -> Tensor:
        rewritten.zero_grad()
        OwnLoss.apply(rewritten(input_ids=batch()["input_ids"]).logits).backward()
        return gradient(rewritten)

    found = own()
    rewritten.eval()
    assert torch.allclose(found, own(), rtol=1e-4, atol=1e-5)


def test_readers_see_the_logits_once(rewritten: GPT2LMHeadModel) -> None:
    logits = rewritten(**batch()).logits
    with torch.no_grad():
        exact = functional.linear(logits.source.hidden, rewritten.lm_head.weight)
        assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert logits.source.logits() is logits.source.logits()
    assert torch.equal(torch.stack([logits, logits])[1], exact)
    assert torch.equal(torch.from_numpy(logits.detach().numpy()), exact)
    assert "tensor(" in repr(logits)
    assert (logits * 2).grad_fn is not None
    assert not logits.detach().requires_grad


def test_changes_in_place_stay(rewritten: GPT2LMHeadModel) -> None:
    logits = rewritten(**batch()).logits
    before = logits.detach().clone()
    logits.div_(2.0)
    assert torch.equal(logits.detach(), before / 2)


def test_mixed_precision_and_distributed_training_leave_them_lazy(rewritten: GPT2LMHeadModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = rewritten(**batch()).logits
    assert logits.dtype is torch.bfloat16
    wide = logits.float()
    again = wide.clone()
    assert type(wide) is type(again) is LazyLogits
    assert again.dtype is torch.float32
    assert not again.source.is_computed
    assert torch.equal(again.detach(), logits.detach().float())
    assert again.sum().dtype is torch.float32


def test_stale_logits_are_refused(rewritten: GPT2LMHeadModel) -> None:
    result = rewritten(**batch())
    result.loss.backward()
    torch.optim.SGD(rewritten.parameters(), 0.1).step()
    with pytest.raises(ModifiedInPlaceError, match="Read them before"):
        result.logits.sum()


def test_wrapped_and_hooked_heads_are_left_alone() -> None:
    model = gpt2()
    model.lm_head.register_forward_hook(lambda *_: None)
    assert find_head(model) is None
    model = gpt2()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert find_head(model) is None
    model = gpt2()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert find_head(model) is None
    assert find_head(gpt2()) is not None


def test_daf_keeps_the_gradient_of_the_head_exact() -> None:
    model = gpt2()
    model.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    rewrites = OperatorRewrites(model)
    engine = ActivationEngine(model, DAFConfig(precision=1, audit_every=None))
    found = [[step[:2] for step in each.steps] for each in (rewrites, OperatorRewrites(model))]
    assert found[0] == found[1]  # its hooks are no strangers'
    rewrites.apply()
    with engine.compress():
        loss = model(**batch()).loss
    loss.backward()
    found = model.transformer.ln_f.bias.grad.clone()
    engine.finish_step()
    engine.close()
    rewrites.undo()
    step(model, **batch())
    exact = model.transformer.ln_f.bias.grad
    assert (found - exact).norm() / exact.norm() < CLOSE
