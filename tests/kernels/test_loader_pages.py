"""A process that has loaded kernels gives back the pages of the compiler, and can compile again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from daf_kernels.cpu import loader_pages

MAPPINGS = """7f0000000000-7f0000100000 r-xp 00000000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Rss:                 900 kB
Private_Dirty:         0 kB
7f0000200000-7f0000300000 r--p 00100000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Private_Dirty:         8 kB
7f0000300000-7f0000400000 rw-p 00200000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Private_Dirty:         0 kB
7f0000400000-7f0000500000 r-xp 00000000 08:01 12 /site-packages/torch/lib/libtorch_cpu.so
Private_Dirty:         0 kB
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
Private_Dirty:         0 kB
"""
COMPILE_AFTERWARDS = """
import json, psutil
from numba import njit
njit(lambda x: x + 1)(1)
from daf_kernels.cpu.loader_pages import give_back_compiler
before = psutil.Process().memory_info().rss
given = give_back_compiler()
after = psutil.Process().memory_info().rss
print(json.dumps([given, before - after, njit(lambda x: x * 3)(2)]))
"""


def test_only_what_equals_the_file_is_given_back() -> None:
    assert loader_pages._unchanged_mappings(MAPPINGS) == [(0x7F0000000000, 0x7F0000100000)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which pages were written to")
def test_the_compiler_works_on_after_its_pages_were_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILE_AFTERWARDS], capture_output=True, text=True, check=True)
    given, freed, computed = json.loads(done.stdout)
    assert given > freed > 20_000_000
    assert computed == 6
