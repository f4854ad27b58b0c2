"""Flags of a GPU's kernels: none is lost and none is asked for alone, whoever asks when, in any thread and stream."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from daf_kernels.triton import flags as flags_module
from daf_kernels.triton.flags import AsyncFlag, Flag, Flags
from tests.kernels.pretended_gpu import Operations, PretendedGpu, Stream, pretend

DEVICE = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    return pretend(monkeypatch)


def launched(flag: Flag, is_set: bool) -> AsyncFlag:
    """Does what a kernel does, and returns its answer."""
    if is_set:
        flag.pointer[0] = 1
    answer = flag.unless()
    assert isinstance(answer, AsyncFlag)
    return answer


def test_one_copy_answers_all_that_were_launched_before(gpu: PretendedGpu) -> None:
    flags, gpu.done = Flags(), False
    answers = [launched(flags.take(DEVICE), number in (1, 4)) for number in range(6)]
    assert not any(answer.is_known for answer in answers)
    assert gpu.events == []
    for answer in answers:
        answer.ask()
    assert not any(answer.is_known for answer in answers)
    gpu.done = True
    assert all(answer.is_known for answer in answers)
    assert [bool(answer) for answer in answers] == [True, False, True, True, False, True]
    assert gpu.events == [0]


@pytest.mark.parametrize("taken_before", [True, False])
def test_a_kernel_that_is_launched_later_is_not_answered_before(gpu: PretendedGpu, taken_before: bool) -> None:
    """Though another thread may have asked after its flag was taken."""
    flags = Flags()
    first, second = flags.take(DEVICE), flags.take(DEVICE) if taken_before else None
    assert launched(first, False)
    late = launched(second or flags.take(DEVICE), True)
    assert not late.is_known
    assert not late
    assert len(gpu.events) == 2


def test_flags_do_not_end(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array is zero once; what one has answered, or has yet to answer, the next ones leave alone."""
    monkeypatch.setattr(flags_module, "FLAGS", 4)
    flags = Flags()
    with Operations() as operations:
        taken = [flags.take(DEVICE) for _ in range(11)]
    assert operations.names == ["aten.zeros"] * 3
    answers = [launched(flag, number % 3 == 0) for number, flag in enumerate(taken)]
    assert [bool(answer) for answer in reversed(answers)] == [number % 3 != 0 for number in reversed(range(11))]
    assert len(gpu.events) == 3


def test_kernels_find_each_flag_where_vectors_begin(gpu: PretendedGpu) -> None:
    """One that lies elsewhere would be compiled for again."""
    flags = Flags()
    addresses = [flags.take(DEVICE).pointer.data_ptr() for _ in range(9)]
    assert len(set(addresses)) == 9
    assert {address % 16 for address in addresses} == {0}


def test_each_stream_has_its_own_flags_and_copies_them_itself(gpu: PretendedGpu) -> None:
    """Whoever asks: the copy then comes after the kernels."""
    flags = Flags()
    with gpu.on(Stream(7)):
        side = [launched(flags.take(DEVICE), is_set) for is_set in (True, False)]
    main = launched(flags.take(DEVICE), True)
    assert [bool(answer) for answer in (main, *side)] == [False, False, True]
    assert gpu.events == [0, 7]


def test_an_interrupt_while_asking_loses_nothing(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags()
    early = launched(flags.take(DEVICE), True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            early.ask()
    assert not early.is_known
    late = launched(flags.take(DEVICE), True)
    early.ask()
    after = launched(flags.take(DEVICE), True)
    assert [bool(answer) for answer in (early, late, after)] == [False] * 3


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_threads_that_launch_and_ask_on_one_stream(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags_module, "FLAGS", 8)
    flags = Flags()

    def work(seed: int) -> bool:
        numbers, right, waiting = random.Random(seed), True, []
        for _ in range(300):
            is_set = numbers.random() < 0.5
            waiting.append((launched(flags.take(DEVICE), is_set), is_set))
            if numbers.random() < 0.3:
                answer, was_set = waiting.pop(numbers.randrange(len(waiting)))
                right = right and bool(answer) != was_set
        return right and all(bool(answer) != was_set for answer, was_set in waiting)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@needs_gpu
def test_answers_of_a_gpu() -> None:
    """A kernel that sets a flag late is waited for, and one copy answers for those before it."""
    device = torch.device("cuda", 0)
    flags = Flags()
    first, second = flags.take(device), flags.take(device)
    torch.cuda._sleep(100_000_000)
    second.pointer[0].fill_(1)
    answers = [first.unless(), second.unless()]
    assert not any(answer.is_known for answer in answers)
    answers[0].ask()
    assert not answers[1].is_known
    assert [bool(answer) for answer in answers] == [True, False]
    assert all(answer.is_known for answer in answers)
