"""Losses of parts: which law makes them the loss of the batch, and what a model or batch has against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from daf_core import MicroBatchError
from daf_core.batch.infer_reduction import MicroBatchWeights
from daf_core.batch.loss_reduction import LossReduction, weights
from daf_core.batch.micro_batches import run_parts
from daf_core.batch.rows import IGNORED, split
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.table import Context, unsupported_reasons
from tests.core.harness import integers, normal
from tests.core.laws import infer_reduction, matching_laws

ROWS, LENGTH, CLASSES = 6, 8, 11


class Tagger(nn.Module):
    """Scores for each token."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 16, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, CLASSES, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.embed(input_ids))))


def _tokens(lengths: list[int], first: bool = True, seed: int = 1, longest: int = LENGTH) -> dict[str, Tensor]:
    """Padded texts, whose labels after each length, and perhaps at the first place, are ignored."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (len(lengths), longest), generator=random)
    labels = torch.where(torch.arange(longest) < torch.tensor(lengths)[:, None], ids, IGNORED)
    if not first:
        labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES).float(), labels.reshape(-1), reduction=reduction)


def _shifted(model: nn.Module, batch: Any) -> Tensor:
    return _entropy(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])


def _token_mean(model: nn.Module, batch: Any) -> Tensor:
    return _entropy(model(batch["input_ids"]), batch["labels"])


def _token_sum(model: nn.Module, batch: Any) -> Tensor:
    return _entropy(model(batch["input_ids"]), batch["labels"], "sum") / 7


def _row_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean of each row's own mean, as some losses for preferences take it."""
    losses = F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] != IGNORED).sum(1).clamp(min=1)).mean()


def _squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["input_ids"]).float() ** 2).mean()


LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Tensor], LossReduction]] = {
    "causal": (_shifted, LossReduction.SHIFTED_LABELS),
    "token mean": (_token_mean, LossReduction.LABELS),
    "sum": (_token_sum, LossReduction.SUM),
    "mean of rows": (_row_mean, LossReduction.ROWS),
    "no labels": (_squares, LossReduction.ROWS),
}

PADDED = [8, 3, 5, 2, 1, 7]
EVEN = [6] * ROWS


@pytest.mark.parametrize("lengths", [PADDED, EVEN], ids=["padded", "equal lengths"])
@pytest.mark.parametrize(("loss", "law"), LOSSES.values(), ids=LOSSES)
def test_the_law_is_found(loss: Callable[[nn.Module, Any], Tensor], law: LossReduction, lengths: list[int]) -> None:
    """Also where all rows of the batch have equally many labels: in the sample they have not."""
    model, batch = Tagger(), _tokens(lengths)
    assert matching_laws(model, batch, lambda part: loss(model, part)) == {law}


@pytest.mark.parametrize("prompt", [0, 5, 24])
@pytest.mark.parametrize(("loss", "law"), LOSSES.values(), ids=LOSSES)
def test_the_law_is_found_on_parts_of_longer_texts(
    loss: Callable[[nn.Module, Any], Tensor], law: LossReduction, prompt: int
) -> None:
    """Though no label is ignored in what is tried of them."""
    model, batch = Tagger(), _tokens([30, 48, 40, 25], longest=48)
    batch["labels"][:, :prompt] = IGNORED
    assert matching_laws(model, batch, lambda part: loss(model, part)) == {law}


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("longest", [LENGTH, 48])
def test_a_mean_over_tokens_and_one_over_rows_together_are_refused(longest: int, share: float) -> None:
    model, batch = Tagger(), _tokens([longest, longest // 2, longest - 1, longest // 3], longest=longest)
    with pytest.raises(MicroBatchError, match="by the law of rows"):
        matching_laws(model, batch, lambda part: _token_mean(model, part) + share * _squares(model, part))


def _counted(model: nn.Module, batch: Any) -> Tensor:
    """The mean over what a mask does not leave out."""
    mask = batch["mask"]
    return (model(batch["input_ids"]).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("lengths", [[16, 16, 15], [16, 8, 4]])
def test_one_row_of_a_mask_counts_half(lengths: list[int]) -> None:
    """Rounding hides what one token more or less makes of a loss."""
    model, batch = Tagger(), _tokens(lengths, longest=16)
    batch["mask"] = (batch.pop("labels") != IGNORED).long()
    counted: list[list[int]] = []

    def loss(part: Any) -> Tensor:
        counted.append(part["mask"].sum(1).tolist())
        return _squares(model, part)

    matching_laws(model, batch, loss)
    assert counted[0] == [8, *lengths[1:]]
    assert int(batch["mask"].sum()) == sum(lengths)


def test_a_mean_over_as_many_places_of_each_row_is_one_over_rows() -> None:
    """As where parts of pictures are left out, the same share of each."""
    model, batch = Tagger(), _tokens([LENGTH] * 4)
    batch["mask"] = torch.stack([(torch.arange(LENGTH) + row) % 2 for row in range(4)])
    assert MicroBatchWeights(model).of(batch, 2, lambda part: _counted(model, part)) == [0.5, 0.5]


@pytest.mark.parametrize("value", [None, math.inf])
def test_masks_that_say_more_stay_as_they_are(value: float | None) -> None:
    """As lengths in descending order do, which packed sequences need, or those that a loss needs labels for."""
    model, batch = Tagger(), _tokens([8, 6, 5, 2])
    batch["mask"] = (batch.pop("labels") != IGNORED).long()

    def loss(part: Any) -> Tensor:
        lengths = part["mask"].sum(1).tolist()
        if lengths != sorted(lengths, reverse=True):
            if value is None:
                raise ValueError("sort them")
            return torch.tensor(value)
        return _squares(model, part)

    assert MicroBatchWeights(model).of(batch, 2, loss) == [0.5, 0.5]


def test_parts_weigh_by_what_a_mask_of_padding_leaves() -> None:
    """It has ones where there is padding; the rows that are tried have none."""
    model, batch = Tagger(), _tokens([48] * 5 + [20], longest=48)
    padding = batch.pop("labels") == IGNORED

    def loss(part: Any) -> Tensor:
        return _counted(model, {**part, "mask": ~part["padding"]})

    assert MicroBatchWeights(model).of({**batch, "padding": padding}, 2, loss) == [144 / 260, 116 / 260]


def test_labels_may_lie_in_any_order() -> None:
    """As those of pictures whose sides were exchanged."""
    model = nn.Conv2d(3, 4, 1)
    labels = torch.randint(4, (4, 6, 5), generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    labels[:, :2] = IGNORED
    batch = {"x": torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(1)), "labels": labels}
    laws = matching_laws(model, batch, lambda part: F.cross_entropy(model(part["x"]), part["labels"]))
    assert laws & {LossReduction.LABELS, LossReduction.ROWS} == {LossReduction.LABELS}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("longest", [LENGTH, 48])
def test_parts_weigh_by_what_a_mask_counts(longest: int, dtype: torch.dtype) -> None:
    """It is a mean over rows as long as all rows are alike, be it in what is tried of longer texts."""
    model, whole = Tagger(), [longest] * 6
    alike, padded = (_tokens(lengths, longest=longest) for lengths in (whole, [*whole[:5], longest // 2]))
    for batch in (alike, padded):
        batch["mask"] = (batch.pop("labels") != IGNORED).to(dtype)
    weighting = MicroBatchWeights(model)
    assert weighting.of(alike, 2, lambda part: _counted(model, part)) == [0.5, 0.5]
    counted = 5 * longest + longest // 2
    for each in (weighting, MicroBatchWeights(model)):
        found = each.of(padded, 2, lambda part: _counted(model, part))
        assert found == [3 * longest / counted, (counted - 3 * longest) / counted]
    assert MicroBatchWeights(model).of(padded, 2, lambda part: _squares(model, part)) == [0.5, 0.5]


def _errors(model: nn.Module, batch: Any) -> Tensor:
    """Of each token."""
    scores = model(batch["input_ids"]).float().transpose(1, 2)
    return F.cross_entropy(scores, batch["input_ids"], reduction="none")


def _within_lengths(model: nn.Module, batch: Any) -> Tensor:
    inside = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    return (_errors(model, batch) * inside).sum() / inside.sum()


def _weighted(model: nn.Module, batch: Any) -> Tensor:
    losses = _errors(model, batch).mean(1)
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def _of_cells(model: nn.Module, batch: Any) -> Tensor:
    losses = _errors(model, batch)
    cells = (losses[:, None] * batch["cells"]).sum()
    return cells / batch["cells"].sum()


def _without_padding(model: nn.Module, batch: Any) -> Tensor:
    """As where the label of padding is not -100."""
    return F.cross_entropy(
        model(batch["input_ids"]).float().flatten(0, 1), batch["input_ids"].flatten(), ignore_index=0
    )


def _by_class(model: nn.Module, batch: Any) -> Tensor:
    return _by_hand(model(batch["input_ids"]).float().mean(1), batch["classes"], torch.arange(1.0, CLASSES + 1))


def _by_hand(logits: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Returns a mean by weights of classes of which nobody is told."""
    of_rows = weights[classes]
    return (of_rows * F.cross_entropy(logits, classes, reduction="none")).sum() / of_rows.sum()


def _unlike(longest: int) -> dict[str, Tensor]:
    """Texts of which the last two are shorter, count less, and are of other classes."""
    batch = _tokens([longest] * 6, longest=longest)
    del batch["labels"]
    lengths = torch.tensor([longest] * 4 + [longest - 3, longest // 3])
    batch["input_ids"] = torch.where(torch.arange(longest) < lengths[:, None], batch["input_ids"].clamp(min=1), 0)
    cells = torch.ones(6, 3, longest)
    cells[5, :2] = 0
    weights = torch.tensor([1.0, 1, 1, 1, 1, 0.25])
    return {
        **batch,
        "lengths": lengths,
        "weights": weights,
        "cells": cells,
        "classes": torch.tensor([0, 0, 0, 0, 3, 9]),
    }


def test_parts_weigh_by_what_a_mask_counts_after_the_first_place() -> None:
    """As where it says which tokens of a causal language model have a label."""
    model, batch = Tagger(), _tokens([8, 6, 3, 8], longest=8)
    mask = (batch.pop("labels") != IGNORED).long()
    mask[3, :2] = 0

    def loss(part: Any) -> Tensor:
        counted = part["mask"][:, 1:]
        return (_errors(model, part)[:, 1:] * counted).sum() / counted.sum()

    assert MicroBatchWeights(model).of({**batch, "mask": mask}, 2, loss) == [12 / 20, 8 / 20]


OTHERS = {
    "lengths": (_within_lengths, "lengths"),
    "weights of rows": (_weighted, "weights"),
    "rows that count": (_weighted, "weights"),
    "masks of three dimensions": (_of_cells, "cells"),
    "another label that is ignored": (_without_padding, "input_ids"),
}


@pytest.mark.parametrize("zeros", [False, True], ids=["random head", "head of zeros"])
@pytest.mark.parametrize("longest", [LENGTH, 48])
@pytest.mark.parametrize(("loss", "name"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_parts_weigh_by_other_numbers_of_a_batch(
    loss: Callable[[nn.Module, Any], Tensor], name: str, longest: int, zeros: bool, later: bool, request: Any
) -> None:
    """Also where the first batch does not show them; with a head of zeros the losses of all rows are the same."""
    whole, cut, batch = Tagger(), Tagger(), _unlike(longest)
    if "rows that count" in request.node.name:
        batch["weights"] = batch["weights"] == 1
    kept = {key: value for key, value in batch.items() if key in {"input_ids", name}}
    for each in (whole.head, cut.head) if zeros else ():
        nn.init.zeros_(each.weight)
        nn.init.zeros_(each.bias)
    weighting = MicroBatchWeights(cut)
    if later:
        alike = {key: value[:4].clone() for key, value in kept.items()}
        assert weighting.of(alike, 2, lambda part: loss(cut, part)) == [0.5, 0.5]
    shares = weighting.of(kept, 3, lambda part: loss(cut, part))
    assert shares[0] > shares[2]
    expected = loss(whole, kept)
    expected.backward()
    assert float(_step(cut, kept, 3, shares, loss)) == pytest.approx(float(expected.detach()), rel=1e-6)
    _assert_same_gradients(cut, whole)
    assert MicroBatchWeights(cut).of(kept, 2, lambda part: _errors(cut, part).mean()) == [0.5, 0.5]


@pytest.mark.parametrize("mask", [None, torch.tensor([1, 1, 0, 1])])
def test_a_tensor_that_weighs_may_be_missing_later(mask: Tensor | None) -> None:
    """As a mask may where nothing is padded; or be one for rows."""
    model, batch = Tagger(), _tokens([8, 6, 3, 8], longest=8)
    weighting = MicroBatchWeights(model)

    def loss(part: Any) -> Tensor:
        counted = part.get("mask", torch.ones(1))
        counted = counted[:, None] if counted.dim() == 1 else counted
        return (_errors(model, part) * counted).sum() / counted.expand(len(part["input_ids"]), LENGTH).sum()

    counted = (batch.pop("labels") != IGNORED).long()
    assert weighting.of({**batch, "mask": counted}, 2, loss) == [14 / 25, 11 / 25]
    other = batch if mask is None else {**batch, "mask": mask}
    assert weighting.of(other, 2, loss) == pytest.approx([0.5, 0.5] if mask is None else [2 / 3, 1 / 3])
    assert weighting.of({**batch, "mask": counted}, 2, loss) == [14 / 25, 11 / 25]


@pytest.mark.parametrize("weights_of_rows", [[2, 1, 1, 1], [3, 1, 1, 1], [2, 1], [1, 2, 1, 1], [1, 1, 1, 0]])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_whose_weights_become_the_same_by_halving_one(weights_of_rows: list[float], wide: bool) -> None:
    batch = {"input_ids": integers(CLASSES, len(weights_of_rows), LENGTH), "weights": torch.tensor(weights_of_rows) / 1}
    batch["weights"] = batch["weights"][:, None] if wide else batch["weights"]
    model, half = Tagger(), len(weights_of_rows) // 2

    def loss(part: Any) -> Tensor:
        return (_errors(model, part).mean(1) * part["weights"].flatten()).sum() / part["weights"].sum()

    found = MicroBatchWeights(model).of(batch, 2, loss)
    assert found == pytest.approx(
        [sum(each) / sum(weights_of_rows) for each in (weights_of_rows[:half], weights_of_rows[half:])]
    )


def test_classes_are_no_lengths() -> None:
    """Though none is 0 and all are smaller than texts are long."""
    model, classes = nn.Embedding(70, 65), torch.arange(1, 65)[integers(64, 8)]
    batch = {"input_ids": integers(70, 8, 512), "classes": classes}
    weight = torch.where(torch.arange(65) > 32, 9.0, 1.0)

    def loss(part: Any) -> Tensor:
        return _by_hand(model(part["input_ids"]).mean(1), part["classes"], weight)

    with pytest.raises(MicroBatchError, match="by the law of rows"):
        MicroBatchWeights(model).of(batch, 2, loss)
    plain = MicroBatchWeights(model)
    assert plain.of(batch, 2, lambda part: F.cross_entropy(model(part["input_ids"]).mean(1), part["classes"])) == [
        0.5,
        0.5,
    ]


@pytest.mark.parametrize("left", [False, True])
def test_padding_may_be_all_that_is_seen_of_the_ends_of_texts(left: bool) -> None:
    """As where all are padded to the length that a model has."""
    model, ids, lengths = Tagger(), integers(CLASSES - 1, 8, 128) + 1, torch.tensor([90, 30, 60, 20, 40, 80, 70, 50])
    ids = torch.where(torch.arange(128) < lengths[:, None], ids, 0)
    batch = {"input_ids": ids.flip(1) if left else ids}
    found = MicroBatchWeights(model).of(batch, 2, lambda part: _without_padding(model, part))
    assert found == [200 / 440, 240 / 440]


def test_each_class_is_tried_once() -> None:
    """Also such as come late in a batch, and beside flags with the same numbers."""
    model, x = nn.Linear(4, 10), normal(12, 4)
    flags = {"first": torch.arange(12) % 2, "second": torch.arange(12) // 2 % 2}
    batch = {"x": x, **flags, "classes": torch.arange(12).clamp(max=9)}
    weight = torch.ones(10)
    weight[9] = 8

    def loss(part: Any) -> Tensor:
        return _by_hand(model(part["x"]), part["classes"], weight)

    with pytest.raises(MicroBatchError, match="by the law of rows"):
        MicroBatchWeights(model).of(batch, 2, loss)
    tried: list[int] = []

    def plain(part: Any) -> Tensor:
        tried.extend(part["classes"].tolist() if len(part["x"]) == 1 else ())
        return F.cross_entropy(model(part["x"]), part["classes"])

    assert MicroBatchWeights(model).of(batch, 2, plain) == [0.5, 0.5]
    assert set(tried) == set(range(10))


def test_gradients_that_cancel_are_compared_by_the_size_of_what_is_added() -> None:
    """What is left of two opposite ones is rounding."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 2)).bfloat16()
    x = torch.randn(1, 64).repeat(8, 1) + 1e-2 * torch.randn(8, 64)
    batch = {"x": x.bfloat16(), "classes": torch.arange(8) % 2}
    found = MicroBatchWeights(model).of(batch, 2, lambda part: F.cross_entropy(model(part["x"]), part["classes"]))
    assert found == [0.5, 0.5]


class _Layer(nn.Module):
    """Gives a number for each row, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(torch.tanh(self.up(x))), x.mean((1, 2))


class Layered(nn.Module):
    """Two blocks, and a head that tells classes apart by next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Layer() for _ in range(2)])
        self.head = nn.Linear(8, CLASSES)
        nn.init.normal_(self.head.weight, std=1e-6)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
            x += 1
        return self.head(x.mean(1))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_compared_beside_blocks(frozen: bool) -> None:
    """There they take no memory; where nothing else is trained, those of what the last block gives tell the law."""
    model = Layered()
    model.head.requires_grad_(not frozen)
    batch = {"x": normal(6, 4, 8), "classes": torch.tensor([0, 0, 0, 0, 3, 9])}
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    def loss(part: Any, weight: Tensor | None = None) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return _by_hand(model(part["x"]), part["classes"], torch.ones(CLASSES) if weight is None else weight)

    assert MicroBatchWeights(model).of(batch, 2, loss) == [0.5, 0.5]
    assert saved
    assert not [shape for shape in saved if 32 in shape]
    with pytest.raises(MicroBatchError, match="the gradients of 4 rows"):
        MicroBatchWeights(model).of(batch, 2, lambda part: loss(part, torch.arange(1.0, CLASSES + 1)))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_others_stay(frozen: bool) -> None:
    """Those of a head that is no part of the model, and of what is frozen, count nothing and get nothing."""
    model, head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model[0].weight.grad = torch.ones(4, 4)
    (model if frozen else model[0]).requires_grad_(False)
    batch = {"x": normal(8, 4), "classes": torch.arange(8) % 3}

    def loss(part: Any) -> Tensor:
        return F.cross_entropy(head(model(part["x"])), part["classes"], reduction="sum") / 8

    assert MicroBatchWeights(model).of(batch, 2, loss) == [1.0, 1.0]
    assert head.weight.grad is None
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))


def test_a_backward_pass_that_fails_is_the_losses_fault() -> None:
    """As that of a recurrence on a GPU, where the model evaluates."""
    model = Tagger()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)

    def loss(part: Any) -> Tensor:
        found = _token_mean(model, part)
        if found.requires_grad:
            found.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("only in training")))
        return found

    with pytest.raises(MicroBatchError, match="only in training"):
        MicroBatchWeights(model).of(_tokens(PADDED), 2, loss)


@pytest.mark.parametrize("zeros", [False, True], ids=["random head", "head of zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_by_weights_of_classes_are_refused(dtype: torch.dtype, zeros: bool) -> None:
    """Though the classes that weigh more come last, and with a head of zeros the losses of all rows are the same."""
    model, batch = Tagger(dtype=dtype), _unlike(LENGTH)
    if zeros:
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    with pytest.raises(MicroBatchError, match="by the law of rows"):
        MicroBatchWeights(model).of(batch, 2, lambda part: _by_class(model, part))


@pytest.mark.parametrize("zeros", [False, True], ids=["random head", "head of zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_parts_weigh_by_classes_as_torchs_cross_entropy_does(dtype: torch.dtype, zeros: bool, smoothing: float) -> None:
    """Later batches may have other classes, and the weights may change."""
    model, batch = Tagger(dtype=dtype), _unlike(LENGTH)
    if zeros:
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    of_classes = torch.arange(1.0, CLASSES + 1)
    criterion = nn.CrossEntropyLoss(of_classes, label_smoothing=smoothing)

    def loss(part: Any) -> Tensor:
        return criterion(model(part["input_ids"]).float().mean(1), part["classes"])

    weighting = MicroBatchWeights(model)
    assert weighting.of(batch, 2, loss) == pytest.approx([3 / 18, 15 / 18])
    batch["classes"] = torch.tensor([4, 4, 1, 1, 1, 1])
    assert weighting.of(batch, 3, loss) == pytest.approx([10 / 18, 4 / 18, 4 / 18])
    of_classes[4] = 1
    assert weighting.of(batch, 3, loss) == pytest.approx([2 / 10, 4 / 10, 4 / 10])


def test_classes_may_all_be_the_same_at_first() -> None:
    """Weights are made anew in each call here."""
    model = nn.Linear(4, 2)

    def loss(part: Any) -> Tensor:
        return F.cross_entropy(model(part["x"]), part["labels"], torch.tensor([1.0, 9.0]))

    one = {"x": normal(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}
    weighting = MicroBatchWeights(model)
    assert weighting.of(one, 2, loss) == [0.5, 0.5]
    both = {**one, "labels": torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])}
    assert weighting.of(both, 2, loss) == [4 / 16, 12 / 16]
    assert MicroBatchWeights(model).of(both, 2, loss) == [4 / 16, 12 / 16]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("ignored", [IGNORED, 0])
def test_parts_weigh_by_the_classes_of_tokens(ignored: int, shifted: bool) -> None:
    model, batch, of_classes = Tagger(), _tokens(PADDED), torch.arange(1.0, CLASSES + 1)
    batch["labels"] = batch["labels"].where(batch["labels"] != IGNORED, ignored)

    def loss(part: Any) -> Tensor:
        logits, labels = model(part["input_ids"]), part["labels"]
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=of_classes, ignore_index=ignored)

    labels = batch["labels"][:, 1:] if shifted else batch["labels"]
    of_rows = torch.where(labels == ignored, 0, of_classes[labels.clamp(min=0)]).sum(1)
    expected = torch.stack([each.sum() for each in of_rows.chunk(3)]) / of_rows.sum()
    assert MicroBatchWeights(model).of(batch, 3, loss) == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "law"), [LOSSES[name] for name in ("token mean", "sum", "mean of rows")])
def test_gradients_tell_the_law_where_losses_are_the_same(
    loss: Callable[[nn.Module, Any], Tensor], law: LossReduction, dtype: torch.dtype
) -> None:
    """A head of zeros makes them so; the gradients there are stay, and hooks see none of it."""
    model, batch = Tagger(dtype=dtype), _tokens(PADDED)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    loss(model, batch).backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    model.head.bias.register_post_accumulate_grad_hook(lambda _: pytest.fail("a hook has run"))
    assert infer_reduction(model, batch, lambda part: loss(model, part)) is law
    for parameter, (gradient, value) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(6, 0),
        torch.rand(6).to(torch.float8_e4m3fn),
        torch.ones(6, 2, dtype=torch.complex64),
        torch.ones(1).expand(6),
    ],
    ids=["nothing", "float8", "complex", "expanded"],
)
def test_other_tensors_of_a_batch_do_not_matter(other: Tensor) -> None:
    model, batch = Tagger(), {**_tokens(PADDED), "other": other}
    assert infer_reduction(model, batch, lambda part: _token_mean(model, part)) is LossReduction.LABELS


def test_gradients_may_be_sparse_and_parts_may_leave_some_out() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 3, sparse=True), "spare": nn.Linear(3, 3)})
    nn.init.ones_(model["embed"].weight)

    def loss(part: Any) -> Tensor:
        found = model["embed"](part["ids"])
        return (model["spare"](found) if len(found) > 1 else found).sum() * 0 + found.square().mean()

    assert MicroBatchWeights(model).of({"ids": torch.arange(8).view(4, 2)}, 2, loss) == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss", "law"), LOSSES.values(), ids=LOSSES)
def test_the_law_is_found_in_half_precision(
    loss: Callable[[nn.Module, Any], Tensor], law: LossReduction, dtype: torch.dtype
) -> None:
    """Rounding makes losses differ by more than in float32."""
    model, batch = Tagger(dtype=dtype), _tokens(PADDED)
    assert infer_reduction(model, batch, lambda part: loss(model, part)) is law


def test_autocast_is_seen_inside_of_the_loss() -> None:
    """Accelerate and Lightning enter it there, and its losses are float32."""
    model, batch = Tagger(), _tokens(PADDED)

    def loss(part: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _token_mean(model, part) * (1 + 1e-4 * (len(part["labels"]) == 1))

    assert infer_reduction(model, batch, loss) is LossReduction.LABELS


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, LENGTH), min_size=2, max_size=9), parts=st.integers(2, 9), first=st.booleans())
def test_parts_have_the_loss_and_gradient_of_the_batch(lengths: list[int], parts: int, first: bool) -> None:
    """By every law, whatever counts where; parts without a label that counts are left out."""
    for loss, law in LOSSES.values():
        whole, cut, batch = Tagger(), Tagger(), _tokens(lengths, first)
        expected = loss(whole, batch)
        if not torch.isfinite(expected):
            continue
        expected.backward()
        found = _step(cut, batch, parts, weights(law, batch, parts), loss)
        assert float(found) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
        _assert_same_gradients(cut, whole)


def test_naive_mean_of_padded_parts_is_another_loss() -> None:
    """By more than 1, where the parts' own is the batch's to the last digits."""
    model, batch = Tagger(), _tokens([8, 1])
    with torch.no_grad():
        model.head.weight.mul_(20)
        model.head.bias[:] = 3 * torch.randn(CLASSES, generator=torch.Generator().manual_seed(2))
        whole = float(_token_mean(model, batch))
        losses = [float(_token_mean(model, part)) for part in split(batch, 2)]
    assert abs(sum(losses) / 2 - whole) > 1
    weighted = sum(w * x for w, x in zip(weights(LossReduction.LABELS, batch, 2), losses, strict=True))
    assert weighted == pytest.approx(whole, rel=1e-6)


def test_a_part_without_labels_is_not_run() -> None:
    """Its mean is not a number, and so is nothing times it."""
    model, batch = Tagger(), _tokens([0, 0, 5, 3])
    expected = float(_token_mean(model, batch).detach())
    found = _step(model, batch, 2, weights(LossReduction.LABELS, batch, 2), _token_mean)
    assert weights(LossReduction.LABELS, batch, 2) == [0.0, 1.0]
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_without_any_label_the_loss_is_what_it_is_without_parts() -> None:
    model, batch = Tagger(), _tokens([0, 0, 0, 0])
    assert weights(LossReduction.SHIFTED_LABELS, batch, 2) == [0.5, 0.5]
    assert math.isnan(_step(model, batch, 2, [0.5, 0.5], _shifted))


def test_labels_of_rows_may_be_ignored() -> None:
    """As those of a classifier without a class."""
    model = nn.Sequential(nn.Linear(4, 3))
    batch = {"x": torch.randn(6, 4), "labels": torch.tensor([0, IGNORED, 2, 1, IGNORED, IGNORED])}
    law = infer_reduction(model, batch, lambda part: F.cross_entropy(model(part["x"]), part["labels"]))
    assert law is LossReduction.LABELS
    assert weights(law, batch, 3) == [1 / 3, 2 / 3, 0.0]


def test_the_law_is_looked_for_again_where_it_matters() -> None:
    """Without ignored labels all means are the same; the first batch with some tells them apart, and no later one."""
    model, calls = Tagger(), []

    def loss(part: Any) -> Tensor:
        calls.append(len(part["labels"]))
        return _token_mean(model, part)

    weighting = MicroBatchWeights(model)
    assert weighting.of(_tokens([LENGTH] * 4), 1, loss) == [1.0]
    assert calls == []
    assert weighting.of(_tokens([LENGTH] * 4), 4, loss) == [0.25] * 4
    assert calls == [4, 1, 1, 1, 1] * 2  # in evaluation mode, and in training mode
    assert weighting.of(_tokens([LENGTH] * 4), 2, loss) == [0.5] * 2
    assert len(calls) == 10
    assert weighting.of(_tokens([8, 2, 4, 6]), 2, loss) == [0.5, 0.5]
    assert len(calls) == 10
    assert weighting.of(_tokens([8, 2, 5, 1]), 2, loss) == [10 / 16, 6 / 16]
    assert len(calls) == 20
    assert weighting.of(_tokens([8, 2, 1, 1]), 2, loss) == [10 / 12, 2 / 12]
    assert len(calls) == 20


class _InTraining(nn.Module):
    """Computes otherwise in training mode."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self._compute(x) if self.training else x


def _centred(x: Tensor) -> Tensor:
    return x - 0.01 * x.mean(0)


def _with_noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _dropped(x: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(x[None], x[None], x[None], torch.eye(len(x)).bool(), 0.5)
    return F.dropout(attended[0], 0.5) + torch.dropout(x, 0.5, True)


OWN_NUMBERS = torch.Generator()


def _with_noise_of_its_own(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=OWN_NUMBERS)


def _of_several_rows(x: Tensor) -> Tensor:
    if len(x) < 2:
        raise ValueError("more than one row is needed")
    return x


def _differentiated(x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        return x * torch.autograd.grad(inner.square().sum(), inner)[0]


@pytest.mark.parametrize(
    ("compute", "refused"),
    [
        (_centred, True),
        (_with_noise, False),
        (_with_noise_of_its_own, False),
        (_dropped, False),
        (_of_several_rows, False),
        (_differentiated, False),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_rows_that_read_others_in_training_alone_are_seen(
    compute: Callable[[Tensor], Tensor], refused: bool, training: bool
) -> None:
    """Unless chance decides there; dropouts are left out. Modules that are never trained say nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), _InTraining(compute), nn.Linear(4, 3))
    model[1].train(training)
    batch = {"x": normal(8, 4), "labels": integers(3, 8)}

    def loss(part: Any) -> Tensor:
        return F.cross_entropy(model(part["x"]), part["labels"])

    before, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    if refused and training:
        with pytest.raises(MicroBatchError, match="in training mode"):
            infer_reduction(model, batch, loss)
    else:
        assert infer_reduction(model, batch, loss) is LossReduction.ROWS
    assert [module.training for module in model.modules()] == before
    assert torch.equal(numbers, torch.get_rng_state())


def test_gradients_tell_laws_apart_that_agree_by_chance() -> None:
    """Where half precision hides what they say of the loss; in evaluation the tokens' losses are nearly the same."""
    for seed in range(8):
        torch.manual_seed(seed)
        model, batch = Tagger(), _tokens([8, 2, 5, 1], seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

        def loss(part: Any, model: nn.Module = model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return _token_mean(model, part)

        assert matching_laws(model, batch, loss) == {LossReduction.LABELS}


def test_a_model_may_need_the_ends_of_its_texts() -> None:
    """As BART, which classifies by the state of the last token."""
    model = nn.Embedding(50, 3)
    ids = integers(49, 8, 3 * LENGTH)
    ids[:, -1] = 49

    def loss(part: Any) -> Tensor:
        if not bool((part["ids"] == 49).any(1).all()):
            raise ValueError("all examples must have one end")
        return F.cross_entropy(model(part["ids"]).mean(1), part["labels"])

    assert infer_reduction(model, {"ids": ids, "labels": integers(3, 8)}, loss) is LossReduction.ROWS


@pytest.mark.parametrize(("name", "lengths"), [("start_positions", [64]), ("where", [16, 64])])
def test_places_in_texts_are_not_cut_off(name: str, lengths: list[int]) -> None:
    """The loss of an answer that lies outside is ignored, and that of the row is NaN then."""
    model, tried = nn.Embedding(50, 1), list[int]()
    batch = {"ids": integers(50, 8, 64), name: torch.tensor([0, 20, 40, 63, 30, 5, 17, 50])}

    def loss(part: Any) -> Tensor:
        tried.append(part["ids"].shape[1])
        logits = model(part["ids"])[..., 0]
        return F.cross_entropy(logits, part[name].clamp(max=logits.shape[1]), ignore_index=logits.shape[1])

    assert infer_reduction(model, batch, loss) is LossReduction.ROWS
    assert list(dict.fromkeys(tried)) == lengths


def test_numbers_of_samples_are_no_places() -> None:
    """The logits of whole texts would take too much."""
    model, tried = nn.Embedding(50, 3), list[int]()
    batch = {"ids": integers(50, 8, 64), "labels": integers(3, 8), "index": torch.arange(30, 38)}

    def loss(part: Any) -> Tensor:
        tried.append(part["ids"].shape[1])
        return F.cross_entropy(model(part["ids"]).mean(1), part["labels"])

    assert infer_reduction(model, batch, loss) is LossReduction.ROWS
    assert set(tried) == {16}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_parts_weigh_by_pixels_that_have_a_label(order: tuple[int, int], dtype: torch.dtype) -> None:
    """Those that a segmentation leaves out are 255; a first batch may have none."""
    model, images = nn.Conv2d(2, 3, 1), normal(4, 2, 6, 6)
    labels = [integers(3, 4, 6, 6) for _ in range(2)]
    for row in range(4):
        labels[1][row, : row + 1] = 255

    def loss(part: Any) -> Tensor:
        return F.cross_entropy(model(part["images"]), part["labels"].long(), ignore_index=255)

    weighting, expected = MicroBatchWeights(model), ([0.5, 0.5], [9 / 14, 5 / 14])
    for place in order:
        batch = {"images": images, "labels": labels[place].to(dtype)}
        assert weighting.of(batch, 2, loss) == expected[place]


def test_tokens_of_the_number_255_are_tokens() -> None:
    model, ids = nn.Embedding(300, 3), integers(300, 8, LENGTH)
    ids[:3, :4] = 255
    batch = {"ids": ids, "labels": integers(3, 8)}
    assert infer_reduction(model, batch, lambda part: F.cross_entropy(model(part["ids"]).mean(1), part["labels"]))


def test_a_law_is_looked_for_again_on_demand() -> None:
    """A later batch may be another one, though it looks the same."""
    model = nn.Linear(4, 3)

    def loss(part: Any) -> Tensor:
        if bool((part["x"][:, 0] > 0).any()):
            raise ValueError("rows do not belong together")
        return F.cross_entropy(model(part["x"]), part["labels"])

    weighting = MicroBatchWeights(model)
    batch = {"x": normal(8, 4), "labels": integers(3, 8)}
    batch["x"][:, 0] = -1
    assert weighting.of(batch, 2, loss) == [0.5, 0.5]
    weighting.look_again(batch, loss)
    other = {**batch, "x": batch["x"].clone()}
    other["x"][:, 0] = 1
    assert weighting.of(other, 2, loss) == [0.5, 0.5]
    with pytest.raises(MicroBatchError, match="do not belong together"):
        weighting.look_again(other, loss)
    weighting.look_again({name: tensor[:1] for name, tensor in other.items()}, loss)  # one row says nothing


@pytest.mark.parametrize("message", ["cannot be computed", "and not zero", "is nan", "compares rows"])
def test_batches_after_one_that_cannot_be_cut(message: str) -> None:
    """Rows without a loss say nothing of other batches, until three in a row had none; others say all at once."""
    model = nn.Linear(4, 3)

    def loss(part: Any) -> Tensor:
        x, labels = part["x"], part["labels"]
        if int(labels.max()) < 2:
            return F.cross_entropy(model(x), labels)
        if message == "cannot be computed":
            raise ValueError("no loss")
        return {"is nan": math.nan, "and not zero": 0.0}.get(message, 1.0) * model(x).var(0, correction=0).sum()

    good = {"x": normal(8, 4), "labels": torch.tensor([0, 1] * 4)}
    bad = {**good, "labels": torch.tensor([2, 1] * 4)}
    tries = 1 if message == "compares rows" else 3
    weighting = MicroBatchWeights(model)
    for failures in (*[tries - 1] * 2, tries):
        assert weighting.of(good, 2, loss) == [0.5, 0.5]
        for _ in range(failures):
            assert weighting.refusal(good) is None
            with pytest.raises(MicroBatchError, match=message):
                weighting.of(bad, 2, loss)
    refusal = weighting.refusal(good)
    assert refusal is not None
    for batch in (good, bad):
        with pytest.raises(MicroBatchError) as error:
            weighting.of(batch, 2, loss)
        assert str(error.value) == refusal
    assert weighting.refusal({**good, "more": normal(8)}) is None  # other tensors, another loss


def test_after_rows_without_a_loss_the_next_batch_is_tried() -> None:
    """Its rows alone may show that the loss compares rows."""
    model, compares = nn.Linear(4, 3), [False]

    def loss(part: Any) -> Tensor:
        if int(part["labels"].max()) == 2:
            raise ValueError("no loss")
        return (
            model(part["x"]).var(0, correction=0).sum()
            if compares
            else F.cross_entropy(model(part["x"]), part["labels"])
        )

    good = {"x": normal(8, 4), "labels": torch.tensor([0, 1] * 4)}
    weighting = MicroBatchWeights(model)
    compares.clear()
    assert weighting.of(good, 2, loss) == [0.5, 0.5]
    compares.append(True)
    assert weighting.of(good, 2, loss) == [0.5, 0.5]  # nothing is new
    with pytest.raises(MicroBatchError, match="no loss"):
        weighting.of({**good, "labels": torch.tensor([2, 1] * 4)}, 2, loss)
    with pytest.raises(MicroBatchError, match="compares rows"):
        weighting.of(good, 2, loss)


def test_a_loss_that_weighs_classes_is_no_mean_over_rows() -> None:
    """It looks like one in a batch of one class."""
    model = nn.Linear(4, 2)

    def loss(part: Any) -> Tensor:
        return _by_hand(model(part["x"]), part["labels"], torch.tensor([1.0, 9.0]))

    generator = torch.Generator().manual_seed(0)
    one = {"x": torch.randn(8, 4, generator=generator), "labels": torch.zeros(8, dtype=torch.int64)}
    weighting = MicroBatchWeights(model)
    assert weighting.of(one, 2, loss) == [0.5, 0.5]
    both = {**one, "labels": torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])}
    with pytest.raises(MicroBatchError):
        weighting.of(both, 2, loss)
    with pytest.raises(MicroBatchError):
        MicroBatchWeights(model).of(both, 2, loss)


def test_nothing_is_left_of_the_search() -> None:
    """Modes, random numbers, gradients, statistics, hooks and the batch are as before."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    batch = (torch.randn(6, 4), torch.tensor([0, IGNORED, 2, 1, 1, 2]))
    before = torch.get_rng_state(), [tensor.clone() for tensor in (*batch, *model.buffers())]
    infer_reduction(model, batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, before[1], (*batch, *model.buffers())))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("zeros", [False, True], ids=["random head", "head of zeros"])
@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential], ids=["outermost", "inside"])
def test_distributed_wrappers_exchange_nothing_meanwhile(
    tmp_path: Path, around: Callable[[nn.Module], nn.Module], zeros: bool
) -> None:
    """Other processes may not be looking; and buffers are exchanged in the next pass as they would have been."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Tagger()
        if zeros:
            nn.init.zeros_(model.head.weight)
            nn.init.zeros_(model.head.bias)
        model.register_buffer("statistics", torch.zeros(1))
        wrapped = nn.parallel.DistributedDataParallel(model)
        exchanged: list[str] = []
        wrapped._sync_buffers = lambda: exchanged.append("buffers")
        assert (
            infer_reduction(around(wrapped), _tokens(PADDED), lambda part: _token_mean(wrapped, part))
            is LossReduction.LABELS
        )
        assert exchanged == []
        _token_mean(wrapped, _tokens(PADDED))
        assert exchanged == ["buffers"]
    finally:
        torch.distributed.destroy_process_group()


def test_modes_come_back_after_an_error() -> None:
    model = Tagger()
    with pytest.raises(MicroBatchError, match="KeyError"):
        infer_reduction(model, _tokens(PADDED), lambda part: part["nothing"])
    assert all(module.training for module in model.modules())


def _clip(model: nn.Module, batch: Any) -> Tensor:
    """Each row's picture is to fit its own text better than those of the other rows."""
    images, texts = (F.normalize(model(side), dim=-1) for side in (batch["images"], batch["texts"]))
    scores, own = images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def _negatives_ranking(model: nn.Module, batch: Any) -> Tensor:
    """Other rows' answers are the wrong ones, as in MultipleNegativesRankingLoss."""
    questions, answers = model(batch["images"]), model(batch["texts"])
    return F.cross_entropy(
        20 * F.normalize(questions, dim=-1) @ F.normalize(answers, dim=-1).T, torch.arange(len(answers))
    )


def _noisy(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["images"]) - torch.randn(len(batch["images"]), 5)).square().mean()


@pytest.mark.parametrize("loss", [_clip, _negatives_ranking, _noisy])
def test_losses_that_parts_do_not_have_are_refused(loss: Callable[[nn.Module, Any], Tensor]) -> None:
    """With what was measured."""
    model = nn.Linear(4, 5)
    batch = {"images": torch.randn(8, 4), "texts": torch.randn(8, 4)}
    with pytest.raises(MicroBatchError, match=r"loss of 4 rows is .* by the law of sum, .* by the law of rows"):
        infer_reduction(model, batch, lambda part: loss(model, part))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_loss_that_says_nothing_is_refused(value: float) -> None:
    """All laws agree on zero."""
    with pytest.raises(MicroBatchError, match="not zero"):
        infer_reduction(Tagger(), _tokens(PADDED), lambda _: torch.tensor(value))


def test_a_loss_that_has_no_number_for_the_rows_together_is_refused() -> None:
    model, batch = Tagger(), _tokens(EVEN)

    def loss(part: Any) -> Tensor:
        return _squares(model, part) if len(part["labels"]) == 1 else torch.tensor(math.inf)

    with pytest.raises(MicroBatchError, match="rows is inf"):
        matching_laws(model, batch, loss)


def test_a_loss_for_each_row_is_refused() -> None:
    model = Tagger()
    with pytest.raises(MicroBatchError, match="must be one number"):
        infer_reduction(model, _tokens(PADDED), lambda part: model(part["input_ids"]).mean((1, 2)))


def test_memory_that_runs_out_is_not_the_losses_fault() -> None:
    def fail(_part: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        infer_reduction(Tagger(), _tokens(PADDED), fail)


def test_only_the_last_part_that_runs_is_exchanged_with_other_processes() -> None:
    """The last of all may have no label."""
    model = Tagger()
    events: list[Any] = []

    class NoSync:
        def __enter__(self) -> None:
            events.append("no_sync")

        def __exit__(self, *_: object) -> None:
            events.append("end")

    model.no_sync = NoSync

    def step(part: Any, weight: float, last: bool) -> Tensor:
        events.append((part, last))
        return torch.tensor(weight)

    assert float(run_parts(model, "abcd", [0.25, 0.0, 0.75, 0.0], step)) == 1.0
    assert events == ["no_sync", ("a", False), "end", ("c", True)]


@pytest.mark.parametrize("given", [[1.0], [0.0, 0.0]])
def test_weights_that_do_not_fit_the_parts_are_refused(given: list[float]) -> None:
    with pytest.raises(MicroBatchError, match="one weight for each part"):
        run_parts(Tagger(), ["a", "b"], given, lambda *_: torch.tensor(0.0))


def test_gradients_add_up_on_what_is_there() -> None:
    """As in gradient accumulation, under a scaler and under one autocast around all parts, whose copies they share."""
    whole, cut = Tagger(), Tagger()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in (1, 2):
        batch = _tokens(PADDED, seed=seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = _token_mean(whole, batch)
        scaler.scale(loss).backward()
        with torch.autocast("cpu", torch.bfloat16):
            _step(cut, batch, 3, weights(LossReduction.LABELS, batch, 3), _token_mean, scaler.scale)
    for one, other in zip(cut.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 1e-2


def _step(
    model: nn.Module,
    batch: Any,
    parts: int,
    shares: list[float],
    loss: Callable[[nn.Module, Any], Tensor],
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Tensor:
    def step(part: Any, weight: float, _last: bool) -> Tensor:
        weighted = loss(model, part) * weight
        scale(weighted).backward()
        return weighted.detach()

    return run_parts(model, split(batch, parts), shares, step)


def _assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def _with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), layer)


def _configured(**config: Any) -> nn.Module:
    model = nn.Linear(4, 4)
    model.config = SimpleNamespace(**config)
    return nn.Sequential(model)


class DeepSpeedEngine(nn.Linear):
    """Has the name that is looked for."""


BATCH = {"x": torch.randn(4, 4), "y": torch.zeros(4)}

MODELS: dict[str, tuple[nn.Module, str | None]] = {
    "plain": (nn.Linear(4, 4), None),
    "batch norm": (_with(nn.BatchNorm1d(4)), "BatchNorm1d '1' normalizes"),
    "batch norm without statistics": (_with(nn.BatchNorm2d(4, track_running_stats=False).eval()), "BatchNorm2d"),
    "synchronized": (_with(nn.SyncBatchNorm(4)), "SyncBatchNorm"),
    "frozen batch norm": (_with(nn.BatchNorm1d(4).eval()), None),
    "batch norm of a model that does not train yet": (_with(nn.BatchNorm1d(4)).eval(), "BatchNorm1d"),
    "instance norm": (_with(nn.InstanceNorm1d(4)), None),
    "layer norm": (_with(nn.LayerNorm(4)), None),
    "balanced experts": (
        _configured(num_local_experts=8, output_router_logits=True, router_aux_loss_coef=0.1),
        "router's auxiliary loss",
    ),
    "experts that are always balanced": (_configured(n_routed_experts=8, aux_loss_alpha=0.1), "router's auxiliary"),
    "experts without it": (_configured(num_experts=8, output_router_logits=False, router_aux_loss_coef=0.1), None),
    "weight zero": (_configured(num_experts=8, output_router_logits=True, router_aux_loss_coef=0.0), None),
    "one expert": (_configured(num_experts=1, output_router_logits=True, router_aux_loss_coef=0.1), None),
    "DeepSpeed": (DeepSpeedEngine(4, 4), "DeepSpeed"),
}


@pytest.mark.parametrize(("model", "reason"), MODELS.values(), ids=MODELS)
def test_models_that_run_no_parts(model: nn.Module, reason: str | None) -> None:
    found = unsupported_reasons(MICRO_BATCHES, Context(model, batch=BATCH))
    assert bool(found) is (reason is not None), found
    assert (reason or "") in (found or [""])[0]


IDS = torch.zeros(4, 6, dtype=torch.long)
ROW = torch.zeros(1, 6, dtype=torch.long)

BATCHES: dict[str, tuple[Any, str | None]] = {
    "texts": ({"input_ids": IDS, "labels": IDS, "text": ["a"] * 4}, None),
    "shared positions": ({"input_ids": IDS, "labels": IDS, "position_ids": ROW}, None),
    "class weights": ({"input_ids": IDS, "labels": IDS, "weights": torch.ones(9)}, None),
    "restart in each row": ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 4)}, None),
    "no rows": ([], "type list has no tensors"),
    "one row": ({"input_ids": ROW}, "has 1 row"),
    "packed": ({"input_ids": ROW, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "position_ids begin anew"),
    "one text": ({"input_ids": ROW, "position_ids": torch.arange(6)[None]}, "has 1 row"),
    "packed for kernels": ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q"),
    "patches": ({"input_ids": IDS, "labels": IDS, "pixel_values": torch.zeros(30, 9)}, "pixel_values has 30 rows"),
    "grids": ({"input_ids": IDS, "labels": IDS, "grid": torch.zeros(5, 3, dtype=torch.long)}, "grid has 5 rows"),
    "views or rows": ({"x": IDS, "views": [torch.zeros(4, 2)] * 4}, "a list of 4 tensors"),
}


@pytest.mark.parametrize(("batch", "reason"), BATCHES.values(), ids=BATCHES)
def test_batches_that_have_no_parts(batch: Any, reason: str | None) -> None:
    found = unsupported_reasons(MICRO_BATCHES, Context(nn.Linear(1, 1), batch=batch))
    assert bool(found) is (reason is not None), found
    assert (reason or "") in (found or [""])[0]
