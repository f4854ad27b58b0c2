"""Runs a module of the tests in two processes that know of each other."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_in_two_processes(module: str, folder: Path) -> str:
    """Has each process call the module's `main` with the folder; returns what both printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, "-m", __name__, module, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def leave() -> None:
    """Ends this process as it would end, but without taking the interpreter down.

    While that goes on, a thread of gloo that lets go of a tensor kills the process: "terminate called without an active
    exception" (torch 2.13, about one run in a hundred).
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1]).main(Path(sys.argv[2]))
    leave()
