"""The pool of threads covers every element once, fails loudly and survives a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf_kernels.workers import WorkerPool

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
POOL = WorkerPool(3)


def both(first: int, stop: int) -> tuple[int, int]:
    return first, stop


@given(
    elements=st.integers(1, 1 << 36),
    tile=st.integers(1, 1 << 17),
    least=st.integers(1, 1 << 20),
    threads=st.integers(1, 3),
)
def test_ranges_cover_everything_once(elements: int, tile: int, least: int, threads: int) -> None:
    """Ranges join up, begin at multiples of the tile, hold `least` but for the last, and are as many as threads."""
    POOL.threads = threads
    ranges = POOL.run(both, elements, tile, least)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == elements
    assert all(stop == first for (_, stop), (first, _) in pairwise(ranges))
    assert all(first < stop for first, stop in ranges)
    assert all(first % tile == 0 for first, _ in ranges)
    assert all(stop - first >= least for first, stop in ranges[:-1])
    assert len(ranges) <= threads


def test_large_work_is_split_over_all_threads() -> None:
    """Each thread waits for the others, so that work which is not done at the same time does not end."""
    barrier = threading.Barrier(3, timeout=30)
    names = WorkerPool(3).run(lambda *_: barrier.wait() >= 0 and threading.get_ident(), 3000, 1, 1000)
    assert len(set(names)) == 3
    assert names[0] == threading.get_ident()


@pytest.mark.parametrize("threads", [1, 2])
def test_small_work_stays_on_the_calling_thread(threads: int) -> None:
    """Where there is only work for one, no thread is started."""
    pool = WorkerPool(threads)
    before = threading.active_count()
    assert pool.run(lambda *_: threading.get_ident(), 1999, 1, 1000) == [threading.get_ident()]
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, -1])
def test_there_is_at_least_one_thread(threads: int) -> None:
    assert WorkerPool(threads).threads == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_of_any_range_reaches_the_caller(failing: int) -> None:
    def work(first: int, stop: int) -> int:
        if first == failing * 100:
            raise ArithmeticError(f"range {failing}")
        return stop

    pool = WorkerPool(3)
    with pytest.raises(ArithmeticError, match=f"range {failing}"):
        pool.run(work, 300, 100, 100)
    assert pool.run(both, 300, 100, 100) == [(0, 100), (100, 200), (200, 300)]


@pytest.mark.parametrize("failing", [0, 1])
def test_no_range_is_at_work_after_an_exception(failing: int) -> None:
    """Kernels hold addresses, not tensors: one that went on after an interrupt would write into freed memory."""
    started, ended = threading.Barrier(3, timeout=30), []

    def work(first: int, _: int) -> None:
        started.wait()
        if first == failing * 100:
            raise KeyboardInterrupt
        time.sleep(0.1 + first / 1000)
        ended.append(first)

    with pytest.raises(KeyboardInterrupt):
        WorkerPool(3).run(work, 300, 100, 100)
    assert sorted(ended) == [first for first in (0, 100, 200) if first != failing * 100]


FORK = """
import os
import torch
from daf_kernels import PlaneLayout, FixedPages
from daf_kernels import cpu
import numpy as np

cpu.SPLIT = 512
backend, values, layout = cpu.CpuBackend(threads=3), torch.randn(20000), PlaneLayout(20000, 200, 512)
memory, pages = FixedPages(layout.pages(4), 512), np.arange(layout.pages(4))

def decoded():
    out = torch.empty(20000)
    assert backend.encode(values, layout, 4, memory, pages, None)
    backend.decode(out, layout, 4, memory, pages)
    return out

before = decoded()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(decoded(), before) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(decoded(), before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_threads_start_again_after_a_fork() -> None:
    """A data loader's worker has none of its parent's threads: work given to those would never end."""
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
