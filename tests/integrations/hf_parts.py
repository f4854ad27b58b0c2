"""Trainers whose steps run in parts, and padded data whose parts have unlike numbers of labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from daf_core.batch.infer_reduction import MicroBatchWeights
from daf_core.batch.micro_batches import run_parts
from daf_core.batch.rows import IGNORED, split
from tests.integrations.hf_runs import QUICK, VOCABULARY, gpt2

LENGTH = 12
LENGTHS = (12, 2, 5, 3, 1, 9, 4, 2)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH + 2,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def causal() -> nn.Module:
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def causal_without_count() -> nn.Module:
    """Takes the mean over the tokens of each forward pass, as models do that know no `num_items_in_batch`."""
    model = causal()
    model.accepts_loss_kwargs = False
    return model


def masked() -> nn.Module:
    return RobertaForMaskedLM(RobertaConfig(**SHAPE))


def tagger() -> nn.Module:
    return RobertaForTokenClassification(RobertaConfig(**SHAPE, num_labels=5))


def classifier() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**SHAPE, num_labels=3))


def regressor() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**SHAPE, num_labels=1))


def translator() -> nn.Module:
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **shape, decoder_start_token_id=0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": causal,
    "causal without num_items_in_batch": causal_without_count,
    "masked": masked,
    "tagger": tagger,
    "classifier": classifier,
    "regressor": regressor,
    "translator": translator,
}


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def padded_rows(model: nn.Module, count: int = 32) -> list[dict[str, Tensor]]:
    """Returns padded texts with the labels that a model takes; few labels count in some of them, or none."""
    random = torch.Generator().manual_seed(1)
    return [_row(model, LENGTHS[index % len(LENGTHS)], random) for index in range(count)]


def _row(model: nn.Module, length: int, random: torch.Generator) -> dict[str, Tensor]:
    inside = torch.arange(LENGTH) < length
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=random).where(inside, 1)
    labels = ids
    if isinstance(model, RobertaForSequenceClassification):
        labels = torch.randint(0, 3, (), generator=random)
        if model.config.num_labels == 1:
            labels = torch.randn((), generator=random)
    elif isinstance(model, RobertaForTokenClassification):
        labels = (ids % 5).where(inside, IGNORED)
    elif isinstance(model, RobertaForMaskedLM):
        labels = ids.where(inside & (torch.rand(LENGTH, generator=random) < 0.3), IGNORED)
    else:
        labels = ids.where(inside, IGNORED)
    return {"input_ids": ids, "attention_mask": inside.long(), "labels": labels}


def padded_trainer(folder: Path, model: nn.Module, **options: Any) -> Trainer:
    function = options.pop("compute_loss_func", None)
    # Adam makes as much of a rounding error in a gradient near zero as of the gradient.
    settings = {**QUICK, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", **options}
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    rows = padded_rows(model)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], compute_loss_func=function)


def run_in_parts(trainer: Trainer, parts: int) -> MicroBatchWeights:
    """Has each training step of a Trainer run in parts."""
    whole_step, whole_loss = trainer.training_step, trainer.compute_loss
    weighting = MicroBatchWeights(trainer.model)
    weight = 1.0

    def compute_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loss = whole_loss(model, *args, **kwargs)
        return loss * weight if model.training else loss

    def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs = trainer._prepare_inputs(inputs)
        shares = weighting.of(
            inputs, parts, lambda part: whole_loss(model, part, num_items_in_batch=num_items_in_batch)
        )

        def step(part: Any, share: float, _last: bool) -> Tensor:
            nonlocal weight
            weight = share
            return whole_step(model, part, num_items_in_batch)

        return run_parts(model, split(inputs, parts), shares, step)

    trainer.compute_loss, trainer.training_step = compute_loss, training_step
    return weighting
