"""Compiled kernels are loaded from disk, unless a file that they are compiled from has changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

PACK = """
import json
import numpy as np
import torch
from daf_kernels import FixedPages
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu import compile_cache
from daf_kernels.cpu import jobs as cpu_jobs

assert compile_cache.compilations() == 0
memory, pages = FixedPages(1, 128), np.arange(1)
cpu.CpuBackend(threads=1).encode_nonzero(torch.eye(16).view(-1), memory, pages)
hits = cpu_jobs.compiled(cpu_jobs.encode_nonzero).cache_hits
assert hits or compile_cache.compilations() > 0
print(json.dumps([memory.read(pages)[0].tolist(), hits, compile_cache.why_not_kept()]))
"""


def _pack(folder: Path) -> tuple[list[int], int]:
    """Returns the bytes that the kernels in a folder pack, and how many of them were found on disk."""
    packed, hits, why_not_kept = _run(folder)
    assert why_not_kept is None
    return packed, hits


def _run(folder: Path, **variables: str) -> tuple[list[int], int, str | None]:
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    command = [sys.executable, "-W", "ignore", "-c", PACK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    packed, hits, why_not_kept = json.loads(done.stdout)
    return packed, hits, why_not_kept


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Kernels with what numba has kept of the one that packs, and what that packs."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    packed, hits = _pack(folder)
    assert hits == 0
    assert _pack(folder) == (packed, 1)
    return folder, packed


@pytest.fixture
def packed(kept: tuple[Path, list[int]]) -> list[int]:
    return kept[1]


@pytest.fixture
def copied(kept: tuple[Path, list[int]], tmp_path: Path) -> Path:
    shutil.copytree(kept[0], tmp_path / "copied", copy_function=shutil.copy2)
    return tmp_path / "copied"


def test_kernels_are_compiled_again_when_a_file_has_changed_that_they_call(copied: Path, packed: list[int]) -> None:
    """As a pull changes it: two calls away from what is loaded, in another file each time."""
    changed = copied / "daf_kernels" / "cpu" / "bits.py"
    changed.write_text(changed.read_text().replace("& U8(1)) << U8(row)", "& U8(1)) << U8(7 - row)"))
    flipped = [int(f"{byte:08b}"[::-1], 2) for byte in packed]
    assert flipped != packed
    assert _pack(copied) == (flipped, 0)


@pytest.mark.parametrize("name", ["layout.py", "reference/gelu_derivative.py"])
def test_kernels_are_compiled_again_when_constants_may_have_changed(name: str, copied: Path, packed: list[int]) -> None:
    with (copied / "daf_kernels" / name).open("a") as file:
        file.write("# another constant\n")
    assert _pack(copied) == (packed, 0)


def _damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "machine code":
        content[len(content) // 2] ^= 1
    file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": pickle.dumps(1)}.get(how, content))


@pytest.mark.parametrize(("suffix", "how"), [("nbi", "empty"), ("nbi", "other"), ("nbc", "machine code")])
def test_damaged_entries_are_compiled_anew_and_replaced(suffix: str, how: str, copied: Path, packed: list[int]) -> None:
    """Power was lost, a disk was full or erred."""
    (file,) = (copied / "daf_kernels" / "cpu" / "__pycache__").glob(f"jobs.encode_nonzero*.{suffix}")
    _damage(file, how)
    assert _pack(copied) == (packed, 0)
    assert _pack(copied) == (packed, 1)


def test_kernels_work_where_nothing_can_be_kept(copied: Path, packed: list[int]) -> None:
    """As in a container whose file system is read-only. Root may write everywhere, but in no file's folder."""
    kept = copied / "daf_kernels" / "cpu" / "__pycache__"
    shutil.rmtree(kept)
    kept.write_text("no folder")
    again, hits, why_not_kept = _run(copied, HOME=str(kept), XDG_CACHE_HOME=str(kept), PYTHONDONTWRITEBYTECODE="1")
    assert (again, hits) == (packed, 0)
    assert "no locator available" in (why_not_kept or "")
    assert "Set NUMBA_CACHE_DIR to a folder that may be written to" in (why_not_kept or "")


def test_kernels_work_where_the_disk_is_full(copied: Path, packed: list[int]) -> None:
    """The folder takes files, and no content."""
    shutil.rmtree(copied / "daf_kernels" / "cpu" / "__pycache__")
    (copied / "sitecustomize.py").write_text(
        "from numba.core.caching import IndexDataCacheFile\n"
        "def full(*_):\n    raise OSError(28, 'No space left on device')\n"
        "IndexDataCacheFile.save = full\n"
    )
    again, hits, why_not_kept = _run(copied)
    assert (again, hits) == (packed, 0)
    assert "No space left on device" in (why_not_kept or "")
