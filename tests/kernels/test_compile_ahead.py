"""Kernels are compiled in a process of their own, once for all processes that wait for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

# One kernel stands for all, which would take a minute.
ONE_KERNEL = """

def warm_up() -> float:
    memory, pages = FixedPages(1, 128), np.arange(1)
    CpuBackend(threads=1).encode_nonzero(torch.eye(16).view(-1), memory, pages)
    return 0.1
"""
LOAD = """
import json
import torch
from daf_kernels import load_backend
load_backend(torch.device("cpu"))
from daf_kernels.cpu import compile_cache
print(json.dumps(compile_cache.compilations()))
"""
BEGINS = "DAF prepares its CPU kernels in a process of its own, once"
ENDS = "DAF compiled its CPU kernels in "


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "copied"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "daf_kernels" / "cpu" / "backend.py").open("a") as file:
        file.write(ONE_KERNEL)
    return folder


def start(folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Returns how many kernels a process has compiled, and what it has said."""
    printed, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return json.loads(printed), said.splitlines()


def test_a_process_only_loads_what_another_compiles(copied: Path) -> None:
    compiled, (begins, ends) = ended(start(copied))
    assert compiled == 0
    assert begins.startswith(BEGINS)
    assert ends.startswith(ENDS)
    assert "the next run finds them on disk" in ends
    assert ended(start(copied)) == (0, [])


def test_kernels_that_were_compiled_by_a_process_that_was_killed_count_as_such(copied: Path) -> None:
    """Nobody has compiled then, however long it took to look."""
    ended(start(copied))
    (marker,) = (copied / "daf_kernels" / "cpu" / "__pycache__").glob("*.complete")
    marker.unlink()
    compiled, (begins,) = ended(start(copied))
    assert compiled == 0
    assert begins.startswith(BEGINS)
    assert marker.exists()


def test_processes_that_start_together_compile_once(copied: Path) -> None:
    """As those of one training on several devices."""
    both = [ended(process) for process in [start(copied), start(copied)]]
    assert [compiled for compiled, _ in both] == [0, 0]
    assert sorted(len(said) for _, said in both) == [0, 2]


def test_changed_sources_are_compiled_again(copied: Path) -> None:
    ended(start(copied))
    with (copied / "daf_kernels" / "layout.py").open("a") as file:
        file.write("# another constant\n")
    compiled, said = ended(start(copied))
    assert (compiled, len(said)) == (0, 2)


def test_kernels_that_cannot_be_kept_are_compiled_inside(copied: Path) -> None:
    """Another process would compile them in vain."""
    kept = copied / "daf_kernels" / "cpu" / "__pycache__"
    kept.write_text("no folder")
    compiled, said = ended(start(copied, HOME=str(kept), XDG_CACHE_HOME=str(kept), PYTHONDONTWRITEBYTECODE="1"))
    assert compiled > 0
    assert [ENDS in each and "does so again" in each for each in said] == [True]


def test_kernels_that_another_process_cannot_keep_are_compiled_inside(copied: Path) -> None:
    """The disk is full: the folder takes files, and no content."""
    (copied / "sitecustomize.py").write_text(
        "from numba.core.caching import IndexDataCacheFile\n"
        "def full(*_):\n    raise OSError(28, 'No space left on device')\n"
        "IndexDataCacheFile.save = full\n"
    )
    compiled, said = ended(start(copied))
    assert compiled > 0
    assert [each.partition(";")[0].startswith((BEGINS, ENDS)) for each in said] == [True, True]
    assert "No space left on device" in said[-1]
