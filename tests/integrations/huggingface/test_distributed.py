"""Two processes, each with a Trainer and DAF."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.integrations.two_processes import run_in_two_processes

ROOT = Path(__file__).resolve().parents[3]


def test_exact_mode_changes_no_bit_in_two_processes(tmp_path: Path) -> None:
    assert torch.distributed.is_available()
    printed = run_in_two_processes("tests.integrations.ddp_run", tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert found["processes"] == 2
        assert found["differing"] == []
        assert found["left behind"] == []
        assert found["raw bytes"] > 500_000
    assert printed.count("┃ saved activations") == 1
