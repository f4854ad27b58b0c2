"""Steps of two processes that keep a memory budget, each by a plan of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integrations.two_processes import run_in_two_processes


def test_weights_are_those_of_plain_training(tmp_path: Path) -> None:
    """In each trainer, with accumulated batches: also where one process runs out of memory late in a backward pass."""
    run_in_two_processes("tests.integrations.planned_run", tmp_path)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in found:
        refused = "SpreadOut spreads each parameter over several processes, which communicate in forward and backward"
        assert refused in rank.pop("refused")
        assert rank.keys() == {"trainer", "lightning", "single", "loop"}
        for moved, in_parts, retried, _raised in rank.values():
            assert moved > 1e-3
            assert in_parts < 1e-6
            assert retried < 1e-6
    assert [[values[3] for values in rank.values()] for rank in found] == [[0] * 4, [1] * 4]
