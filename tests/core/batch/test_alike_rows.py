"""Losses that compare rows of one class, query or bag alone, or count rows in which nothing counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daf_core import MicroBatchError
from daf_core.batch.infer_reduction import MicroBatchWeights
from daf_core.batch.rows import IGNORED
from daf_core.batch.unlike_rows import Alike, alike_rows, row_without
from tests.core.harness import integers, normal

SIZE, WIDTH, CLASSES = 24, 6, 8
Loss = Callable[[nn.Module, Any], Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def _batch(**others: Tensor) -> dict[str, Tensor]:
    return {"x": normal(SIZE, WIDTH), **others}


CLASS = torch.arange(SIZE) % CLASSES
RARE = torch.tensor([0] * 8 + [1] * 6 + [2] * 4 + [3] * 2 + [4, 5, 6, 7])


def _entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _same(values: Tensor) -> Tensor:
    """Which pairs of rows have the same value."""
    return (values[:, None] == values[None]) & ~torch.eye(len(values), dtype=torch.bool)


def _contrastive(model: nn.Module, batch: Any) -> Tensor:
    """Supervised contrastive learning beside cross entropy; without a pair it is nothing."""
    rows, pairs = F.normalize(model(batch["x"]), dim=-1), _same(batch["y"])
    like = (rows @ rows.T).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9).log_softmax(1)
    return _entropy(model, batch) - (like * pairs).sum() / pairs.sum().clamp(min=1)


def _pulling(model: nn.Module, batch: Any) -> Tensor:
    rows, pairs = model(batch["x"]), _same(batch["y"])
    return _entropy(model, batch) + (torch.cdist(rows, rows) * pairs).sum() / pairs.sum().clamp(min=1)


def _ranking(model: nn.Module, batch: Any) -> Tensor:
    """Of texts of one query the one with the higher grade is to come first."""
    scores, grades = model(batch["x"])[:, 0], batch["grade"].float()
    pairs = _same(batch["query"]) & (grades[:, None] > grades[None])
    wrong = (F.softplus(scores[None] - scores[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)
    return F.mse_loss(scores, grades) + wrong


def _of_bags(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["x"])[:, 0]
    means = torch.stack([scores[batch["bag"] == bag].mean() for bag in batch["bag"].unique()])
    return F.softplus(means).mean()


def _of_classes(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return torch.stack([losses[batch["y"] == label].mean() for label in batch["y"].unique()]).mean()


def _balanced(model: nn.Module, batch: Any) -> Tensor:
    shares = 1 / torch.bincount(batch["y"], minlength=CLASSES)[batch["y"]]
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * shares).sum() / shares.sum()


def _of_the_second_class(model: nn.Module, batch: Any) -> Tensor:
    """Compares the rows that have a one."""
    rows, ones = model(batch["x"]), batch["y"] == 1
    pairs = _same(batch["y"]) & ones[None]
    return _entropy(model, batch) + (torch.cdist(rows, rows) * pairs).sum() / pairs.sum().clamp(min=1)


COMPARING: dict[str, tuple[Loss, dict[str, Tensor]]] = {
    "supervised contrastive": (_contrastive, _batch(y=CLASS)),
    "pulling": (_pulling, _batch(y=CLASS)),
    "pulling, of floats": (
        lambda model, batch: _pulling(model, {**batch, "y": batch["y"].long()}),
        _batch(y=CLASS.float()),
    ),
    "ranking": (_ranking, _batch(query=torch.arange(SIZE) // 4, grade=integers(3, SIZE))),
    "multiple instances": (_of_bags, _batch(bag=torch.arange(SIZE) // 4)),
    "labels in a column": (
        lambda model, batch: _contrastive(model, {**batch, "y": batch["y"][:, 0]}),
        _batch(y=CLASS[:, None]),
    ),
    "mean over classes": (_of_classes, _batch(y=RARE)),
    "balanced in the batch": (_balanced, _batch(y=RARE)),
    "the ones of zeros and ones": (_of_the_second_class, _batch(y=(torch.arange(SIZE) % 3 == 0).long())),
}


@pytest.mark.parametrize(("loss", "batch"), COMPARING.values(), ids=COMPARING)
def test_losses_that_compare_rows_that_are_alike_are_refused(loss: Loss, batch: Any) -> None:
    model = _model()
    weighting = MicroBatchWeights(model)
    for find in (weighting.of, MicroBatchWeights(model).look_again):
        arguments = (batch, 4) if find == weighting.of else (batch,)
        with pytest.raises(MicroBatchError, match="compares rows"):
            find(*arguments, lambda part: loss(model, part))


def test_rows_may_be_alike_in_a_later_batch_first() -> None:
    model = _model()
    weighting = MicroBatchWeights(model)
    apart = {"x": normal(CLASSES, WIDTH), "y": torch.arange(CLASSES)}
    assert weighting.of(apart, 2, lambda part: _contrastive(model, part)) == [0.5, 0.5]
    alike = {**apart, "y": apart["y"] // 2}
    with pytest.raises(MicroBatchError, match="compares rows"):
        weighting.of(alike, 2, lambda part: _contrastive(model, part))


def test_rows_that_are_alike_are_tried_twice_a_tensor() -> None:
    model, seen = _model(), list[list[int]]()

    def loss(part: Any) -> Tensor:
        seen.append(part["y"].tolist())
        return _entropy(model, part)

    weighting, batch = MicroBatchWeights(model), _batch(y=CLASS)
    weighting.of(batch, 4, loss)
    with_pairs = [each for each in seen if max(Counter(each).values()) > 1]
    assert list(dict.fromkeys(Counter(each).most_common(1)[0] for each in with_pairs)) == [(0, 2), (1, 2)]
    seen.clear()
    weighting.of(batch, 4, loss)
    assert seen == []


def test_many_tensors_leave_tests_for_classes() -> None:
    """Each of them has rows that are alike."""
    model, weights = _model(), torch.tensor([1.0] * 7 + [9.0])

    def loss(part: Any) -> Tensor:
        losses = F.cross_entropy(model(part["x"]), part["y"], reduction="none")
        return (losses * weights[part["y"]]).sum() / weights[part["y"]].sum()

    others = {f"column_{number}": integers(3, SIZE) for number in range(8)}
    weighting = MicroBatchWeights(model)
    assert weighting.of(_batch(y=CLASS % 7, **others), 2, loss) == [0.5, 0.5]
    rare = CLASS % 7
    rare[3] = 7
    with pytest.raises(MicroBatchError, match="compares rows"):
        weighting.of(_batch(y=rare, **others), 2, loss)


@pytest.mark.parametrize("share", [0.0, torch.nan])
def test_rows_that_are_alike_may_have_no_loss(share: float) -> None:
    """As those of a class that weighs nothing: others have shown the law."""
    model = _model()

    def loss(part: Any) -> Tensor:
        counted = part["y"] == 1
        losses = F.cross_entropy(model(part["x"]), part["y"], reduction="none")
        return (losses * counted).sum() / 7 + (0.0 if bool(counted.any()) else share)

    batch = _batch(y=torch.tensor([0] * 9 + [1, 0, 1] + [0] * 12))
    weighting = MicroBatchWeights(model)
    for _ in range(4):
        if share == 0:
            assert weighting.of(batch, 2, loss) == [1.0, 1.0]
        else:  # single rows have none in any test
            with pytest.raises(MicroBatchError):
                weighting.of(batch, 2, loss)


def test_losses_of_either_sign_may_cancel() -> None:
    """As with advantages that are centred, where each weighs the same."""
    model = _model()
    batch = _batch(y=CLASS, advantage=torch.tensor([1.0, -1.0, 2.0, -2.0] * 6))
    model[2].weight.data.zero_()

    def loss(part: Any) -> Tensor:
        return (F.cross_entropy(model(part["x"]), part["y"], reduction="none") * part["advantage"]).mean()

    assert MicroBatchWeights(model).of(batch, 4, loss) == [0.25] * 4


def test_two_rows_that_are_alike_differ_in_the_rest() -> None:
    batch = {
        "query": torch.tensor([5, 7, 7, 7, 7]),
        "grade": torch.tensor([1.0, 2.0, 2.0, 2.0, 0.5]),
        "x": torch.zeros(5, 2),
        "other": torch.zeros(3),
    }
    first = alike_rows(batch)
    assert first == Alike("query", 7, [1, 4])
    second = alike_rows(batch, {("query", 7)})
    assert second == Alike("grade", 2.0, [1, 2])
    assert alike_rows(batch, {("query", 7), ("grade", 2.0)}) is None
    two = {"y": torch.tensor([1, 1, 2, 2, 3, 3, IGNORED, IGNORED, IGNORED])}
    assert alike_rows(two) == Alike("y", 1, [0, 1])
    assert alike_rows(two, {("y", 1)}) == Alike("y", 2, [2, 3])
    assert alike_rows(two, {("y", 1), ("y", 2)}) is None
    assert alike_rows({"y": torch.full((4,), torch.nan)}) is None


TOKENS = torch.where(torch.arange(SIZE)[:, None] % 3 == 0, IGNORED, integers(CLASSES, SIZE, 5))
POSITIVES = (torch.arange(SIZE)[:, None] % 4 < torch.arange(CLASSES) % 4).float()  # none in every fourth row


class Tokens(nn.Module):
    """Scores of the places of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


def _texts() -> dict[str, Tensor]:
    return {"ids": integers(CLASSES, SIZE, 5), "labels": TOKENS}


def _of_rows_with_labels(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none")
    counts = (batch["labels"] != IGNORED).sum(1)
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def _with_a_term_for_all_tokens(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["ids"])
    losses = F.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="sum")
    return (losses + scores.logsumexp(-1).square().sum()) / (batch["labels"] != IGNORED).sum().clamp(min=1)


def _by_positives(model: nn.Module, batch: Any) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(model(batch["x"]), batch["t"], reduction="sum")
    return losses / batch["t"].sum().clamp(min=1)


def _with_entropy_of_others(model: nn.Module, batch: Any) -> Tensor:
    scores, without = model(batch["x"]), batch["y"] == IGNORED
    entropy = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)
    return F.cross_entropy(scores, batch["y"]) + (entropy * without).sum() / without.sum().clamp(min=1)


WITHOUT: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Tensor]]] = {
    "mean over rows with labels": (Tokens, _of_rows_with_labels, _texts()),
    "a term for all tokens": (Tokens, _with_a_term_for_all_tokens, _texts()),
    "divided by positives": (_model, _by_positives, _batch(t=POSITIVES)),
    "a term for rows without a class": (
        _model,
        _with_entropy_of_others,
        _batch(y=torch.where(torch.arange(SIZE) % 3 == 0, IGNORED, CLASS)),
    ),
}


@pytest.mark.parametrize(("build", "loss", "batch"), WITHOUT.values(), ids=WITHOUT)
def test_losses_that_count_rows_in_which_nothing_counts_are_refused(
    build: Callable[[], nn.Module], loss: Loss, batch: Any
) -> None:
    model = build()
    with pytest.raises(MicroBatchError, match="compares rows"):
        MicroBatchWeights(model).of(batch, 4, lambda part: loss(model, part))


def test_a_row_in_which_nothing_counts_may_come_later() -> None:
    model = Tokens()
    weighting, batch = MicroBatchWeights(model), _texts()
    whole = {"ids": batch["ids"], "labels": integers(CLASSES, SIZE, 5)}
    whole["labels"][1, 2:] = IGNORED

    weighting.of(whole, 4, lambda part: _of_rows_with_labels(model, part))
    with pytest.raises(MicroBatchError, match="compares rows"):
        weighting.of(batch, 4, lambda part: _of_rows_with_labels(model, part))


def test_texts_stay_short_beside_a_row_in_which_nothing_counts() -> None:
    lengths = set[int]()

    def loss(part: Any) -> Tensor:
        lengths.add(part["ids"].shape[1])
        losses = model(part["ids"]).square().mean(-1)
        return (losses * part["mask"]).sum() / part["mask"].sum()

    model, mask = Tokens(), torch.ones(SIZE, 200, dtype=torch.int64)
    mask[20], mask[5, 100:] = 0, 0
    MicroBatchWeights(model).of({"ids": integers(CLASSES, SIZE, 200), "mask": mask}, 4, loss)
    assert lengths == {16}


def test_labels_at_the_first_place_tell_laws_apart() -> None:
    """Few labels are left of texts that are cut, and perhaps none at that place."""
    model, wrong = Tokens(), 0
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, CLASSES, (8, 64), generator=random)
        labels = torch.where(torch.rand(8, 64, generator=random) < 0.15, ids, IGNORED)
        counts = (labels != IGNORED).sum(1)
        weights = MicroBatchWeights(model).of(
            {"ids": ids, "labels": labels},
            8,
            lambda part: F.cross_entropy(model(part["ids"]).transpose(1, 2), part["labels"]),
        )
        wrong += weights != (counts.double() / counts.sum()).tolist()
    assert wrong == 0


@pytest.mark.parametrize("alone", ["none", "error"])
def test_rows_without_labels_may_have_no_loss(alone: str) -> None:
    model, batch = Tokens(), _texts()

    def loss(part: Any) -> Tensor:
        if alone == "error" and bool((part["labels"] == IGNORED).all()):
            raise ValueError("no labels")
        return F.cross_entropy(model(part["ids"]).transpose(1, 2), part["labels"])

    batch["labels"] = batch["labels"].clone()
    batch["labels"][1, 2:] = IGNORED
    counts = (batch["labels"] != IGNORED).view(4, -1).sum(1)
    assert MicroBatchWeights(model).of(batch, 4, loss) == (counts.double() / counts.sum()).tolist()


def test_what_says_that_nothing_counts_in_a_row() -> None:
    batch = {
        "labels": torch.tensor([[1, IGNORED], [IGNORED, IGNORED]]),
        "mask": torch.tensor([[0, 0], [0, 1]]),
        "y": torch.tensor([0, 1]),
        "all": torch.zeros(2, 2),
        "features": normal(2, 3),
    }
    assert row_without(batch) == ("labels", 1)
    assert row_without(batch, {"labels"}) == ("mask", 0)
    assert row_without(batch, {"labels", "mask"}) is None
    assert row_without({"y": torch.tensor([3, IGNORED, 4])}) == ("y", 1)
