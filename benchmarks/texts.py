"""Examples of text as tokens, and tokens as batches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GPT2Tokenizer

from benchmarks.rows import Row, explained
from benchmarks.tasks import Example, Kind

IGNORED = -100
"""The label of a token that has none."""

Split = list[Row]


def open_tokenizer(name: str) -> Any:
    """Returns the tokenizer of a Hub name, of a folder of a model, or of one with ``encoder.json`` and ``vocab.bpe``.

    Raises:
        SourceError: It cannot be had.
    """
    vocabulary = Path(name) / "encoder.json"
    if vocabulary.exists():
        return GPT2Tokenizer(vocab=str(vocabulary), merges=str(vocabulary.with_name("vocab.bpe")))
    with explained(
        f"the tokenizer {name!r} cannot be had",
        "pass the folder of a model as --model, or of its tokenizer as --tokenizer",
    ):
        return AutoTokenizer.from_pretrained(name)


def tokenize(tokenizer: Any, examples: Sequence[Example], kind: Kind, longest: int) -> Split:
    """Returns the inputs of a model for each example, labels included.

    A text that is to be written follows what it is written from and an end-of-text token, and ends with one; only
    its own tokens have labels.
    """
    texts = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
    targets = [example.target for example in examples]
    if kind == "text":
        sources, written = tokenizer(*texts)["input_ids"], tokenizer([f" {text}" for text in targets])["input_ids"]
        return [_continued(*pair, tokenizer.eos_token_id, longest) for pair in zip(sources, written, strict=True)]
    encoded = tokenizer(*texts, truncation=True, max_length=longest)
    labelled = dict(encoded) | {"labels": targets}
    return [dict(zip(labelled, values, strict=True)) for values in zip(*labelled.values(), strict=True)]


def pad(rows: Sequence[Row], pad_id: int) -> dict[str, Tensor]:
    """Returns rows as a batch, as long as its longest row."""
    fill = {"input_ids": pad_id, "labels": IGNORED}
    return {name: _column([row[name] for row in rows], fill.get(name, 0)) for name in rows[0]}


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yields so many items at a time; the last may be fewer."""
    return (items[start : start + size] for start in range(0, len(items), size))


def on_device(batch: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Returns the batch where the model is."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def _continued(source: list[int], target: list[int], end: int, longest: int) -> Row:
    read, written = [*source, end], [*target, end]
    tokens, labels = (read + written)[:longest], ([IGNORED] * len(read) + written)[:longest]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}


def _column(values: list[Any], fill: int) -> Tensor:
    if isinstance(values[0], list):
        return pad_sequence([torch.tensor(value) for value in values], batch_first=True, padding_value=fill)
    return torch.tensor(values)
