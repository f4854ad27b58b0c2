"""Two processes, each with a part of every parameter (FSDP2) and DAF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import daf_integrations as daf
from tests.integrations.loop_runs import adam
from tests.integrations.small_net import SmallNet, loader
from tests.integrations.two_processes import run_in_two_processes

ROOT = Path(__file__).resolve().parents[2]


def test_gradients_and_bytes_in_two_processes(tmp_path: Path) -> None:
    run_in_two_processes("tests.integrations.fsdp2_run", tmp_path)
    alone = {"exact": bytes_in_one_process("exact"), "4": bytes_in_one_process(4)}
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["exact"]["same"]
        assert 0 < found["4"]["error"] < 0.2
        for precision, metrics in alone.items():
            for name in ("daf/raw_mb", "daf/held_mb"):
                assert found[precision][name] == pytest.approx(metrics[name], rel=0.01)
        assert found["4"]["daf/ratio"] > 4
        assert "DTensor spreads each parameter over several processes" in found["said"][0]
        assert len(found["said"]) == 2  # of 4 bits and "auto"


def bytes_in_one_process(precision: object) -> dict[str, float]:
    """Parameters that FSDP brings together for a pass count for no activations, as those that are there anyway."""
    model = daf.prepare(SmallNet().train(), precision=precision, audit_every=None)
    [batch] = loader(1)
    model(**batch)["loss"].backward()
    adam(model).step()
    return daf.metrics(model)
