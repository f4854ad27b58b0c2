"""The part of a batch that an audit uses: whatever a batch is made of, its rows stay together."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.utils.generic import ModelOutput

from daf_core.batch.rows import rows_of
from daf_core.batch.samples import LEAST_LENGTH, SHARE, few_rows
from daf_core.errors import TraceError


class Pair(NamedTuple):
    """A batch with named parts."""

    inputs: Tensor
    labels: Tensor


def _numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _shapes(batch: Any) -> Any:
    """Puts shapes in the place of tensors."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, dict):
        return {key: _shapes(value) for key, value in batch.items()}
    return [_shapes(value) for value in batch] if isinstance(batch, list | tuple) else batch


def _texts(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _numbered(rows, length), "attention_mask": _numbered(rows, length), "labels": _numbered(rows)}


IMAGES = torch.randn(16, 3, 8, 8)
LABELS = _numbered(16)
IMAGES_BEFORE = IMAGES.clone()

BATCHES: dict[str, tuple[Any, Any]] = {
    "tensor": (IMAGES, (2, 3, 8, 8)),
    "mapping": ({"pixel_values": IMAGES, "labels": LABELS}, {"pixel_values": (2, 3, 8, 8), "labels": (2,)}),
    "tuple": ((IMAGES, LABELS), [(2, 3, 8, 8), (2,)]),
    "list": ([IMAGES, LABELS], [(2, 3, 8, 8), (2,)]),
    "nested": ({"views": [IMAGES, (IMAGES, {"y": LABELS})]}, {"views": [(2, 3, 8, 8), [(2, 3, 8, 8), {"y": (2,)}]]}),
    "scalar tensor": ((IMAGES, torch.tensor(3.0)), [(2, 3, 8, 8), ()]),
    "other values": ({"x": IMAGES, "name": "a", "none": None}, {"x": (2, 3, 8, 8), "name": "a", "none": None}),
    "another first dimension": ((IMAGES, LABELS, _numbered(7, 2)), [(2, 3, 8, 8), (2,), (7, 2)]),
    "texts": (_texts(16, 40), {"input_ids": (2, 40), "attention_mask": (2, 40), "labels": (2,)}),
    "texts with numbers of samples": (
        {**_texts(16, 40), "number": _numbered(16).to(torch.uint32)},
        {"input_ids": (2, 40), "attention_mask": (2, 40), "labels": (2,), "number": (2,)},
    ),
    "fewer rows than eight": ((torch.randn(3, 5, 5), _numbered(3)), [(2, 5, 5), (2,)]),
    "no rows": ((torch.randn(0, 5, 5), _numbered(0)), [(0, 5, 5), (0,)]),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "expected"), BATCHES.values(), ids=BATCHES)
def test_an_eighth_of_the_rows(batch: Any, expected: Any) -> None:
    """At least two of those there are; what has no rows, or other ones, stays whole."""
    assert SHARE == 1 / 8
    assert _shapes(few_rows(batch)) == expected


@pytest.mark.parametrize("batch", [[], {}, (), None, "text", 3, [None, "text"], {"x": torch.tensor(1.0)}])
def test_batches_without_rows_stay_as_they_are(batch: Any) -> None:
    """There is nothing to cut."""
    assert few_rows(batch) == batch


def test_rows_are_the_first_and_belong_together() -> None:
    """Inputs and labels of the same examples, in their order."""
    batch = few_rows({"x": _numbered(16, 3, 2), "y": _numbered(16)}, 1 / 4)
    assert torch.equal(batch["x"], _numbered(16, 3, 2)[:4])
    assert batch["y"].tolist() == [0, 1, 2, 3]


def test_batch_is_left_as_it_was() -> None:
    """Training goes on with all of it."""
    batch = {"x": _numbered(16, 3, 2), "more": [_numbered(16)]}
    few_rows(batch)
    assert _shapes(batch) == {"x": (16, 3, 2), "more": [(16,)]}


def test_named_tuples_stay_named() -> None:
    """A loss may ask for their fields."""
    part = few_rows(Pair(IMAGES, LABELS))
    assert isinstance(part, Pair)
    assert _shapes([part.inputs, part.labels]) == [(2, 3, 8, 8), (2,)]


@pytest.mark.parametrize("kind", [BatchEncoding, ModelOutput, dict])
def test_mappings_of_libraries(kind: Any) -> None:
    """Tokenizers give mappings of their own: keys and rows are as in a plain one."""
    part = few_rows(kind(_texts(16, 40)))
    assert set(part) == {"input_ids", "attention_mask", "labels"}
    assert part["input_ids"].shape == (2, 40)
    assert part["labels"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [(1, 400, (1, 50)), (2, 400, (2, 50)), (7, 400, (2, 175)), (8, 400, (2, 200)), (9, 40, (2, 22)), (16, 40, (2, 40))],
)
def test_few_texts_are_cut(rows: int, length: int, expected: tuple[int, int]) -> None:
    """Where two rows are more than an eighth, as many tokens are left as make an eighth of all."""
    part = few_rows(_texts(rows, length))
    assert _shapes(part) == {"input_ids": expected, "attention_mask": expected, "labels": expected[:1]}
    assert part["input_ids"][0].tolist() == list(range(expected[1]))


@pytest.mark.parametrize(("length", "expected"), [(100, LEAST_LENGTH), (20, LEAST_LENGTH), (16, 16), (9, 9), (1, 1)])
def test_texts_are_not_cut_to_nothing(length: int, expected: int) -> None:
    """Sixteen tokens stay, or all where there are fewer."""
    assert few_rows(_texts(1, length))["input_ids"].shape == (1, expected)


def test_labels_of_each_token_are_cut_with_them() -> None:
    """As those of a causal language model are: the same tokens have to be left."""
    ids = _numbered(1, 400)
    part = few_rows({"input_ids": ids, "labels": ids.clone()})
    assert torch.equal(part["labels"], part["input_ids"])
    assert torch.equal(part["labels"], ids[:, :50])


def test_cut_falls_where_labels_count() -> None:
    """Those of a prompt are ignored, and a loss of ignored labels alone is not a number."""
    labels = _numbered(1, 400)
    labels[:, :330] = -100
    part = few_rows({"input_ids": _numbered(1, 400), "labels": labels})
    assert part["labels"].shape == (1, 50)
    assert int((part["labels"] == -100).sum()) == 0
    assert torch.equal(part["labels"], part["input_ids"])


WHOLE: dict[str, list[Tensor]] = {
    "image": [torch.randn(1, 3, 64, 64), _numbered(1)],
    "features": [torch.randn(1, 400), _numbered(1)],
    "texts of two lengths": [_numbered(1, 400), _numbered(1, 300)],
    "text and image": [_numbered(1, 400), torch.randn(1, 3, 8, 8)],
    "text and pairs of tokens": [_numbered(1, 400), torch.ones(1, 400, 400, dtype=torch.bool)],
    "labels alone": [_numbered(1)],
}


@pytest.mark.parametrize("batch", WHOLE.values(), ids=WHOLE)
def test_what_is_no_text_is_not_cut(batch: list[Tensor]) -> None:
    """A part of an image or of a row of features is another thing than the whole, and so is a part of a pair."""
    assert _shapes(few_rows(batch)) == _shapes(batch)


@pytest.mark.parametrize(("share", "expected"), [(1.0, (16, 40)), (0.5, (8, 40)), (0.01, (2, 16)), (0.05, (2, 16))])
def test_share(share: float, expected: tuple[int, int]) -> None:
    """A smaller one where an eighth does not fit in the memory budget."""
    assert few_rows(_texts(16, 40), share)["input_ids"].shape == expected


@dataclass
class Graph:
    """A batch of a class of its own."""

    x: Tensor
    name: str = "a"
    parts: list[Tensor] = field(default_factory=list)


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_what_is_returned_are_copies(rows: int) -> None:
    """A forward pass may change its batch in place, and may ask for views that need contiguous memory."""
    batch: dict[str, Any] = {
        "input_ids": _numbered(rows, 40),
        "more": [_numbered(rows), Graph(IMAGES, parts=[IMAGES])],
        "none": None,
    }
    before = batch["input_ids"].clone()
    part = few_rows(batch)
    part["input_ids"].view(-1).add_(1)
    part["more"][0].add_(1)
    part["more"][1].x.add_(1)
    part["more"][1].parts[0].add_(1)
    part["more"].append(1)
    assert torch.equal(batch["input_ids"], before)
    assert torch.equal(batch["more"][0], _numbered(rows))
    assert torch.equal(IMAGES, IMAGES_BEFORE)
    assert len(batch["more"]) == 2


@dataclass(slots=True)
class Slots:
    """A batch without a dictionary of attributes."""

    x: Tensor
    numbers: Any


def test_what_is_no_tensor_is_copied() -> None:
    """Also in objects without a dictionary; what reading uses up is refused."""
    batch = Slots(IMAGES.clone(), np.zeros(3))
    part = few_rows([batch, IMAGES])[0]
    part.x.add_(1)
    part.numbers += 1
    assert torch.equal(batch.x, IMAGES)
    assert not batch.numbers.any()
    with pytest.raises(TraceError, match="a batch with a generator is used up by the first that reads it"):
        few_rows(each for each in [IMAGES])


def test_inputs_with_gradients_are_leaves_of_their_own() -> None:
    """The gradient that a measurement takes is not the user's."""
    leaf = torch.randn(16, 8, requires_grad=True)
    part = few_rows({"x": leaf, "y": leaf * 2})
    (part["x"] * part["y"]).sum().backward()
    assert part["x"].requires_grad
    assert leaf.grad is None


def _packed(*lengths: int, flat: bool = False, **more: Any) -> dict[str, Any]:
    """Texts in one row, as FlashAttention takes them."""
    total = sum(lengths)
    shape = (total,) if flat else (1, total)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "input_ids": torch.arange(total).view(shape),
        "labels": torch.arange(total).view(shape),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).view(shape),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": torch.tensor(max(lengths)),
        **more,
    }


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((30, 20, 150, 40, 160), [0, 30, 50]),  # an eighth are 50 tokens
        ((20, 20, 200, 160), [0, 20, 40]),
        ((300, 100), [0, 50]),  # the beginning of one
        ((5, 6, 7), [0, 5, 11]),
        ((4,), [0, 4]),
    ],
)
def test_texts_in_one_row_are_cut_with_their_bounds(lengths: tuple[int, ...], expected: list[int], flat: bool) -> None:
    """As many whole texts as make an eighth of the tokens, or the beginning of one."""
    part = few_rows(_packed(*lengths, flat=flat))
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == expected
    assert part["cu_seq_lens_q"].dtype == torch.int32
    longest = max(after - before for before, after in pairwise(expected))
    assert part["max_length_q"] == int(part["max_length_k"]) == longest
    for name in ("input_ids", "labels", "position_ids"):
        assert part[name].shape[-1] == expected[-1]
    assert part["input_ids"].flatten().tolist() == list(range(expected[-1]))


def test_texts_in_one_row_begin_where_labels_count() -> None:
    """At the beginning of a text."""
    labels = torch.full((1, 400), -100)
    labels[:, 230:240] = 1
    part = few_rows(_packed(30, 20, 150, 40, 160, labels=labels))
    assert part["input_ids"][0, 0] == 200
    assert part["cu_seq_lens_q"].tolist() == [0, 40]
    assert int((part["labels"] != -100).sum()) == 10


def test_positions_begin_anew_where_a_text_does() -> None:
    """Attention takes that for the beginning of a text, and what is before the first for part of none."""
    batch = {name: value for name, value in _packed(30, 20, 150, 200).items() if "_len" not in name}
    batch["labels"] = torch.full((1, 400), -100)
    batch["labels"][:, 60:90] = 1
    part = few_rows(batch)
    assert part["position_ids"][0].tolist() == list(range(50))
    assert part["input_ids"][0, 0] == 50


def test_texts_of_queries_and_keys_that_differ_stay_whole() -> None:
    """What belongs together is not known then."""
    batch = _packed(30, 20, 350, cu_seq_lens_k=torch.tensor([0, 400], dtype=torch.int32))
    assert few_rows(batch)["input_ids"].shape == (1, 400)


def test_texts_in_one_row_are_one_row() -> None:
    """A batch of them is not split between tokens."""
    assert rows_of(_packed(30, 20)) == rows_of(_packed(30, 20, flat=True)) == 1
