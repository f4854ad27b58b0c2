"""Compiled kernels are loaded from disk, unless a file that they are compiled from has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

PACK = """
import json
import numpy as np
import torch
from daf_kernels import FixedPages, cpu, cpu_jobs

memory, pages = FixedPages(1, 128), np.arange(1)
cpu.CpuBackend(threads=1).encode_nonzero(torch.eye(16).view(-1), memory, pages)
print(json.dumps([memory.read(pages)[0].tolist(), cpu_jobs.compiled(cpu_jobs.encode_nonzero).cache_hits]))
"""


def _pack(folder: Path) -> tuple[list[int], int]:
    """Returns the bytes that the kernels in a folder pack, and how many of them were found on disk."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", PACK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    packed, hits = json.loads(done.stdout)
    return packed, hits


def test_kernels_are_compiled_again_when_a_file_has_changed_that_they_call(tmp_path: Path) -> None:
    """As a pull changes it: two calls away from what is loaded, in another file each time."""
    shutil.copytree(KERNELS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    packed, hits = _pack(tmp_path)
    assert hits == 0
    assert _pack(tmp_path) == (packed, 1)
    changed = tmp_path / "daf_kernels" / "cpu_bits.py"
    changed.write_text(changed.read_text().replace("& U8(1)) << U8(row)", "& U8(1)) << U8(7 - row)"))
    flipped = [int(f"{byte:08b}"[::-1], 2) for byte in packed]
    assert flipped != packed
    assert _pack(tmp_path) == (flipped, 0)
