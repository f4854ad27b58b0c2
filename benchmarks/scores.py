"""What a trained model is worth: accuracy and F1, correlations, or the loss of the texts that it is to write."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import pad as pad_sides

from benchmarks.texts import IGNORED, Split, chunks, on_device, pad

EVALUATION_BATCH = 64
TEXT_BATCH = 8  # logits of a large vocabulary are large


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": lambda outputs, labels: int((outputs.argmax(-1) == labels).sum()) / len(labels),
    "F1": lambda outputs, labels: float(f1_score(labels, outputs.argmax(-1), zero_division=0.0)),
    "Pearson": lambda outputs, labels: float(pearsonr(outputs.squeeze(-1), labels).statistic),
    "Spearman": lambda outputs, labels: float(spearmanr(outputs.squeeze(-1), labels).statistic),
}
"""Functions of what a model puts out, of shape (rows, classes or 1), and of the labels, of shape (rows,)."""

TEXT_METRICS = ("loss", "perplexity")
"""Mean loss of a token, in nats, and the exponential of it. Smaller is better."""


def next_token_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Returns the cross-entropy of each token's logits and the label that follows, where it is not ``IGNORED``."""
    following = pad_sides(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    places = (following != IGNORED).nonzero().squeeze(1)  # most tokens have no label: their softmax is left out
    chosen = logits.flatten(0, 1).index_select(0, places)
    return cross_entropy(chosen, following[places], label_smoothing=smoothing, reduction=reduction)


def score(model: nn.Module, splits: Mapping[str, Split], metrics: Sequence[str], pad_id: int) -> dict[str, float]:
    """Returns each metric on each split, and on all of them together where there are several.

    Args:
        model: What is evaluated.
        splits: Tokenized rows.
        metrics: Keys of ``METRICS``, none for models that write texts. The first of them goes by the split's name.
        pad_id: The token that rows are padded with.
    """
    model.eval()
    together = {"+".join(splits): [row for rows in splits.values() for row in rows]} if len(splits) > 1 else {}
    scores: dict[str, float] = {}
    for name, rows in {**splits, **together}.items():
        values = _label_scores(model, rows, metrics, pad_id) if metrics else _text_scores(model, rows, pad_id)
        scores |= {_heading(name, metric): value for metric, value in values.items()}
    return scores


def _heading(split: str, metric: str) -> str:
    return split if metric == "accuracy" else f"{split} {metric}"


@torch.no_grad()
def _label_scores(model: nn.Module, rows: Split, metrics: Sequence[str], pad_id: int) -> dict[str, float]:
    outputs: list[Tensor] = []
    labels: list[Tensor] = []
    for chunk in chunks(_by_length(rows), EVALUATION_BATCH):
        batch = on_device(pad(chunk, pad_id), model)
        labels.append(batch.pop("labels").cpu())
        outputs.append(model(**batch).logits.cpu())
    return {metric: METRICS[metric](torch.cat(outputs), torch.cat(labels)) for metric in metrics}


@torch.no_grad()
def _text_scores(model: nn.Module, rows: Split, pad_id: int) -> dict[str, float]:
    total, tokens = 0.0, 0
    for chunk in chunks(_by_length(rows), TEXT_BATCH):
        batch = on_device(pad(chunk, pad_id), model)
        labels = batch.pop("labels")
        total += float(next_token_loss(model(**batch).logits, labels, reduction="sum"))
        tokens += int((labels[:, 1:] != IGNORED).sum())
    return dict(zip(TEXT_METRICS, (total / tokens, math.exp(total / tokens)), strict=True))


def _by_length(rows: Split) -> Split:
    """Orders rows so that little of a batch is padding."""
    return sorted(rows, key=lambda row: len(row["input_ids"]))
