"""The pager among threads: what is read ahead, what many threads do at once, and what the garbage collector frees."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from daf_core import ActivationBudgetError
from daf_core.codecs.base import PagedActivation
from daf_core.errors import SpillError
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager, PagerAccount
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.read_ahead import ReadAhead
from daf_core.memory.tiers.disk import SpillFile
from daf_kernels import PageMemory, Pages
from tests.core.books import check_index, check_pager, check_pool, let_go, used_slots
from tests.core.harness import wait_for_read_ahead as wait
from tests.core.leases import PAGE, content, write

SECONDS = 1.0
"""How long the threads of one test work; 30 for a thorough look."""


class GatedSpill(SpillFile):
    """A spill file whose reads on the read-ahead thread wait for a gate, or fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PAGE)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.reads: list[Pages] = []

    @override
    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        if threading.current_thread().name.startswith("daf-read-ahead"):
            self.reached.set()
            assert self.gate.wait(30)
            if self.error is not None:
                raise self.error
        self.reads.append(slots)
        super().read(slots, memory, pages)


def make_pager(budget: int | None, spill: SpillFile | None = None) -> Pager:
    """A pager with a budget in pages."""
    pool = PagePool(torch.device("cpu"), 4 * PAGE, PAGE)
    return Pager(pool, None if budget is None else budget * PAGE, 0, spill)


def read(pager: Pager, lease: Lease) -> None:
    with pager.reading(lease):
        assert torch.equal(pager.pool.read(lease.pages), content(lease))


def assert_nothing_is_left(pager: Pager) -> None:
    assert (pager.settle(), pager.leased_pages) == (0, 0)
    assert pager._spill is None or used_slots(pager._spill) == 0
    check_pager(pager)


def spilled_pager(spill: SpillFile, room: int) -> tuple[Pager, list[Lease]]:
    """Five activations of two pages, all in the file, with room for some pages in memory."""
    pager = make_pager(12, spill)
    leases = [write(pager, 2) for _ in range(5)]
    pager.hold(12 * PAGE)
    assert not any(lease.resident for lease in leases)
    let_go(pager, room * PAGE)
    return pager, leases


@pytest.mark.parametrize("room", [2, 3, 4, 7, 8, 12])
def test_reading_ahead_fills_the_budget(room: int, tmp_path: Path) -> None:
    """After one activation, those that backward needs next come back, as many as fit and no more."""
    pager, leases = spilled_pager(SpillFile(tmp_path, PAGE), room)
    read(pager, leases[-1])
    wait(pager)
    assert [lease.resident for lease in reversed(leases)] == [number < room // 2 for number in range(5)]
    check_pager(pager)
    for lease in reversed(leases):
        read(pager, lease)
        pager.release(lease)
    wait(pager)
    let_go(pager, (12 - room) * PAGE)
    assert_nothing_is_left(pager)


def test_release_of_what_is_being_read_ahead(tmp_path: Path) -> None:
    """The read in progress frees the pages and the place in the file."""
    pager, leases = spilled_pager(spill := GatedSpill(tmp_path), 4)
    read(pager, leases[-1])
    assert spill.reached.wait(30)
    for lease in leases:
        pager.release(lease)
    assert pager.settle() == (8 + 2) * PAGE
    spill.gate.set()
    wait(pager)
    let_go(pager, 8 * PAGE)
    assert_nothing_is_left(pager)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        SpillError("broken"),
        MemoryError(),
    ],
)
def test_failed_read_ahead_is_left_to_the_reader(error: Exception, release: bool, tmp_path: Path) -> None:
    """Whoever needs the activation reads it again; until then its pages are not held."""
    pager, leases = spilled_pager(spill := GatedSpill(tmp_path), 6)
    spill.error = error
    read(pager, leases[-1])
    assert spill.reached.wait(30)
    if release:
        pager.release(leases[-2])
        pager.settle()
    spill.gate.set()
    wait(pager)
    assert pager.settle() == (6 + 2) * PAGE
    check_pager(pager)
    spill.error = None
    for lease in leases[:3] if release else leases:
        read(pager, lease)
    wait(pager)
    assert used_slots(spill) == (8 if release else 10)


def test_failed_read_is_counted_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets the error, nothing stays held, and the activation can be read once the file answers."""
    pager, leases = spilled_pager(spill := SpillFile(tmp_path, PAGE), 4)
    with monkeypatch.context() as patch:
        patch.setattr(spill, "read", _broken)
        for _ in range(3):
            with pytest.raises(SpillError):
                read(pager, leases[2])
    assert (pager.settle(), pager.leased_pages) == (8 * PAGE, 0)
    check_pager(pager)
    read(pager, leases[2])


def _broken(*_: object) -> None:
    raise SpillError("broken")


def test_two_readers_of_one_activation(tmp_path: Path) -> None:
    """The second waits for the read of the first instead of reading again."""
    pager, leases = spilled_pager(spill := GatedSpill(tmp_path), 4)
    read(pager, leases[-1])
    assert spill.reached.wait(30)
    readers = [threading.Thread(target=read, args=(pager, leases[-2])) for _ in range(2)]
    spill.reads.clear()
    for reader in readers:
        reader.start()
    spill.gate.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    wait(pager)
    assert len(spill.reads) == 1
    check_pager(pager)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "backward", "hold"]), st.integers(1, 4), st.integers(0, 5)),
    min_size=5,
    max_size=40,
)


class SlowSpill(SpillFile):
    """A spill file that is still reading when the next action begins."""

    @override
    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        time.sleep(0.0003)
        super().read(slots, memory, pages)


@contextmanager
def no_read_ahead() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadAhead, "start", lambda self, serial: None)
        yield


def history(pager: Pager, steps: list[Step], waiting: bool) -> list[object]:
    """Forward and backward parts in any order: the planes of all activations and what was given up, step by step."""
    live: list[Lease] = []
    seen: list[object] = []
    for action, size, importance in steps:
        if action == "write":
            live.append(write(pager, size, [1, size], [importance + 1.0, importance]))
        elif action == "hold":
            pager.hold(8 * size * PAGE)
            let_go(pager, 8 * size * PAGE)
        for lease in reversed(live[len(live) - size :] if action == "backward" else []):
            read(pager, lease)
            pager.release(live.pop())
        if waiting:
            wait(pager)
        account = pager.finish_step()
        assert account.peak_bytes <= (pager.budget or 0)
        given_up = account.dropped_planes, account.dropped_bytes, account.spilled_bytes
        seen.append((given_up, [(lease.planes, lease.slots is None) for lease in live]))
    wait(pager)
    check_pager(pager)
    return seen


@given(steps=STEPS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_drops_whatever_is_read_ahead(steps: list[Step], tmp_path: Path) -> None:
    """However far the reads ahead come, the same bits are given up, and the same activations moved."""
    with no_read_ahead():
        expected = history(make_pager(40, SpillFile(tmp_path, PAGE)), steps, False)
    assert history(make_pager(40, SpillFile(tmp_path, PAGE)), steps, True) == expected
    assert history(make_pager(40, SlowSpill(tmp_path, PAGE)), steps, False) == expected


def test_reading_out_of_order_waits_for_what_is_read_ahead(tmp_path: Path) -> None:
    """An activation that fits alone can be read although another one is on its way."""
    pager, leases = spilled_pager(spill := GatedSpill(tmp_path), 2)
    read(pager, leases[-1])
    wait(pager)
    pager.release(leases[-1])
    pager.settle()
    pager._read_ahead.start(leases[-1].serial)
    assert spill.reached.wait(30)
    opener = threading.Timer(0.05, spill.gate.set)
    opener.start()
    try:
        read(pager, leases[0])
    finally:
        opener.join()
        wait(pager)


def test_what_cannot_fit_beside_a_reader_drops_nothing() -> None:
    """Pages that another thread reads cannot be given up: the error comes before other planes are."""
    pager = make_pager(6)
    used, other = write(pager, 1, [2], [0.0]), write(pager, 1, [2], [9.0])
    with pager.reading(used):
        with pytest.raises(ActivationBudgetError):
            pager.hold(4 * PAGE)
        assert (used.planes, other.planes) == (1, 1)


class Crew:
    """Threads that write, read and release activations, their own and those of others, at random."""

    def __init__(self, pager: Pager, most: int, spills: bool) -> None:
        self.pager, self.most, self.spills = pager, most, spills
        self.live: list[Lease] = []
        self.accounts: list[PagerAccount] = []
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    def run(self, threads: int, seconds: float) -> None:
        """Lets the threads work; they must end in time."""
        end = time.monotonic() + seconds
        crew = [threading.Thread(target=self.work, args=(seed, end), daemon=True) for seed in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(seconds + 30)
        assert not any(thread.is_alive() for thread in crew), "a thread waits for ever"
        if self.errors:
            raise self.errors[0]

    def work(self, seed: int, end: float) -> None:
        numbers = random.Random(seed)
        try:
            while time.monotonic() < end and not self.errors:
                self.turn(numbers)
        except BaseException as error:
            self.errors.append(error)

    def turn(self, numbers: random.Random) -> None:
        with self.lock:
            lease = self.live.pop(numbers.randrange(len(self.live))) if len(self.live) >= self.most else None
        if lease is None:
            planes = [numbers.randint(1, 2) for _ in range(numbers.randint(0, 3))]
            lease = write(self.pager, numbers.randint(1, 2), planes, [numbers.random() for _ in planes])
        planes_before = lease.planes
        for _ in range(numbers.randint(0, 2)):
            read(self.pager, lease)
        assert lease.planes <= planes_before
        if numbers.random() < 0.2:
            self.pager.hold(100)
            let_go(self.pager, 100)
        if numbers.random() < 0.05:
            self.accounts.append(self.pager.finish_step())
        if numbers.random() < 0.05:
            self.check()
        if numbers.random() < 0.5:
            self.pager.release(lease)
            return
        with self.lock:
            self.live.append(lease)

    def check(self) -> None:
        """Compares bytes, pages and leases, or only pages and leases where others may be reading back."""
        if not self.spills:
            check_pager(self.pager)
        check_pool(self.pager.pool)
        with self.pager._lock:
            check_index(self.pager._index)


@pytest.mark.parametrize(("threads", "spills"), [(2, True), (4, True), (2, False)])
def test_many_threads(threads: int, spills: bool, tmp_path: Path) -> None:
    """No page is lost or given back twice, nobody waits for ever, and every reader finds what was written."""
    largest, most = 8, 24
    budget = (threads + 2) * largest + (0 if spills else 2 * most)
    pager = make_pager(budget, SpillFile(tmp_path, PAGE) if spills else None)
    crew = Crew(pager, most, spills)
    crew.run(threads, SECONDS)
    wait(pager)
    check_pager(pager)
    for lease in crew.live:
        read(pager, lease)
        pager.release(lease)
    wait(pager)
    assert_nothing_is_left(pager)
    accounts = [*crew.accounts, pager.finish_step()]
    assert max(account.peak_bytes for account in accounts) <= budget * PAGE
    assert sum(account.dropped_planes for account in accounts)
    assert spills == any(account.spilled_bytes for account in accounts)


@pytest.mark.parametrize("spills", [False, True])
def test_release_from_another_thread(spills: bool, tmp_path: Path) -> None:
    """Autograd frees nodes wherever they die."""
    pager = make_pager(4, SpillFile(tmp_path, PAGE) if spills else None)
    lease = write(pager, 4)
    pages = lease.pages.tolist()
    thread = threading.Thread(target=pager.release, args=(lease,))
    thread.start()
    thread.join(30)
    assert write(pager, 4).pages.tolist() == pages


class _Cycle:
    """Garbage that only the collector finds, and that owns pages."""

    def __init__(self, pager: Pager) -> None:
        self.me = self
        self.activation = _Pages(pager)
        with self.activation._new_pages(2):
            pass


class _Pages(PagedActivation):
    codec = "test"

    @override
    def _decode(self, out: torch.Tensor, lease: Lease) -> None:
        raise NotImplementedError  # abstract in the base; the test only releases what it wrote


def test_release_inside_a_garbage_collection_takes_no_lock(tmp_path: Path) -> None:
    """The collector may run while any lock is held: giving pages back must neither wait nor be lost."""
    pager = make_pager(None, spill := SpillFile(tmp_path, PAGE))
    _Cycle(pager)
    with pager._lock, pager.pool._lock, spill._lock, pager._read_ahead._lock:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert_nothing_is_left(pager)
