"""The spill file: pages come back as they were, and a disk that fails is an error, never a wrong number."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig, DAFError, SpillError
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.tiers import disk
from daf_core.memory.tiers.disk import SpillFile
from daf_kernels import FixedPages, Pages
from tests.core.books import check_pager, used_slots
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    gradients,
    make_model,
    normal,
    pager_of,
    spill_all,
)

CPU = torch.device("cpu")
PAGE = 256


def make_pool(pages: int = 64) -> PagePool:
    """Returns a pool of small pages with random content."""
    pool = PagePool(CPU, pages * PAGE, PAGE)
    fill(pool, np.arange(pages) if pool.take(pages) is not None else np.arange(0))
    return pool


def fill(pool: PagePool, pages: Pages, seed: int = 0) -> Tensor:
    """Writes random bytes into pages and returns them."""
    content = torch.randint(256, (pages.size, PAGE), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    pool.write(pages, content)
    return content


@given(data=st.data())
def test_random_page_sets_come_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any pages in any order, however written, freed and overwritten slots are interleaved."""
    pool, file = make_pool(), SpillFile(tmp_path_factory.getbasetemp(), PAGE)
    held: list[tuple[Pages, Tensor]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        if held and data.draw(st.booleans()):
            file.free(held.pop(data.draw(st.integers(0, len(held) - 1)))[0])
        pages = np.array(data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True)))
        content = fill(pool, pages, data.draw(st.integers(0, 9)))
        held.append((file.write(pool, pages), content))
        assert used_slots(file) == sum(slots.size for slots, _ in held)
    assert np.unique(np.concatenate([slots for slots, _ in held])).size == used_slots(file)
    for slots, content in held:
        pages = np.array(data.draw(st.permutations(range(64))))[: slots.size]
        file.read(slots, pool, pages)
        assert torch.equal(pool.read(pages), content)


@pytest.mark.parametrize("chunk_bytes", [1, PAGE, 3 * PAGE, 1 << 20])
def test_chunks_do_not_change_what_comes_back(chunk_bytes: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Long runs of slots are copied in pieces, of a page at least."""
    monkeypatch.setattr(disk, "CHUNK_BYTES", chunk_bytes)
    pool, file, pages = make_pool(), SpillFile(tmp_path, PAGE), np.arange(50)
    content = pool.read(pages)
    slots = file.write(pool, pages)
    pool.write(pages, torch.zeros_like(content))
    file.read(slots, pool, pages)
    assert torch.equal(pool.read(pages), content)


def test_slots_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is written and freed in turn does not grow."""
    monkeypatch.setattr(disk, "SLOTS_STEP", 16)
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    for _ in range(100):
        slots = file.write(pool, np.arange(16))
        file.free(slots)
    assert os.fstat(file._file.fileno()).st_size == 16 * PAGE
    assert used_slots(file) == 0


def test_more_pages_than_a_step_of_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table grows by what is missing where that is more than its step."""
    monkeypatch.setattr(disk, "SLOTS_STEP", 4)
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    first, second = file.write(pool, np.arange(3)), file.write(pool, np.arange(40))
    assert np.intersect1d(first, second).size == 0
    assert used_slots(file) == 43


def test_slots_freed_twice_are_an_error(tmp_path: Path) -> None:
    """A slot never has two owners."""
    file = SpillFile(tmp_path, PAGE)
    slots = file.write(make_pool(), np.arange(3))
    file.free(slots)
    with pytest.raises(ValueError, match="given back twice"):
        file.free(slots)


class Disk:
    """A file on a disk that takes `room` bytes in pieces of at most `piece` bytes, then fails."""

    def __init__(self, file: Any, room: int, piece: int = 1 << 30, code: int = errno.ENOSPC) -> None:
        self.file, self.room, self.piece, self.code = file, room, piece, code

    def write(self, content: memoryview) -> int:
        if self.room == 0:
            raise OSError(self.code, os.strerror(self.code))
        count = self.file.write(content[: min(self.room, self.piece)])
        self.room -= count
        return count

    def readinto(self, content: memoryview) -> int:
        return self.file.readinto(content[: self.piece])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    """A system call may take fewer bytes than it was given."""
    pool, file, pages = make_pool(), SpillFile(tmp_path, PAGE), np.arange(9)
    file._file = Disk(file._file, 1 << 30, piece=100)
    content = pool.read(pages)
    slots = file.write(pool, pages)
    file.read(slots, pool, pages + 9)
    assert torch.equal(pool.read(pages + 9), content)


@pytest.mark.parametrize("room", [0, 1, PAGE, 5 * PAGE + 7])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_full_disk_is_an_error_that_names_the_folder(room: int, code: int, tmp_path: Path) -> None:
    """However far it came, the slots are free again, and what was written before is intact."""
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    content, slots = pool.read(np.arange(4)), file.write(pool, np.arange(4))
    whole, file._file = file._file, Disk(file._file, room, code=code)
    with pytest.raises(SpillError, match=r"cannot write 1\.54 KB of activations to the spill file") as raised:
        file.write(pool, np.arange(6, 12))
    assert str(tmp_path) in str(raised.value)
    assert os.strerror(code) in str(raised.value)
    assert all(way in str(raised.value) for way in ("Free space there", "spill_dir", "memory_budget"))
    assert used_slots(file) == 4
    file._file = whole
    assert file.write(pool, np.arange(6, 12)).size == 6
    file.read(slots, pool, np.arange(20, 24))
    assert torch.equal(pool.read(np.arange(20, 24)), content)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ValueError])
def test_write_that_fails_in_memory_frees_its_slots(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens while pages are copied, it is passed on as it is, and no slot is lost."""
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    kept, read = file.write(pool, np.arange(4)), pool.read
    monkeypatch.setattr(disk, "CHUNK_BYTES", 2 * PAGE)

    def fail_late(pages: Pages) -> Tensor:
        if 9 in pages:
            raise error
        return read(pages)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "read", fail_late)
        with pytest.raises(error):
            file.write(pool, np.arange(6, 12))
    assert used_slots(file) == 4
    again = file.write(pool, np.arange(6, 12))
    for slots, pages in ((kept, np.arange(4)), (again, np.arange(6, 12))):
        file.read(slots, pool, pages + 20)
        assert torch.equal(pool.read(pages + 20), pool.read(pages))


def test_spill_errors_are_those_of_the_system_and_of_daf() -> None:
    """Callers that know nothing of DAF catch them too."""
    assert issubclass(SpillError, OSError)
    assert issubclass(SpillError, DAFError)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """A folder that vanished since the configuration was made is an error when the engine is made, not in a step."""
    folder = tmp_path / "vanished"
    folder.mkdir()
    config = DAFConfig(spill_dir=folder)
    folder.rmdir()
    for make in (lambda: SpillFile(folder, PAGE), lambda: ActivationEngine(nn.Linear(1, 1), config)):
        with pytest.raises(SpillError, match=f"cannot make a spill file in '{folder}'.*Name a folder that exists"):
            make()


@pytest.mark.parametrize("change", ["cut and grown", "zeros", "a bit", "other pages"])
def test_file_changed_from_outside_is_an_error(change: str, tmp_path: Path) -> None:
    """Whoever can open it, by its number in /proc, may do so; and disks err."""
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    content, slots = pool.read(np.arange(8)), file.write(pool, np.arange(8))
    number = file._file.fileno()
    if change == "cut and grown":
        os.ftruncate(number, 5 * PAGE)
        os.ftruncate(number, 8 * PAGE)
    elif change == "zeros":
        os.pwrite(number, bytes(8), 3 * PAGE)
    elif change == "a bit":
        os.pwrite(number, bytes([os.pread(number, 1, 3 * PAGE)[0] ^ 1]), 3 * PAGE)
    else:
        os.pwrite(number, os.pread(number, PAGE, 2 * PAGE), 3 * PAGE)
    with pytest.raises(SpillError, match=r"was changed after it was written.*This step is lost"):
        file.read(slots, pool, np.arange(8))
    file.free(slots)
    slots = file.write(pool, np.arange(20, 28))  # the file itself is as good as new
    file.read(slots, pool, np.arange(8))
    assert torch.equal(pool.read(np.arange(8)), pool.read(np.arange(20, 28)))
    assert not torch.equal(pool.read(np.arange(8)), content)


def test_nothing_lies_in_the_folder_meanwhile(tmp_path: Path) -> None:
    """The file has no name: nobody opens it by mistake, and no crash leaves it."""
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    file.write(pool, np.arange(64))
    assert os.fstat(file._file.fileno()).st_size > 0
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
import torch
from daf_core import ActivationEngine, DAFConfig
model = torch.nn.Linear(64, 64)
engine = ActivationEngine(model, DAFConfig(precision="exact", memory_budget=40000, spill_dir=sys.argv[1]))
with engine.compress():
    outputs = [model(torch.randn(128, 64)) for _ in range(4)]
assert engine.finish_step().spilled_bytes > 0
print("spilled", flush=True)
time.sleep(600)
"""


def test_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """Not even where it had no chance to clean up."""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "spilled\n"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def spill_of(engine: ActivationEngine) -> SpillFile:
    file = pager_of(engine)._spill
    assert file is not None
    return file


@pytest.mark.parametrize("room", [0, 5000, 40_000])
def test_full_disk_in_a_forward_pass_loses_nothing(room: int, tmp_path: Path) -> None:
    """The pager's books are right, what was saved before still gives its gradient, and the step can be run again."""
    model, loss_of = make_model("transformer")
    expected = backward(model, loss_of, engine_for(model, 4))
    engine = engine_for(model, 4, memory_budget="200KB", spill_dir=tmp_path)
    early = Scale()
    with engine.compress():
        output = early(normal(*LARGE)).sum()
    file = spill_of(engine)
    whole, file._file = file._file, Disk(file._file, room)
    with pytest.raises(SpillError, match="Free space there"):
        backward(model, loss_of, engine)
    check_pager(pager_of(engine))
    file._file = whole
    assert_same(backward(model, loss_of, engine), expected)
    output.backward()
    plain = engine_for(Scale(), 4)
    again = Scale()
    with plain.compress():
        again(normal(*LARGE)).sum().backward()
    assert torch.equal(early.weight.grad, again.weight.grad)
    assert_empty(engine)
    assert used_slots(file) == 0


def test_full_disk_leaves_the_budget_as_it_was(tmp_path: Path) -> None:
    """A smaller budget that cannot be had is not set, and everything is still there."""
    model = Scale()
    engine = engine_for(model, "exact", memory_budget="1MB", spill_dir=tmp_path)
    inputs = [normal(*LARGE, seed=seed) for seed in range(2)]
    with engine.compress():
        nodes: list[Any] = [model(x).grad_fn for x in inputs]
    file = spill_of(engine)
    file._file, held = Disk(file._file, 10_000), engine.held_bytes
    with pytest.raises(SpillError):
        engine.set_memory_budget(held // 2)
    assert (pager_of(engine).budget, engine.held_bytes, used_slots(file)) == (1_000_000, held, 0)
    check_pager(pager_of(engine))
    assert all(torch.equal(node._saved_self, x) for node, x in zip(nodes, inputs, strict=True))


def test_truncated_file_that_is_written_to_again_is_an_error(tmp_path: Path) -> None:
    """The system would fill the hole with zeros, which nobody may take for an activation."""
    pool, file = make_pool(), SpillFile(tmp_path, PAGE)
    slots = file.write(pool, np.arange(4))
    os.ftruncate(file._file.fileno(), 4 * PAGE - 1)
    with pytest.raises(SpillError, match=rf"cannot write .* the file was cut from {4 * PAGE} to {4 * PAGE - 1} bytes"):
        file.write(pool, np.arange(4, 8))
    with pytest.raises(SpillError, match=r"cannot read .* the file ends 1 bytes early"):
        file.read(slots, pool, np.arange(20, 24))
    assert used_slots(file) == 4


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize("size", [0, 4096, -1], ids=["empty", "a-page", "a-byte-short"])
def test_truncated_file_is_an_error_and_no_wrong_gradient(size: int, precision: Any, tmp_path: Path) -> None:
    """Backward says what happened; what is freed afterwards frees every page and slot."""
    model, loss_of = make_model("mlp")
    engine = engine_for(model, precision, memory_budget="1GB", spill_dir=tmp_path)
    with engine.compress():
        loss = loss_of(model, 0)
    spill_all(engine)
    file = spill_of(engine)
    number = file._file.fileno()
    os.ftruncate(number, size if size >= 0 else os.fstat(number).st_size + size)
    with pytest.raises(SpillError, match=r"cannot read activations back .* bytes early.* This step is lost") as raised:
        loss.backward()
    assert str(tmp_path) in str(raised.value)
    check_pager(pager_of(engine))
    del loss, raised
    assert_empty(engine)
    assert used_slots(file) == 0
    assert_same(backward(model, loss_of, engine), backward(model, loss_of, engine_for(model, precision)))


def test_disk_that_recovers_gives_the_right_gradient(tmp_path: Path) -> None:
    """A read that failed is tried again by whoever needs it: nothing half read is ever used."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of, engine_for(model, "exact"))
    engine = engine_for(model, "exact", memory_budget="1GB", spill_dir=tmp_path)
    torch.manual_seed(1)
    with engine.compress():
        loss = loss_of(model, 0)
    spill_all(engine)
    file = spill_of(engine)
    content = os.pread(file._file.fileno(), 1 << 30, 0)
    os.ftruncate(file._file.fileno(), 0)
    with pytest.raises(SpillError):
        loss.backward(retain_graph=True)
    check_pager(pager_of(engine))
    os.pwrite(file._file.fileno(), content, 0)
    model.zero_grad()
    loss.backward()
    assert_same(gradients(model), expected)


def test_pages_come_back_whatever_the_default_device(tmp_path: Path) -> None:
    """The file is read through the memory of the CPU."""
    memory, file = FixedPages(3, 128), SpillFile(tmp_path, 128)
    pages = np.arange(3)
    content = torch.arange(3 * 128).view(3, 128).to(torch.uint8)
    memory.write(pages, content)
    slots = file.write(memory, pages)
    memory.write(pages, torch.zeros_like(content))
    with torch.device("meta"):
        file.read(slots, memory, pages)
    assert torch.equal(memory.read(pages), content)
