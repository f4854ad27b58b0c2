"""Trainer runs whose steps run in parts: the losses of models in transformers, and the weights after training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BatchEncoding,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

import daf_integrations as daf
from daf_core import MicroBatchError, PlanError
from daf_core.batch.loss_reduction import LossReduction, weights
from daf_core.batch.micro_batches import run_parts
from daf_core.batch.rows import IGNORED, split
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.table import Context, unsupported_reasons
from tests.core.harness import integers, normal
from tests.core.laws import infer_reduction, matching_laws
from tests.integrations.hf_parts import MODELS, causal, made, masked, padded_rows, padded_trainer, run_in_parts, tagger
from tests.integrations.hf_runs import lora, losses, resnet, rows_for, run
from tests.integrations.hf_runs import weights as weights_of

PARTS = 3

LAWS = {
    "causal": {LossReduction.SHIFTED_LABELS},
    "causal without num_items_in_batch": {LossReduction.SHIFTED_LABELS},
    "masked": {LossReduction.LABELS},
    "tagger": {LossReduction.LABELS},
    "classifier": {LossReduction.ROWS, LossReduction.LABELS, LossReduction.SHIFTED_LABELS},
    "regressor": {LossReduction.ROWS, LossReduction.LABELS, LossReduction.SHIFTED_LABELS},
    "translator": {LossReduction.LABELS},
}


def _batch(model: nn.Module) -> dict[str, Tensor]:
    return default_data_collator(padded_rows(model, 8))


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_models(name: str) -> None:
    """Each follows its law, and parts have the gradient of the batch."""
    whole, cut = made(MODELS[name]).train(), made(MODELS[name]).train()
    batch = _batch(whole)
    found = matching_laws(cut, batch, lambda part: cut(**part).loss)
    assert found == LAWS[name]
    expected = whole(**batch).loss
    expected.backward()
    loss = _step(
        cut, batch, weights(min(found, key=list(LossReduction).index), batch, PARTS), lambda part: cut(**part).loss
    )
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert _distance(_gradients(cut), _gradients(whole)) < 1e-6


def test_causal_loss_by_number_of_items() -> None:
    """Where a loss is divided by a number that it is given, those of parts add up."""
    whole, cut = made(causal).train(), made(causal).train()
    batch = _batch(whole)
    items = (batch["labels"][:, 1:] != IGNORED).sum()
    assert infer_reduction(cut, batch, lambda part: cut(**part, num_items_in_batch=items).loss) is LossReduction.SUM
    whole(**batch).loss.backward()
    _step(cut, batch, weights(LossReduction.SUM, batch, PARTS), lambda part: cut(**part, num_items_in_batch=items).loss)
    assert _distance(_gradients(cut), _gradients(whole)) < 1e-6


def test_naive_mean_of_padded_texts_has_another_gradient() -> None:
    """Even the right count of the wrong labels makes it another one."""
    distances = []
    for law in (LossReduction.ROWS, LossReduction.LABELS, LossReduction.SHIFTED_LABELS):
        whole, cut = made(causal).train(), made(causal).train()
        batch = _batch(whole)
        whole(**batch).loss.backward()
        _step(cut, batch, weights(law, batch, 8), lambda part, model=cut: model(**part).loss)
        distances.append(_distance(_gradients(cut), _gradients(whole)))
    naive, unshifted, shifted = distances
    assert naive > 1
    assert unshifted > 1e-2
    assert shifted < 1e-6


def test_batches_of_tokenizers_stay_what_they_are() -> None:
    batch = BatchEncoding(_batch(made(tagger)))
    pieces = split(batch, 2)
    assert [type(piece) for piece in pieces] == [BatchEncoding, BatchEncoding]
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), batch.labels)
    assert [piece["input_ids"].shape[0] for piece in pieces] == [4, 4]


def test_half_precision() -> None:
    """Accelerate enters autocast in the model's forward, where nothing outside can see it."""
    model = made(masked)
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = cast
    assert infer_reduction(model, _batch(model), lambda part: model(**part).loss.float()) is LossReduction.LABELS


def reasons(model: nn.Module, batch: Any) -> str:
    return "; ".join(unsupported_reasons(MICRO_BATCHES, Context(model, batch=batch)))


def test_models_that_run_no_parts() -> None:
    """Batch normalization of an image model, and routers of experts inside of an adapter's wrapper."""
    images = resnet()
    assert "BatchNorm2d" in reasons(images, default_data_collator(rows_for(images, 4)))
    texts = default_data_collator(rows_for(lora(), 4))
    assert not reasons(lora(), texts)
    experts = {"num_local_experts": 2, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 9}
    config = MixtralConfig(**experts, **heads)
    assert not reasons(MixtralForCausalLM(config), texts)
    config.output_router_logits = True
    assert "router" in reasons(nn.Sequential(MixtralForCausalLM(config)), texts)


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A sum over tokens, divided by their number in all batches of the step."""
    logits = outputs["logits"]
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    return total / num_items_in_batch


def _own_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS},
    "causal, smoothed": ("causal", {"label_smoothing_factor": 0.1}),
    "causal without num_items_in_batch, smoothed": (
        "causal without num_items_in_batch",
        {"label_smoothing_factor": 0.1},
    ),
    "tagger, smoothed": ("tagger", {"label_smoothing_factor": 0.1}),
    "tagger, own loss": ("tagger", {"compute_loss_func": _own_loss}),
    "tagger, own mean": ("tagger", {"compute_loss_func": _own_mean}),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "options"), RUNS.values(), ids=RUNS)
def test_runs_in_parts(name: str, options: dict[str, Any], accumulation: int, tmp_path: Path) -> None:
    """Weights, and the losses that are logged, are those of a run without parts."""
    plain, cut = (
        padded_trainer(tmp_path, made(MODELS[name]), gradient_accumulation_steps=accumulation, **options)
        for _ in range(2)
    )
    run_in_parts(cut, PARTS)
    run(plain)
    run(cut)
    assert losses(cut) == pytest.approx(losses(plain), rel=1e-4)
    assert _largest(weights_of(cut), weights_of(plain)) < 1e-6


def test_a_contrastive_loss_ends_the_search(tmp_path: Path) -> None:
    """Before anything was trained."""

    def contrast(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        rows = F.normalize(outputs["logits"].flatten(1), dim=-1)
        return F.cross_entropy(10 * rows @ rows.T, torch.arange(len(rows)))

    trainer = padded_trainer(tmp_path, made(tagger), compute_loss_func=contrast)
    run_in_parts(trainer, PARTS)
    before = weights_of(trainer)
    with pytest.raises(MicroBatchError, match="compares rows with each other"):
        run(trainer)
    assert _largest(weights_of(trainer), before) == 0


def _step(model: nn.Module, batch: Any, shares: list[float], loss_of: Callable[[Any], Tensor]) -> Tensor:
    def step(part: Any, weight: float, _last: bool) -> Tensor:
        loss = loss_of(part) * weight
        loss.backward()
        return loss.detach()

    return run_parts(model, split(batch, len(shares)), shares, step)


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in other)


def test_the_least_budget_is_enough_for_images() -> None:
    """Parts of a batch are views, whose storage is all of it: each counted as much as the whole batch."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    image = {"image_size": 32, "patch_size": 8, "num_labels": 3}
    plain = ViTForImageClassification(ViTConfig(**config, **image)).train()
    batch = {"pixel_values": normal(16, 3, 32, 32), "labels": integers(3, 16)}
    plain(**batch).loss.backward()
    models = [copy.deepcopy(plain) for _ in range(2)]
    for model in models:
        model.zero_grad()
    daf.prepare(models[0], precision="exact", memory_budget=1000)
    with pytest.raises(PlanError) as error:
        daf.step(models[0], batch)
    daf.prepare(models[1], precision="exact", memory_budget=error.value.least)
    daf.step(models[1], batch)
    assert _distance(_gradients(models[1]), _gradients(plain)) < 1e-6
