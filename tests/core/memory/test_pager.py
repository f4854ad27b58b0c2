"""The pager: the least important bits go first, nothing is lost unseen, and the budget holds after every action."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from hypothesis.strategies import SearchStrategy
from typing_extensions import override

from daf_core import ActivationBudgetError
from daf_core.errors import SpillError
from daf_core.memory import idle_leases
from daf_core.memory.lease import Lease, plan_drops
from daf_core.memory.pager import Pager
from daf_core.memory.pages import pool as pool_module
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_core.memory.tiers.base import Tier
from daf_core.memory.tiers.disk import SpillFile
from daf_kernels import PageAddresses, Pages, TwoValues
from tests.core.books import check_pager, let_go, used_slots
from tests.core.harness import wait_for_read_ahead as wait
from tests.core.late_copies import copies_of, host_memory
from tests.core.leases import PAGE, content, write


def make_pager(
    budget: int | None, least_planes: int = 0, folder: Path | None = None, tier: Tier | None = None
) -> Pager:
    """A pager with a budget in pages."""
    pool = PagePool(torch.device("cpu"), 4 * PAGE, PAGE)
    spill = tier if folder is None else SpillFile(folder, PAGE)
    return Pager(pool, None if budget is None else budget * PAGE, least_planes, spill)


def intact(pager: Pager, lease: Lease) -> bool:
    return torch.equal(pager.pool.read(lease.pages), content(lease))


@dataclass
class Row:
    """One activation in the model; `out` once it lies in the next tier, where it no longer needs memory."""

    serial: int
    ends: list[int]
    planes: int
    drops: list[tuple[float, int]]
    out: bool = False

    @property
    def size(self) -> int:
        return self.ends[self.planes] * PAGE

    @property
    def least(self) -> int:
        return self.ends[self.drops[0][1]] * PAGE if self.drops and not self.out else self.size


class Model:
    """What the pager must do, by searching a list for each portion that is given up."""

    def __init__(self, budget: int | None, least_planes: int, spills: bool, queued: bool) -> None:
        self.budget, self.least_planes, self.spills, self.queued = budget, least_planes, spills, queued
        self.rows: list[Row] = []
        self.outside = 0
        self.dropped_planes = self.dropped_bytes = self.spilled_bytes = 0

    def row(self, serial: int, fixed: int, planes: list[int], importances: list[float]) -> Row:
        ends = [fixed + sum(planes[:count]) for count in range(len(planes) + 1)]
        return Row(serial, ends, len(planes), plan_drops(planes, importances, self.least_planes))

    @property
    def held(self) -> int:
        return self.outside + sum(row.size for row in self.rows if not row.out)

    def missing(self, extra: int, budget: int | None, incoming: Row | None = None, drop: bool = True) -> int:
        """Makes room and returns 0, or changes nothing and returns the bytes that are missing even so."""
        before = self.__dict__.copy()
        self.rows = [replace(row, drops=list(row.drops)) for row in self.rows] + ([incoming] if incoming else [])
        while budget is not None and (excess := self.held + extra - budget) > 0:
            here = [row for row in self.rows if not row.out]
            ranked = sorted((row.drops[-1][0], row.serial, row.drops[-1][1]) for row in here if drop and row.drops)
            movable = [row for row in here if self.spills and row is not incoming]
            if ranked:
                self._drop(next(row for row in here if row.serial == ranked[0][1]), ranked[0][2])
            elif movable:
                self._move(movable[0])
            else:
                self.__dict__.update(before)
                return excess
        return 0

    def copy_ahead(self, size: int) -> None:
        """What another activation of this size would push out is copied already, where copies take no time."""
        while self.queued and self.budget is not None:
            here = [row for row in self.rows if not row.out]
            if not here or here[0].drops or self.held + size - sum(row.size - row.least for row in here) <= self.budget:
                return
            self._move(here[0])

    def _move(self, row: Row) -> None:
        row.out = True
        self.spilled_bytes += row.size

    def unreadable(self, budget: int | None) -> int:
        """Returns the bytes by which the largest row is too large ever to be read back."""
        if budget is None or not self.spills:
            return 0
        return max(max((row.least for row in self.rows), default=0) - budget, 0)

    def _drop(self, row: Row, left: int) -> None:
        size, planes = row.size, row.planes
        row.planes = left
        row.drops.pop()
        self.dropped_planes += planes - left
        self.dropped_bytes += size - row.size


def planes_and_importances() -> SearchStrategy[tuple[list[int], list[float]]]:
    """Up to four planes; few different importances, so that there are ties, and some in the wrong order."""
    importance = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0, math.inf])
    pairs = st.lists(st.tuples(st.integers(1, 3), importance), max_size=4)
    return pairs.map(lambda pairs: ([pages for pages, _ in pairs], [importance for _, importance in pairs]))


class PagerMachine(RuleBasedStateMachine):
    """Random actions against the model, with the contents of all pages."""

    folder: Path
    leases = Bundle("leases")
    holds = Bundle("holds")

    @initialize(
        budget=st.none() | st.integers(10, 60),
        least_planes=st.integers(0, 2),
        tier=st.sampled_from([None, "file", "late copies"]),
    )
    def start(self, budget: int | None, least_planes: int, tier: str | None) -> None:
        queued = tier == "late copies"
        folder = self.folder if tier == "file" else None
        self.pager = make_pager(budget, least_planes, folder, host_memory(PAGE, 8) if queued else None)
        self.model = Model(self.pager.budget, least_planes, tier is not None, queued)
        self.live: dict[int, Lease] = {}
        self.serial = 0

    def attempt(self, missing: int, budget: int | None, action: Callable[[], object]) -> bool:
        """Does what must succeed, or fail, as the model says."""
        if not missing:
            action()
            return True
        with pytest.raises(ActivationBudgetError) as raised:
            action()
        assert budget is not None
        assert (raised.value.needed, raised.value.allowed) == (budget + missing, budget)
        return False

    @rule(target=leases, fixed=st.integers(1, 3), planes=planes_and_importances())
    def write(self, fixed: int, planes: tuple[list[int], list[float]]) -> object:
        row = self.model.row(self.serial, fixed, *planes)
        missing = self.model.missing(0, self.model.budget, row)
        serial, self.serial = self.serial, self.serial + 1
        done: list[Lease] = []
        if not self.attempt(missing, self.model.budget, lambda: done.append(write(self.pager, fixed, *planes))):
            return multiple()
        assert done[0].serial == serial
        self.model.copy_ahead(row.size)
        self.live[serial] = done[0]
        return serial

    @rule(serial=leases)
    def read(self, serial: int) -> None:
        wait(self.pager)  # the model does not know of pages on their way
        lease, row = self.live[serial], next(row for row in self.model.rows if row.serial == serial)
        missing = self.model.missing(row.size, self.model.budget, drop=False) if row.out else 0
        self.attempt(missing, self.model.budget, lambda: self.read_pages(lease))

    def read_pages(self, lease: Lease) -> None:
        with self.pager.reading(lease):
            assert intact(self.pager, lease)

    @rule(serial=consumes(leases))
    def release(self, serial: int) -> None:
        self.pager.release(self.live.pop(serial))
        self.model.rows = [row for row in self.model.rows if row.serial != serial]

    @rule(target=holds, size=st.integers(0, 12 * PAGE))
    def hold(self, size: int) -> object:
        missing = self.model.missing(size, self.model.budget)
        if not self.attempt(missing, self.model.budget, lambda: self.pager.hold(size)):
            return multiple()
        self.model.outside += size
        return size

    @rule(size=consumes(holds))
    def let_go(self, size: int) -> None:
        let_go(self.pager, size)
        self.model.outside -= size

    @rule(budget=st.none() | st.integers(0, 60 * PAGE))
    def set_budget(self, budget: int | None) -> None:
        missing = self.model.unreadable(budget) or self.model.missing(0, budget)
        if self.attempt(missing, budget, lambda: self.pager.set_budget(budget)):
            self.model.budget = budget
        assert self.pager.budget == self.model.budget

    @rule()
    def finish_step(self) -> None:
        account, model = self.pager.finish_step(), self.model
        assert account.dropped_planes == model.dropped_planes
        assert (account.dropped_bytes, account.spilled_bytes) == (model.dropped_bytes, model.spilled_bytes)
        assert model.held <= account.peak_bytes
        model.dropped_planes = model.dropped_bytes = model.spilled_bytes = 0

    @invariant()
    def the_books_agree(self) -> None:
        wait(self.pager)
        check_pager(self.pager)
        memory = sum(lease.pages.size for lease in self.live.values())
        assert self.pager.settle() == self.model.outside + memory * PAGE
        assert self.pager.leased_pages == memory
        assert self.model.spills or self.pager.held_bytes == self.model.held
        assert self.model.budget is None or self.pager.held_bytes <= self.model.budget

    @invariant()
    def every_lease_is_as_predicted(self) -> None:
        assert [(row.serial, row.planes, row.out) for row in self.model.rows] == [
            (serial, lease.planes, lease.slots is not None) for serial, lease in self.live.items()
        ]

    @invariant()
    def contents_are_untouched(self) -> None:
        for serial, lease in self.live.items():
            if lease.slots is None or not self.model.queued:  # otherwise to be waited for, which `read` does
                assert intact(self.pager, lease) if lease.resident else lease.slots is not None, serial

    @override
    def teardown(self) -> None:
        if hasattr(self, "pager"):
            wait(self.pager)
            let_go(self.pager, self.model.outside)
            self.model.outside = 0
            for serial in [*self.live]:
                self.read(serial)
                self.release(serial)
            assert_nothing_is_left(self.pager)


def assert_nothing_is_left(pager: Pager) -> None:
    assert (pager.settle(), pager.pool.used_pages) == (0, 0)
    assert pager._spill is None or used_slots(pager._spill) == 0
    check_pager(pager)


PagerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class TestPager(PagerMachine.TestCase):
    """Runs the machine with a folder to spill to."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        PagerMachine.folder = tmp_path


def test_memory_that_is_given_back_is_copied_first() -> None:
    """Copies ahead of what was released are late, and steps that need little let the pool and the tier shrink."""
    machine = PagerMachine()
    machine.start(None, 0, "late copies")
    machine.set_budget(2 * PAGE)
    machine.release(machine.write(2, ([], [])))
    for _ in range(20):
        machine.finish_step()
    machine.set_budget(PAGE)
    machine.write(1, ([], []))
    machine.teardown()


def test_ties_go_to_the_oldest() -> None:
    """Of equally important planes the first written goes first, the new activation's own last."""
    pager = make_pager(6)
    leases = [write(pager, 1, [1], [2.0]) for _ in range(3)]
    seen = []
    for _ in range(3):
        leases.append(write(pager, 1))
        seen.append([lease.planes for lease in leases[:3]])
    assert seen == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    pager.set_budget(8 * PAGE)
    leases.append(write(pager, 1, [1], [2.0]))
    pager.hold(PAGE)
    assert leases[-1].planes == 0


@pytest.mark.parametrize(("importance", "expected"), [(0.5, (2, 0)), (1.0, (1, 1)), (9.0, (1, 1))])
def test_the_new_activation_competes(importance: float, expected: tuple[int, int]) -> None:
    """It is written without the planes that are less important than those of all others."""
    pager = make_pager(4)
    old = write(pager, 1, [1, 1], [2.0, 1.0])
    new = write(pager, 1, [1], [importance])
    assert (old.planes, new.planes) == expected
    account = pager.finish_step()
    assert (account.dropped_planes, account.dropped_bytes, account.peak_bytes) == (1, PAGE, 4 * PAGE)


@pytest.mark.parametrize(
    "refused",
    [
        lambda pager: write(pager, 5, [1], [9.0]),
        lambda pager: pager.hold(4 * PAGE + 1),
        lambda pager: pager.set_budget(6 * PAGE - 1),
    ],
)
def test_what_cannot_fit_drops_nothing(refused: Callable[[Pager], object]) -> None:
    """The error comes first, says what was needed, and leaves every plane, byte and region as it was."""
    pager = make_pager(10, least_planes=1)
    lease = write(pager, 2, [2, 2], [0.5, 0.25])
    pager.hold(2 * PAGE)

    def state() -> tuple[object, ...]:
        memory = pager.pool.used_pages, pager.pool.reserved_bytes
        return *memory, pager.settle(), pager.budget, pager.account.peak_bytes, lease.planes, lease.pages.tolist()

    before = state()
    with pytest.raises(ActivationBudgetError, match="Raise memory_budget, or train on") as raised:
        refused(pager)
    assert raised.value.needed > raised.value.allowed
    assert state() == before
    pager.hold(4 * PAGE)
    assert lease.planes == 1


def test_released_pages_count_for_the_next_lease() -> None:
    """A budget of four pages serves any number of leases of four, one after the other, from one region."""
    pager = make_pager(4)
    for _ in range(10):
        pager.release(write(pager, 4))
    assert pager.settle() == 0
    assert pager.pool.reserved_bytes == 4 * PAGE


def test_failed_growth_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has no memory for a region, the ledger is as before, and a later lease works."""
    pager = make_pager(None)
    kept = write(pager, 3)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "FixedPages", _no_memory)
        with pytest.raises(MemoryError):
            write(pager, 50)
    assert (pager.settle(), pager.leased_pages, pager.account.peak_bytes) == (3 * PAGE, 3, 3 * PAGE)
    write(pager, 50)
    assert intact(pager, kept)
    check_pager(pager)


def _no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("spills", [False, True])
def test_exception_while_writing_gives_the_pages_back(error: type[BaseException], spills: bool, tmp_path: Path) -> None:
    """An activation that was not written leaves nothing behind."""
    pager = make_pager(8, folder=tmp_path if spills else None)
    with pytest.raises(error):
        _fail_while_writing(pager, error)
    assert_nothing_is_left(pager)


def _fail_while_writing(pager: Pager, error: type[BaseException]) -> None:
    with pager.writing(2, [4, 4], [2.0, 1.0]) as lease:
        assert (lease.planes, lease.pages.size) == (1, 6)
        raise error


@pytest.mark.parametrize("mode", ["writing", "reading"])
@pytest.mark.parametrize("spills", [False, True])
def test_pages_in_use_stay(mode: str, spills: bool, tmp_path: Path) -> None:
    """What is being written or read loses no plane and no page, however little it is worth, until that is over."""
    pager = make_pager(9, folder=tmp_path if spills else None)
    lease = write(pager, 1, [2], [0.0]) if mode == "reading" else None
    other = write(pager, 1, [2], [9.0])
    with pager.reading(lease) if lease else pager.writing(1, [2], [0.0]) as used:
        before = used.pages.tolist()
        pager.hold(5 * PAGE)
        assert (used.planes, used.pages.tolist(), other.planes) == (1, before, 0)
        if spills:
            pager.hold(PAGE)
            assert (used.pages.tolist(), other.resident) == (before, False)
    pager.hold(2 * PAGE)
    assert used.planes == 0
    check_pager(pager)


def test_oldest_activations_move_to_the_spill_file_first(tmp_path: Path) -> None:
    """Backward needs the first activations of forward last; whole ones move, only once nothing is left to drop."""
    pager = make_pager(12, folder=tmp_path)
    leases = [write(pager, 2, [1], [importance]) for importance in (3.0, 9.0, 1.0, 2.0)]
    seen = []
    for _ in range(9):
        pager.hold(PAGE)
        seen.append("".join("-" if not lease.resident else "dp"[lease.planes] for lease in leases))
    assert seen == ["ppdp", "ppdd", "dpdd", "dddd", "-ddd", "-ddd", "--dd", "--dd", "---d"]
    assert pager.finish_step().spilled_bytes == 6 * PAGE
    check_pager(pager)


def test_pages_that_are_in_the_file_too_go_first(tmp_path: Path) -> None:
    """Giving up a copy loses nothing: no plane is dropped and nothing is written for it."""
    pager = make_pager(10, folder=tmp_path)
    first, second = write(pager, 3), write(pager, 3)
    pager.hold(6 * PAGE)
    assert (first.resident, second.resident) == (False, True)
    let_go(pager, 6 * PAGE)
    with pager.reading(first):
        assert intact(pager, first)
    third = write(pager, 1, [3], [0.0])
    pager.finish_step()
    pager.hold(3 * PAGE)
    account = pager.finish_step()
    assert (account.spilled_bytes, account.dropped_planes) == (0, 0)
    assert (first.resident, second.resident, third.planes) == (False, True, 1)
    with pager.reading(first):
        assert intact(pager, first)


def test_pages_leave_room_for_what_is_set_aside() -> None:
    """The pool keeps pages that it had once, so they must not be taken in the meantime."""
    pool = PagePool(torch.device("cpu"))
    pager = Pager(pool, budget=10 * PAGE_BYTES)
    pager.set_aside = 4 * PAGE_BYTES
    with pager.writing(1, [3, 3, 3], [3.0, 2.0, 1.0]) as lease:
        assert lease.size == 4
    pager.hold(4 * PAGE_BYTES)
    assert pool.used_pages == 4
    with pager.writing(2):
        pass
    assert pager.held_bytes == 10 * PAGE_BYTES
    check_pager(pager)


class Owner:
    """Gets a lease."""

    lease: Lease


@pytest.mark.parametrize("answer", [0, -1], ids=["taken", "declined"])
def test_a_kind_that_is_forgotten_meanwhile_keeps_no_pages(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have the pager forget a kind just before a lease of it is taken."""
    monkeypatch.setattr(idle_leases, "MOST_KINDS", 1)
    pager, owner = make_pager(None), Owner()
    kind = pager.kind(2)
    pager.kind(3)
    assert pager.take(kind, owner, lambda origin, pages: (answer, 0, 0, None))[0] == answer
    del owner
    assert pager.settle() == 0
    assert pager.pool.used_pages == 0


def test_what_was_taken_at_ease_and_moved_is_not_read_where_it_was(tmp_path: Path) -> None:
    """It comes back to other pages than those whose addresses it was encoded to."""
    pager, owners, decoded = make_pager(None, folder=tmp_path), [Owner() for _ in range(3)], []

    def decode(out: int, pages: PageAddresses, two: TwoValues) -> bool:
        decoded.append(out)
        return True

    for owner in owners:
        pager.take(pager.kind(2), owner, lambda origin, pages: (0, 0, 0, None))
        pager.pool.write(owner.lease.pages, content(owner.lease))
    pager.set_budget(4 * PAGE)
    pager.set_budget(None)
    assert pager.at_ease
    for number, owner in enumerate(owners):
        if not pager.read(owner.lease, decode, number, (0, 0)):
            with pager.reading(owner.lease):
                assert intact(pager, owner.lease)
            assert not pager.read(owner.lease, decode, number, (0, 0))
    assert 0 < len(decoded) < 3
    del owners, owner
    assert (pager.settle(), pager.leased_pages) == (0, 0)


def _fill_at_ease(pager: Pager, count: int) -> list[Owner]:
    """Writes as many leases of two pages, which die with their owners."""
    owners = [Owner() for _ in range(count)]
    for owner in owners:
        with pager.writing_again(pager.kind(2), owner) as lease:
            owner.lease = lease
            pager.pool.write(lease.pages, content(lease))
    return owners


def test_pages_whose_copies_are_under_way_are_not_written_before_them() -> None:
    """A budget is lifted, and what is being read back dies unread: its pages are taken again at once."""
    memory = host_memory(PAGE)
    pager = make_pager(4, tier=memory)
    leases = [write(pager, 2) for _ in range(4)]
    pager.set_budget(None)
    with pager.reading(leases[3]):
        wait(pager)
    assert copies_of(memory).queue
    for lease in leases:
        pager.release(lease)
    owners = _fill_at_ease(pager, 4)
    copies_of(memory).wait(copies_of(memory).made + len(copies_of(memory).queue))
    assert all(intact(pager, owner.lease) for owner in owners)


def test_a_budget_that_cannot_be_kept_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some leases have moved out before there was no room for others, and their pages are taken again at once."""
    memory = host_memory(PAGE)
    pager = make_pager(None, tier=memory)
    owners, take, taken = _fill_at_ease(pager, 4), memory._take, list[int]()

    def limited(count: int) -> Pages:
        taken.append(count)
        if len(taken) > 2:
            raise SpillError("no room")
        return take(count)

    monkeypatch.setattr(memory, "_take", limited)
    with pytest.raises(SpillError):
        pager.set_budget(3 * PAGE)
    assert pager.at_ease
    owners += _fill_at_ease(pager, 3)
    for owner in owners:
        with pager.reading(owner.lease) as lease:
            assert intact(pager, lease)
