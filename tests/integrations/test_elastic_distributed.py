"""Elastic training in two processes, whose clocks differ."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integrations.elastic_runs import STEPS
from tests.integrations.two_processes import run_in_two_processes


def test_processes_train_the_same(tmp_path: Path) -> None:
    """What the first one's clock says; weights are those of one process with the whole batches and the same masks."""
    run_in_two_processes("tests.integrations.elastic_ddp_run", tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for name in ("loop", "budget", "trainer", "lightning"):
        assert first[name] == second[name]
        masks = first[name]["masks"]
        assert len(masks) == STEPS
        sizes = {len(mask) for mask in masks}
        assert min(sizes) < max(sizes) == first[name]["parameters"]
    assert first["repeated"] == second["repeated"]
    own, noted, followed = first["repeated"]
    assert own != noted == followed
    assert {"plan.json", "plan.rank1.json"} <= {each.name for each in tmp_path.iterdir()}
    for found in (first, second):
        assert found["largest difference"] < 1e-6
        assert found["largest change"] > 1e-3
        assert "find_unused_parameters=True" in found["refused"]
