"""A forked process has a file, threads and locks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    "case",
    ["before_training", "after_training", "between_forward_and_backward", "in_a_pass", "while_a_lock_is_held"],
)
def test_both_processes_train_right(case: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    # From Python 3.12 on it warns of forks in a process with threads.
    command = [sys.executable, "-W", "ignore", "-m", "tests.core.fork_run", case, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
