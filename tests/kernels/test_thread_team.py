"""Kernels on torch's own threads: every element once, scratch memory for each, one thread where there is no team."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cfunc

from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu import thread_team
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.cpu.bits import I64, i64_at, u8_at
from daf_kernels.cpu.thread_team import JOB, WORDS, WORDS_BYTES, Team, add_result, launch, own_scratch, parts, take
from tests.kernels.hard_inputs import normal
from tests.kernels.harness import CPU, encode

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
NO_PAGES = np.zeros(0, np.int64)
NEEDS_A_TEAM = pytest.mark.skipif(not thread_team.parallel_function(), reason="this torch's OpenMP cannot be called")


@cfunc(JOB)
def _count(words):
    """Adds 1 to a byte for each element, and returns how many elements there were."""
    counts = u8_at(words[WORDS])
    for first, stop in parts(words):
        for element in range(first, stop):
            counts[element] += 1
        add_result(words, stop - first)


@cfunc(JOB)
def _meet(words):
    """Waits for the other threads, and leaves the address of its scratch memory where it is the n-th to come."""
    scratch = own_scratch(words)
    place = take(words[WORDS], I64(1))
    i64_at(words[WORDS])[1 + place] = scratch
    for _ in range(1 << 32):
        if take(words[WORDS], I64(0)) == words[WORDS + 1]:
            add_result(words, 1)
            return


def _run(
    job: int, own: tuple[int, ...], span: tuple[int, int], step: int, stride: int, threads: int,
    memory: npt.NDArray[np.uint8] | None = None,
) -> int:  # fmt: skip
    words = np.array((*(0,) * WORDS, *own), np.int64)
    scratch = np.zeros(WORDS_BYTES, np.uint8) if memory is None else memory
    parallel, given = thread_team.parallel_function(), (words.ctypes.data, words.size)
    return launch(parallel, job, threads, *given, own[0], 0, *span, step, scratch.ctypes.data, stride, NO_PAGES)


@settings(deadline=None)
@given(first=st.integers(0, 99), elements=st.integers(1, 5000), step=st.integers(1, 700), threads=st.integers(1, 3))
def test_every_element_is_taken_once(first: int, elements: int, step: int, threads: int) -> None:
    """Whichever thread takes it, and none outside of the span."""
    counts = np.zeros(6000, np.uint8)
    found = _run(_count.address, (counts.ctypes.data, 0, 0), (first, first + elements), step, 0, threads)
    assert found == elements
    assert (counts[first : first + elements] == 1).all()
    assert counts.sum() == elements


@NEEDS_A_TEAM
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_run_at_the_same_time_with_scratch_of_their_own(threads: int) -> None:
    """Each waits for all others, so that a job on fewer threads would not end."""
    arrived = np.zeros(1 + threads, np.int64)
    words, memory = (arrived.ctypes.data, threads, 0), np.zeros(WORDS_BYTES, np.uint8)
    assert _run(_meet.address, words, (0, 1), 1, 64, threads, memory) == threads
    first = memory.ctypes.data + WORDS_BYTES
    assert sorted(arrived[1:]) == [first + 64 * thread for thread in range(threads)]


@NEEDS_A_TEAM
def test_as_many_threads_as_torch_has() -> None:
    """At each call, as the number may change."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert Team().threads == threads
            assert Team(5).threads == 5
    finally:
        torch.set_num_threads(before)


def test_one_thread_without_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch is built with another runtime than OpenMP's."""
    monkeypatch.setattr(thread_team, "parallel_function", lambda: 0)
    monkeypatch.setattr(cpu, "SPLIT", 512)
    values = normal(20, 1000)
    assert Team(3).threads == 1
    assert torch.equal(encode(CpuBackend(3), values, 3)[0].content, encode(CPU, values, 3)[0].content)


def test_several_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that calls has a team and scratch memory of its own, as several backward passes do."""
    monkeypatch.setattr(cpu, "SPLIT", 512)
    inputs = [normal(20, 1000, seed=seed) for seed in range(8)]
    backend = CpuBackend(2)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda values: encode(backend, values, 3)[0].content, inputs))
    for content, values in zip(found, inputs, strict=True):
        assert torch.equal(content, encode(CPU, values, 3)[0].content)


FORK = """
import os
import torch
from daf_kernels import PlaneLayout, FixedPages
from daf_kernels.cpu import backend as cpu
import numpy as np

cpu.SPLIT = 512
backend, values, layout = cpu.CpuBackend(threads=3), torch.randn(20000), PlaneLayout(20000, 200, 512)
memory, pages = FixedPages(layout.pages(4), 512), np.arange(layout.pages(4))

def decoded(backend):
    out = torch.empty(20000)
    assert backend.encode(values, layout, 4, memory, pages, None)
    backend.decode(out, layout, 4, memory, pages)
    return out

before = decoded(backend)
child = os.fork()
if not child:
    own = cpu.CpuBackend(threads=3)
    os._exit(0 if torch.equal(decoded(backend), before) and torch.equal(decoded(own), before) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(decoded(backend), before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_works_alone() -> None:
    """A data loader's worker has none of its parent's threads: work given to those would never end."""
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
