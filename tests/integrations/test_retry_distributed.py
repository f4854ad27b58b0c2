"""Two processes run a step again together, and average gradients as DistributedDataParallel does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integrations.two_processes import run_in_two_processes

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_in_two_processes("tests.integrations.retry_run", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_one_that_fails_is_enough(found: list[dict[str, Any]]) -> None:
    assert [rank["processes"] for rank in found] == [2, 2]
    assert [rank["agreed"] for rank in found] == [[False, True, True]] * 2
    assert [rank["alone"] for rank in found] == [True, False]  # in process groups of their own


def test_run_is_that_of_distributed_data_parallel(found: list[dict[str, Any]]) -> None:
    """Weights, running statistics and random numbers are the same to the bit; rank 1 fails first, then rank 0."""
    assert [rank["attempts"] for rank in found] == [[0, 0, 1, 2, 2]] * 2
    assert [rank["differing"] for rank in found] == [[], []]


def test_all_raise_where_no_plan_is_tighter(found: list[dict[str, Any]]) -> None:
    first, second = (rank["error"] for rank in found)
    assert first.startswith("PeerMemoryError: another process of this training ran out of memory, in each of 2")
    assert first.endswith("(did not fail)")
    assert second == f"OutOfMemoryError: {TEXT} ({TEXT})"


def test_models_that_communicate_in_forward_are_known(found: list[dict[str, Any]]) -> None:
    for rank in found:
        free, (norm,), (sparse,), (hooked,), (sharded,) = rank["reasons"]
        assert not free
        assert "communication hook" in hooked
        assert "FSDPModule spreads each parameter" in sharded
        assert "SyncBatchNorm" in norm
        assert "sparse" in sparse
