"""Runs a module of the tests in two processes that know of each other.

Both are forked from one server, which imports the trainers once for all tests of a session; `torchrun` itself is tested
where Accelerate's plugin is.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from unittest import mock

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
SECONDS = 240

IMPORTED = ["tests.integrations.hf_parts", "tests.integrations.lightning_runs"]
"""Modules that the server imports: they import the trainers."""

_context = multiprocessing.get_context("forkserver")


def run_in_two_processes(module: str, folder: Path) -> str:
    """Has each process call the module's `main` with the folder; returns what both printed."""
    _start_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as outputs:
        runs = [
            _context.Process(target=_run, args=(module, folder, Path(outputs, str(rank)), _variables(rank, store.port)))
            for rank in range(PROCESSES)
        ]
        for each in runs:
            each.start()
        for each in runs:
            each.join(SECONDS)
            each.kill()  # of a process that has ended this does nothing
            each.join()
        printed = "".join(path.read_text() for path in sorted(Path(outputs).iterdir()))
    assert [each.exitcode for each in runs] == [0] * PROCESSES, printed[-3000:]
    return printed


def _start_server() -> None:
    """Starts the server, if it does not run yet, with variables that are read while it imports."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}):
        _context.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


def _variables(rank: int, port: int) -> dict[str, str]:
    """Returns the environment that `torchrun` gives a process."""
    count = str(PROCESSES)
    return {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count},
        **{"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0"},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run(module: str, folder: Path, output: Path, variables: dict[str, str]) -> None:
    """Is what one of the processes does."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    kept: list[FrameType] = []

    def keep(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            sys.setprofile(None)
            kept.append(frame)

    try:
        main = importlib.import_module(module).main
        # What it has made must not go when it returns: a wrapper of DistributedDataParallel that goes may wait for a
        # thread of gloo, which waits for the interpreter's lock (torch 2.13, up to one run in ten).
        sys.setprofile(keep)
        main(folder)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()


def leave(code: int = 0) -> None:
    """Ends this process as it would end, but without taking the interpreter down.

    While that goes on, a thread of gloo that lets go of a tensor kills the process: "terminate called without an active
    exception" (torch 2.13, about one run in a hundred).
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
