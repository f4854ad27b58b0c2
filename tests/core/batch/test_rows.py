"""Pieces of a batch: together they are the batch, whatever it is made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from daf_core import MicroBatchError
from daf_core.batch.rows import named_tensors, rows_of, split, take

ROWS = 5


class Pair(NamedTuple):
    """A batch with named parts."""

    inputs: Any
    labels: Any


def _numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


IDS, LABELS = _numbered(ROWS, 3), _numbered(ROWS)
TEXTS = ["a", "b", "c", "d", "e"]


@given(rows=st.integers(1, 40), parts=st.integers(1, 50))
def test_pieces_are_the_rows_in_order_and_nearly_equal(rows: int, parts: int) -> None:
    batch = {"x": _numbered(rows, 2), "more": (_numbered(rows), "text")}
    pieces = split(batch, parts)
    sizes = [len(piece["x"]) for piece in pieces]
    assert len(pieces) == min(parts, rows)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    assert torch.equal(torch.cat([piece["more"][0] for piece in pieces]), batch["more"][0])
    assert all(piece["more"][1] == "text" for piece in pieces)


CUT: dict[str, tuple[Any, Any]] = {
    "tensor": (LABELS, [[0, 1], [2, 3, 4]]),
    "list of both": ([LABELS, LABELS], [[[0, 1]] * 2, [[2, 3, 4]] * 2]),
    "texts": ([LABELS, TEXTS], [[[0, 1], ["a", "b"]], [[2, 3, 4], ["c", "d", "e"]]]),
    "tuple of numbers": ([LABELS, (1, 2, 3, 4, 5)], [[[0, 1], (1, 2)], [[2, 3, 4], (3, 4, 5)]]),
    "other lengths": ([LABELS, ["a"], "texts"], [[[0, 1], ["a"], "texts"], [[2, 3, 4], ["a"], "texts"]]),
    "a tensor for each row": (
        [LABELS, LABELS, LABELS, [_numbered(n) for n in (1, 2, 3, 1, 2)]],
        [[*[[0, 1]] * 3, [[0], [0, 1]]], [*[[2, 3, 4]] * 3, [[0, 1, 2], [0], [0, 1]]]],
    ),
    "other rows": ([LABELS, LABELS, _numbered(2)], [[[0, 1], [0, 1], [0, 1]], [[2, 3, 4], [2, 3, 4], [0, 1]]]),
    "scalar": ([LABELS, torch.tensor(3)], [[[0, 1], 3], [[2, 3, 4], 3]]),
}  # fmt: skip


def _plain(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: _plain(value) for key, value in batch.items()}
    return type(batch)(_plain(value) for value in batch) if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize(("batch", "expected"), CUT.values(), ids=CUT)
def test_what_has_a_value_for_each_row_is_cut(batch: Any, expected: Any) -> None:
    assert [_plain(piece) for piece in split(batch, 2)] == expected


def test_a_list_as_long_as_the_batch_that_holds_all_rows_is_none_of_rows() -> None:
    pairs = {"views": [_numbered(2, 3), _numbered(2, 3)], "y": _numbered(2)}
    assert [_plain(piece) for piece in split(pairs, 2)] == [
        {"views": [[[0, 1, 2]]] * 2, "y": [0]},
        {"views": [[[3, 4, 5]]] * 2, "y": [1]},
    ]


@pytest.mark.parametrize("batch", [[], None, "text", {"x": torch.tensor(1.0)}, ["a", "b"]])
def test_a_batch_without_rows_is_its_only_piece(batch: Any) -> None:
    assert rows_of(batch) is None
    assert split(batch, 3) == [batch]


def _default() -> Any:
    return defaultdict(list, {"input_ids": IDS, "labels": LABELS})


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict, lambda values: _default()])
def test_mappings_keep_their_type(make: Any) -> None:
    batch = make({"input_ids": IDS, "labels": LABELS})
    piece = split(batch, 2)[1]
    assert type(piece) is type(batch)
    assert list(piece) == ["input_ids", "labels"]
    assert piece["labels"].tolist() == [2, 3, 4]
    assert batch["labels"] is LABELS


def test_named_tuples_keep_their_names() -> None:
    assert split(Pair(IDS, LABELS), 2)[0].labels.tolist() == [0, 1]


def test_pieces_are_views_and_chosen_rows_are_copies() -> None:
    assert split([IDS], 2)[1][0].untyped_storage().data_ptr() == IDS.untyped_storage().data_ptr()
    chosen = take([IDS, TEXTS], [4, 0])
    assert _plain(chosen) == [[[12, 13, 14], [0, 1, 2]], ["e", "a"]]
    assert chosen[0].untyped_storage().data_ptr() != IDS.untyped_storage().data_ptr()


@pytest.mark.parametrize("parts", [0, -1])
def test_no_parts_are_refused(parts: int) -> None:
    with pytest.raises(MicroBatchError, match=f"parts={parts} is not allowed"):
        split([IDS], parts)


def test_names_lead_to_tensors() -> None:
    batch = {"x": IDS, "more": [None, (LABELS, torch.tensor(1))]}
    assert [(name, tensor is IDS or tensor is LABELS) for name, tensor in named_tensors(batch)] == [
        ("x", True),
        ("more.1.0", True),
    ]
