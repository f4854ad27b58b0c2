"""Steps of two processes that keep a memory budget, each by a plan of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integrations.two_processes import run_in_two_processes

REFUSED = (
    "SpreadOut spreads each parameter over several processes, which communicate in forward and backward",
    "DDPSmall averages gradients in the passes that measure a step as well",
    "DistributedDataParallel(static_graph=True) takes the passes that measure a step for its own first ones",
    "DistributedDataParallel(static_graph=True) takes the passes that measure a step for its own first ones",
    "Sharded spreads each parameter over several processes",
    "torch's Join has processes without batches follow what DistributedDataParallel sends",
)
"""Models that are prepared, and others that have become something else by their first step."""


def test_weights_are_those_of_plain_training(tmp_path: Path) -> None:
    """In each trainer, with accumulated batches: also where one process runs out of memory late in a backward pass."""
    run_in_two_processes("tests.integrations.planned_run", tmp_path)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in found:
        assert all(reason in refused for reason, refused in zip(REFUSED, rank.pop("refused"), strict=True))
        assert rank.keys() == {"trainer", "lightning", "single", "loop"}
        for moved, in_parts, retried, _raised in rank.values():
            assert moved > 1e-3
            assert in_parts < 1e-6
            assert retried < 1e-6
    assert [[values[3] for values in rank.values()] for rank in found] == [[0] * 4, [1] * 4]
