"""Reading back from the spill file ahead of backward: it helps or does nothing, but never disturbs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from daf_core.errors import SpillError
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.read_ahead import ReadAhead
from daf_core.memory.tiers.disk import SpillFile
from tests.core.books import check_pager
from tests.core.harness import assert_empty, assert_same, backward, engine_for, make_model

CPU = torch.device("cpu")
PAGE = 256


class Chain:
    """Something to read ahead: numbers that count down to `last`, each read when `gate` lets it."""

    def __init__(self, last: int = 0) -> None:
        self.last, self.seen, self.gate, self.began = last, list[int](), threading.Semaphore(0), threading.Event()

    def load_next(self, serial: int) -> int | None:
        self.began.set()
        assert self.gate.acquire(timeout=60)
        self.seen.append(serial)
        return serial - 1 if serial > self.last else None


def test_read_ahead_goes_on_until_there_is_nothing_left() -> None:
    """Each read begins before what the last one returned; a second start meanwhile changes nothing."""
    chain = Chain()
    ahead = ReadAhead(chain.load_next)
    ahead.start(5)
    ahead.start(9)
    chain.gate.release(100)
    assert ahead._running is not None
    ahead._running.result()
    assert chain.seen == [5, 4, 3, 2, 1, 0]
    ahead.start(2)
    ahead._running.result()
    assert chain.seen[6:] == [2, 1, 0]


def test_read_ahead_uses_the_stream_of_whoever_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU pages are written after what still reads them, and read after they are written."""
    streams = {threading.get_ident(): "the stream of backward"}

    @contextmanager
    def enter(stream: str) -> Generator[None]:
        streams[threading.get_ident()] = stream
        yield
        del streams[threading.get_ident()]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[threading.get_ident()])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    used = []

    class Loads:
        def load_next(self, serial: int) -> None:
            used.append((threading.current_thread().name, streams[threading.get_ident()]))

    loads = Loads()
    ahead = ReadAhead(loads.load_next, device=torch.device("cuda", 0))
    ahead.start(1)
    ahead.stop()
    assert used == [("daf-read-ahead_0", "the stream of backward")]
    assert len(streams) == 1


def test_read_ahead_stops_after_the_read_in_progress() -> None:
    """`stop` returns when the thread is idle, and can be called at any time."""
    chain = Chain()
    ahead = ReadAhead(chain.load_next)
    ahead.stop()
    ahead.start(5)
    assert chain.began.wait(60)
    threading.Timer(0.05, chain.gate.release).start()
    ahead.stop()
    assert chain.seen == [5]
    ahead.stop()
    chain.gate.release(100)
    ahead.start(1)
    assert ahead._running is not None
    ahead._running.result()
    assert chain.seen == [5, 1, 0]


class Broken:
    """Something to read ahead that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error, self.seen = error, list[int]()

    def load_next(self, serial: int) -> int | None:
        self.seen.append(serial)
        raise self.error


@pytest.mark.parametrize("error", [SpillError("broken"), MemoryError(), RuntimeError("no pinned memory")], ids=repr)
def test_read_ahead_leaves_its_errors_to_whoever_needs_the_bytes(error: Exception) -> None:
    """They are not raised in the middle of something else, and end what is read ahead until the next start."""
    broken = Broken(error)
    ahead = ReadAhead(broken.load_next)
    for serial in (5, 4):
        ahead.start(serial)
        assert ahead._running is not None
        ahead._running.result()
        ahead.stop()
    assert broken.seen == [5, 4]


def test_read_ahead_keeps_nobody_alive() -> None:
    """Once its object is gone there is nothing left to read."""
    chain = Chain()
    ahead, alive = ReadAhead(chain.load_next), weakref.ref(chain)
    chain.gate.release(100)
    ahead.start(5)
    assert ahead._running is not None
    ahead._running.result()
    del chain
    assert alive() is None
    ahead.start(5)
    ahead._running.result()


def test_read_that_needs_the_room_of_one_ahead_of_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read ahead can be given up as soon as it is there: no reason for an error."""
    pager = Pager(PagePool(CPU, page_bytes=PAGE), 3 * PAGE, 0, SpillFile(tmp_path, PAGE))
    needed, other, trigger, last = (_lease(pager, pages) for pages in (2, 2, 1, 3))
    pager.release(last)
    read, busy, go_on = SpillFile.read, threading.Event(), threading.Event()

    def slow_thread(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            busy.set()
            go_on.wait(0.2)  # nobody sets it: the disk is slow
        read(*args)

    monkeypatch.setattr(SpillFile, "read", slow_thread)
    with pager.reading(trigger):
        pass
    assert busy.wait(60)
    with pager.reading(needed):
        check_pager(pager)
    pager._read_ahead.stop()
    for lease in (needed, other, trigger):
        pager.release(lease)
    assert (pager.leased_pages, pager.settle()) == (0, 0)


def _lease(pager: Pager, pages: int) -> Any:
    with pager.writing(pages) as lease:
        pass
    return lease


@pytest.mark.parametrize("precision", ["exact", 8, 4])
@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_slow_disk_changes_nothing(name: str, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far reading ahead has come when something is needed, it is there and the same."""
    model, loss_of = make_model(name)
    reference = engine_for(model, precision)
    expected = backward(model, loss_of, reference)
    budget = reference.finish_step().held_bytes // 2
    read = SpillFile.read

    def slow_thread(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(0.003)
        read(*args)

    monkeypatch.setattr(SpillFile, "read", slow_thread)
    engine = engine_for(model, precision, memory_budget=budget, spill_dir=tmp_path)
    for _ in range(2):
        assert_same(backward(model, loss_of, engine), expected)
        assert engine.finish_step().spilled_bytes > 0
        assert_empty(engine)
