"""How the loss of a batch follows from the losses of its parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from daf_core.batch.rows import IGNORED, INTEGERS, bounds_of, by_rows, named_tensors, rows_of


class LossReduction(Enum):
    """What the losses of the parts are multiplied by, so that their sum is the loss of the batch."""

    SUM = "sum"  # nothing: the loss is a sum, or is divided by a number that does not depend on the part
    ROWS = "rows"  # a part's share of the rows: the loss is a mean over rows of equal weight
    LABELS = "labels"  # a part's share of the labels that count, which are those that are not -100
    SHIFTED_LABELS = "shifted labels"  # without the first one of each row: causal language models have none for it


@dataclass(frozen=True)
class WeightedMean:
    """A part's share of what a tensor of the batch says: weights, lengths, ones of a mask, tokens but for padding."""

    name: str
    ignored: int | None = None  # the places of other values count; None: the values themselves do
    shifted: bool = False  # without the first place of each row

    @property
    def value(self) -> str:
        """What it is called in messages."""
        of = f"{self.name}[:, 1:]" if self.shifted else self.name
        return of if self.ignored is None else f"{of} != {self.ignored}"


@dataclass(frozen=True)
class ClassMean:
    """A part's share of the weights of classes that a tensor of the batch names, as in torch's cross entropy."""

    name: str
    number: int  # tells weights apart, which may change
    ignored: int  # the label that does not count
    shifted: bool  # without the first place of each row
    weights: Tensor = field(compare=False, repr=False)

    @property
    def value(self) -> str:
        """What it is called in messages."""
        return f"weights of the classes in {self.name}{'[:, 1:]' if self.shifted else ''}"


Law = LossReduction | WeightedMean | ClassMean


def weights(law: Law, batch: Any, parts: int) -> list[float]:
    """Returns the weight of each part that `split` makes.

    A part with weight 0 has no label that counts: its mean loss is NaN, and it is to be left out. Where no label of
    the batch counts, parts weigh as their rows do, and the loss is NaN as without parts.

    Raises:
        MicroBatchError: `parts` is below 1.
    """
    rows = rows_of(batch) or 0
    bounds = bounds_of(rows, parts)
    if law is LossReduction.SUM or not rows:
        return [1.0] * len(bounds)
    counts = counts_of(law, batch, rows)
    return [sum(counts[start:end]) / sum(counts) for start, end in bounds]


def safest(laws: Collection[Law], batch: Any) -> Law:
    """Returns the law to go by where several agree with all that was seen; one of a mean before the sum.

    Without ignored labels those of a mean are the same, and called ROWS. With ignored labels it is SHIFTED_LABELS
    before LABELS before ROWS: what is ignored is meant not to count, and only texts for causal language models, which
    leave it out, have a label at a row's first place. Laws by other tensors of the batch come last.
    """
    if len(laws) == 1:
        return next(iter(laws))
    labels = ignoring(batch, rows_of(batch) or 0)
    shifted, by_labels, rows = LossReduction.SHIFTED_LABELS, LossReduction.LABELS, LossReduction.ROWS
    order = [shifted, by_labels, rows] if labels else [rows, shifted, by_labels]
    if labels and labels[0].dim() == 1:
        order = [by_labels, rows, shifted]
    others = sorted((law for law in laws if not isinstance(law, LossReduction)), key=lambda law: law.value)
    return next(law for law in (*order, LossReduction.SUM, *others) if law in laws)


def counts_of(law: Law, batch: Any, rows: int) -> list[float]:
    """Returns how many losses a mean counts in each row, or their weight; 1 for each where that is 0 in all rows."""
    if not isinstance(law, LossReduction):
        return _sums_of(law, batch)
    labels = ignoring(batch, rows)
    if law in (LossReduction.SUM, LossReduction.ROWS) or not labels:
        return [1] * rows
    counted = labels[0] != IGNORED
    if law is LossReduction.SHIFTED_LABELS and counted.dim() > 1:
        counted = counted[:, 1:]
    counts: list[float] = by_rows(counted).sum(1).tolist()
    return counts if any(counts) else [1] * rows


def shares(law: Law, batch: Any, rows: int) -> list[float]:
    """Returns what the losses of single rows are multiplied by, so that their sum is the loss of the rows."""
    counts = counts_of(law, batch, rows)
    return [1.0] * rows if law is LossReduction.SUM else [count / sum(counts) for count in counts]


def _sums_of(law: WeightedMean | ClassMean, batch: Any) -> list[float]:
    tensor = next(tensor for name, tensor in named_tensors(batch) if name == law.name)
    tensor = tensor[:, 1:] if law.shifted else tensor
    if isinstance(law, ClassMean):
        counted = (tensor != law.ignored) & (tensor >= 0) & (tensor < len(law.weights))
        tensor = law.weights.to(tensor.device, torch.float64)[tensor.where(counted, 0)] * counted
    elif law.ignored is not None:
        tensor = tensor != law.ignored
    sums: list[float] = by_rows(tensor).sum(1, dtype=torch.float64).tolist()
    return sums if any(sums) else [1] * len(sums)


def ignoring(batch: Any, rows: int) -> list[Tensor]:
    """Returns the integer tensors in which a label is ignored, that of the name ``labels`` first."""
    found = [
        (name, tensor)
        for name, tensor in named_tensors(batch)
        if tensor.shape[0] == rows and tensor.dtype in INTEGERS and bool((tensor == IGNORED).any())
    ]
    return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0] != "labels")]
