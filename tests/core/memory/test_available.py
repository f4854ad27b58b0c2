"""How much memory there is: the limits of control groups count, and a budget that follows them does not flutter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from daf_core.memory.system import available
from daf_core.memory.system.available import (
    HEAD_ROOM,
    LEAST_RESERVE,
    PATIENCE,
    RESERVE_SHARE,
    STEPS_BEFORE_RETRY,
    TIGHTER,
    AutoBudget,
    host_memory,
)

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
MB = 1 << 20
TOTAL, FREE = 64_000 * MB, 32_000 * MB
UNLIMITED = 9223372036854771712
"""What version 1 says where there is no limit: the largest number of whole pages."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GB, half of it free."""
    memory = SimpleNamespace(total=TOTAL, available=FREE)
    monkeypatch.setattr(available.psutil, "virtual_memory", lambda: memory)
    limit_process(monkeypatch)


def limit_process(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Limits the process, which uses 300 MB of addresses, 200 of them for data."""
    resource = SimpleNamespace(RLIMIT_AS="space", RLIMIT_DATA="data", RLIM_INFINITY=-1)
    resource.getrlimit = lambda kind: (limits.get(kind, -1), -1)
    monkeypatch.setattr(available, "resource", resource)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=300 * MB, data=200 * MB))
    monkeypatch.setattr(available.psutil, "Process", lambda: process)


class Groups:
    """A tree of control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "cgroup", folder / "mount"
        self.mount.mkdir()

    def member(self, *lines: str) -> Groups:
        self.proc.write_text("".join(f"{line}\n" for line in lines))
        return self

    def v2(self, path: str, **files: object) -> Groups:
        """Adds a group of version 2: max, high, current, stat."""
        return self._add(self.mount, path, {f"memory.{name}": text for name, text in files.items()})

    def v1(self, path: str, limit: object, usage: object, stat: str | None = None) -> Groups:
        files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
        return self._add(self.mount / "memory", path, files)

    def _add(self, root: Path, path: str, files: dict[str, object]) -> Groups:
        folder = root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if text is not None:
                (folder / name).write_text(f"{text}\n")
        return self

    @property
    def memory(self) -> tuple[int, int]:
        return host_memory()


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups(tmp_path)
    monkeypatch.setattr(available, "PROC", groups.proc)
    monkeypatch.setattr(available, "MOUNT", groups.mount)
    return groups


def test_machine_without_control_groups(groups: Groups) -> None:
    """The machine's own numbers hold where no file names a group."""
    assert groups.memory == (TOTAL, FREE)


def test_groups_without_a_memory_controller(groups: Groups) -> None:
    """Other controllers say nothing about memory, and a hybrid tree's version 2 has no memory files."""
    groups.member("5:cpu,cpuacct:/a", "3:memoryish:/a", "1:name=systemd:/a", "0::/a").v1("/a", MB, 0)
    assert groups.memory == (TOTAL, FREE)


def test_version_2(groups: Groups) -> None:
    """Limit less use."""
    groups.member("0::/job").v2("/job", max=1000 * MB, current=300 * MB)
    assert groups.memory == (1000 * MB, 700 * MB)


def test_version_2_throttles_at_high(groups: Groups) -> None:
    """Beyond memory.high a group is slowed until it stands still: as good as a limit."""
    groups.member("0::/job").v2("/job", max=1000 * MB, high=800 * MB, current=300 * MB)
    assert groups.memory == (800 * MB, 500 * MB)


def test_version_1(groups: Groups) -> None:
    """Among other controllers, in any order."""
    groups.member("9:cpu:/x", "4:hugetlb,memory:/job", "0::/").v1("/job", 1000 * MB, 300 * MB)
    assert groups.memory == (1000 * MB, 700 * MB)


@pytest.mark.parametrize("limit", [UNLIMITED, "max", 2**63 - 1, TOTAL])
def test_no_limit_is_the_machine(groups: Groups, limit: object) -> None:
    """In words or as an enormous number."""
    groups.member("4:memory:/job", "0::/job").v1("/job", limit, 300 * MB).v2("/job", max=limit, current=300 * MB)
    assert groups.memory == (TOTAL, FREE)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["/", "/a", "/a/b", "/a/b/c"])
def test_limit_of_an_ancestor(groups: Groups, limited: str, version: int) -> None:
    """A group is bound by every group above it, wherever the limit is, and by what all of that group's members use."""
    groups.member("4:memory:/a/b/c" if version == 1 else "0::/a/b/c")
    for path in ("/", "/a", "/a/b", "/a/b/c"):
        limit, used = (2000 * MB, 1500 * MB) if path == limited else ("max", 100 * MB)
        if version == 1:
            groups.v1(path, UNLIMITED if limit == "max" else limit, used)
        else:
            groups.v2(path, max=limit, current=used)
    assert groups.memory == (2000 * MB, 500 * MB)


def test_the_tightest_limit_counts(groups: Groups) -> None:
    """The least total and the least rest, which may be different groups'."""
    groups.member("0::/a/b").v2("/a", max=4000 * MB, current=3900 * MB).v2("/a/b", max=2000 * MB, current=500 * MB)
    assert groups.memory == (2000 * MB, 100 * MB)


def test_groups_beside_the_path_do_not_count(groups: Groups) -> None:
    """Nor do those below it."""
    groups.member("0::/a").v2("/a", max=4000 * MB, current=0)
    groups.v2("/b", max=MB, current=0).v2("/a/c", max=MB, current=0)
    assert groups.memory == (4000 * MB, 4000 * MB)


@pytest.mark.parametrize("version", [1, 2])
def test_file_cache_that_can_be_taken_back_is_free(groups: Groups, version: int) -> None:
    """The group's inactive file cache counts as used only until somebody needs it."""
    names = ("inactive_file", "total_inactive_file")
    decoy, name = (names[0], names[1]) if version == 1 else (names[1], names[0])
    stat = f"anon 5\n{decoy} {900 * MB}\nactive_file {800 * MB}\n{name} {200 * MB}\npgfault 17"
    if version == 1:
        groups.member("4:memory:/job").v1("/job", 1000 * MB, 700 * MB, stat)
    else:
        groups.member("0::/job").v2("/job", max=1000 * MB, current=700 * MB, stat=stat)
    assert groups.memory == (1000 * MB, 500 * MB)


def test_use_beyond_the_limit_leaves_nothing(groups: Groups) -> None:
    """A limit that was lowered below the use is no negative rest."""
    groups.member("0::/job").v2("/job", max=500 * MB, current=700 * MB)
    assert groups.memory == (500 * MB, 0)


def test_machine_that_has_less_than_the_group_allows(groups: Groups) -> None:
    """A group's limit is no promise."""
    groups.member("0::/job").v2("/job", max=2 * TOTAL, current=0).v2("/", max=FREE + MB, current=0)
    assert groups.memory == (FREE + MB, FREE)


@pytest.mark.parametrize("path", ["/docker/0123", "/kubepods/pod1/0123", "/../../other", "/"])
def test_container_whose_path_is_that_of_the_host(groups: Groups, path: str) -> None:
    """Below the mount there is only the container's own group, as its root."""
    groups.member(f"0::{path}").v2("/", max=1000 * MB, current=300 * MB)
    assert groups.memory == (1000 * MB, 700 * MB)
    groups.member(f"7:memory:{path}").v1("/", 900 * MB, 300 * MB)
    assert groups.memory == (900 * MB, 600 * MB)


def test_colons_in_a_path(groups: Groups) -> None:
    """Only the first two separate fields."""
    groups.member("0::/a:b").v2("/a:b", max=1000 * MB, current=0)
    assert groups.memory == (1000 * MB, 1000 * MB)


@pytest.mark.parametrize("missing", ["current", "max", "stat"])
def test_missing_files(groups: Groups, missing: str) -> None:
    """A group that does not say what it allows or uses binds nothing; without statistics all that is used counts."""
    files = {"max": 1000 * MB, "current": 300 * MB, "stat": "inactive_file 0"}
    del files[missing]
    groups.member("0::/job").v2("/job", **files)
    assert groups.memory == ((1000 * MB, 700 * MB) if missing == "stat" else (TOTAL, FREE))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"space": 1000}, (1000, 700)),
        ({"data": 1000}, (1000, 800)),
        ({"space": 1000, "data": 700}, (700, 500)),
        ({"space": 100}, (100, 0)),
        ({"space": 100_000}, (64_000, 32_000)),
    ],
)
def test_limits_of_the_process_count(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], expected: tuple[int, int]
) -> None:
    """As `ulimit -v` and `ulimit -d` set them, less what the process has taken already."""
    limit_process(monkeypatch, **{kind: limit * MB for kind, limit in limits.items()})
    assert groups.memory == (expected[0] * MB, expected[1] * MB)


def test_systems_without_limits_of_processes(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "resource", None)
    assert groups.memory == (TOTAL, FREE)


LIMITED = """
import resource, psutil
from daf_core.memory.system.available import host_memory
limit = psutil.Process().memory_info().vms + (500 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
total, free = host_memory()
print(total <= limit, free)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold these limits")
def test_true_limits_are_read() -> None:
    """In a process of its own, which cannot take its limit back."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    below, free = done.stdout.split()
    assert below == "True", done.stderr
    assert 0 < int(free) <= 500 << 20


def test_this_process_has_some_memory() -> None:
    """With the true files, whatever they are."""
    total, free = host_memory()
    assert 0 < free <= total <= TOTAL


class Machine:
    """A device whose memory a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
        self.total, self.free = total, free
        monkeypatch.setattr(available, "device_memory", lambda device: (self.total, self.free))

    def steps(self, budget: AutoBudget, count: int) -> list[int]:
        """Returns the budgets of steps with one pass each."""
        return [self.step(budget) for _ in range(count)]

    def step(self, budget: AutoBudget) -> int:
        size = budget.update(0)
        budget.finish_step()
        return size


@pytest.mark.parametrize("total", [1000 * MB, 100_000 * MB])
def test_auto_budget_leaves_a_reserve(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of all memory, and not less than a certain size."""
    Machine(monkeypatch, total, total // 2)
    reserve = max(int(total * RESERVE_SHARE), LEAST_RESERVE)
    assert AutoBudget(CPU).update(0) == total // 2 - reserve
    assert AutoBudget(CPU).update(50 * MB) == total // 2 - reserve + 50 * MB


def test_auto_budget_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the reserve is free, nothing may be held."""
    Machine(monkeypatch, 1000 * MB, LEAST_RESERVE - 1)
    assert AutoBudget(CPU).update(0) == 0


def test_auto_budget_is_lowered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To exactly what there is, step by step."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 900 * MB), AutoBudget(CPU)
    for free in (900, 899, 500, 130):
        machine.free = free * MB
        assert budget.update(0) == free * MB - LEAST_RESERVE


def test_auto_budget_is_raised_after_enough_roomy_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a step before."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 300 * MB), AutoBudget(CPU)
    low = machine.step(budget)
    machine.free = 800 * MB
    assert machine.steps(budget, PATIENCE + 1) == [low] * PATIENCE + [800 * MB - LEAST_RESERVE]
    machine.free = 990 * MB
    assert budget.update(0) == 800 * MB - LEAST_RESERVE


def test_passes_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are in a step, it counts once, by the room that its last pass found."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 300 * MB), AutoBudget(CPU)
    low = machine.step(budget)
    for _ in range(PATIENCE - 1):
        machine.free = 300 * MB
        assert budget.update(0) == low
        machine.free = 800 * MB
        assert [budget.update(0) for _ in range(2 * PATIENCE)] == [low] * (2 * PATIENCE)
        budget.finish_step()
    assert machine.steps(budget, 2) == [low, 800 * MB - LEAST_RESERVE]


def test_step_without_a_pass_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first pass no room was measured."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 300 * MB), AutoBudget(CPU)
    for _ in range(2 * PATIENCE):
        budget.finish_step()
    assert machine.step(budget) == 300 * MB - LEAST_RESERVE


@pytest.mark.parametrize("interruption", [300, 340])
def test_roomy_steps_must_follow_each_other(interruption: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without much room, even if it lowers nothing, begins the count anew."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 300 * MB), AutoBudget(CPU)
    low = machine.step(budget)
    machine.free = 800 * MB
    machine.steps(budget, PATIENCE - 1)
    machine.free = interruption * MB
    assert machine.step(budget) == low
    machine.free = 800 * MB
    assert machine.steps(budget, PATIENCE + 1)[-2:] == [low, 800 * MB - LEAST_RESERVE]


def test_a_little_more_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is there."""
    machine, budget = Machine(monkeypatch, 1000 * MB, LEAST_RESERVE + 100 * MB), AutoBudget(CPU)
    machine.step(budget)
    machine.free = LEAST_RESERVE + int(HEAD_ROOM * 100 * MB)
    assert set(machine.steps(budget, 3 * PATIENCE)) == {100 * MB}


def test_own_bytes_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What activations hold already does not lower their own budget."""
    machine, budget = Machine(monkeypatch, 1000 * MB, 500 * MB), AutoBudget(CPU)
    first = budget.update(0)
    machine.free = 100 * MB
    assert budget.update(400 * MB) == first


def test_what_something_else_takes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the budget is limited, and never below zero."""
    Machine(monkeypatch, 1000 * MB, LEAST_RESERVE + 500 * MB)
    assert AutoBudget(CPU).update(0, reserved=100 * MB) == 400 * MB
    budget = AutoBudget(CPU, most=300 * MB)
    assert [budget.update(0, size * MB) for size in (0, 100, 400)] == [300 * MB, 200 * MB, 0]


@pytest.mark.parametrize("most", [None, 150 * MB])
def test_a_ceiling_rises_after_enough_steps(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as much as memory that ran out has lowered it, and up to the budget that the user has set."""
    Machine(monkeypatch, 1000 * MB, LEAST_RESERVE + 500 * MB)
    budget = AutoBudget(CPU, most)
    whole = budget.update(0)
    budget.finish_step()
    budget.lower(100 * MB)
    for ceiling in (100 * MB, int(100 * MB / TIGHTER)):
        assert budget.update(0) == ceiling
        assert [budget.finish_step() for _ in range(STEPS_BEFORE_RETRY)] == [False] * (STEPS_BEFORE_RETRY - 1) + [True]
    assert budget.update(0) == (int(int(100 * MB / TIGHTER) / TIGHTER) if most is None else whole)
    assert budget.remove_ceiling() is (most is None)
    assert budget.update(0) == whole
    assert not any(budget.finish_step() for _ in range(2 * STEPS_BEFORE_RETRY))


def test_another_shortage_begins_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 1000 * MB, LEAST_RESERVE + 500 * MB)
    budget = AutoBudget(CPU)
    for ceiling in (100 * MB, 50 * MB):
        budget.lower(ceiling)
        assert not any(budget.finish_step() for _ in range(STEPS_BEFORE_RETRY - 1))
        assert budget.update(0) == ceiling
    assert budget.finish_step()
