"""Two processes of Accelerate that share parameters, gradients or optimizer states: ZeRO 1 to 3, FSDP2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.integrations.test_fsdp2 import bytes_in_one_process
from tests.integrations.two_processes import run_in_two_processes

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.mark.parametrize(
    ("runs", "wrapper"),
    [
        pytest.param("ZeRO-1 ZeRO-2 ZeRO-3", "DeepSpeedEngine", marks=NEEDS_DEEPSPEED, id="DeepSpeed"),
        pytest.param("FSDP2", "FSDPSmallNet", id="FSDP2"),
    ],
)
def test_losses_and_bytes(tmp_path: Path, runs: str, wrapper: str) -> None:
    (tmp_path / "runs.txt").write_text(runs)
    run_in_two_processes("tests.integrations.sharded_run", tmp_path)
    alone = {"exact": bytes_in_one_process("exact"), "4": bytes_in_one_process(4)}
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert list(found) == runs.split()
        for name, run in found.items():
            assert {each["wrapper"] for each in run.values()} == {wrapper}
            assert run["exact"]["losses"] == run["None"]["losses"]
            assert run["4"]["losses"] == pytest.approx(run["None"]["losses"], rel=0.01)
            assert "daf/gradient_error" not in run["4"]  # processes that measure would wait for each other
            # Linear layers of ZeRO-3 are functions of its own, which save other tensors.
            share = 0.1 if name == "ZeRO-3" else 0.0
            for precision, metrics in alone.items():
                most = (1 + share) * metrics["daf/held_mb"]
                assert (1 - 2 * share) * metrics["daf/held_mb"] <= run[precision]["daf/held_mb"] <= most
