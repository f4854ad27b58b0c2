"""Two processes, each with a Trainer and DAF."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_exact_mode_changes_no_bit_in_two_processes(tmp_path: Path) -> None:
    assert torch.distributed.is_available()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, "-m", "tests.integrations.ddp_run", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        assert found["processes"] == 2
        assert found["differing"] == []
        assert found["left behind"] == []
        assert found["raw bytes"] > 500_000
    assert result.stdout.count("┃ saved activations") == 1
