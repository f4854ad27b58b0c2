"""A step that runs out of memory is run again, and nothing of the failed attempt is left."""

from __future__ import annotations

import errno
import pickle
import random
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationBudgetError, DAFConfig, StepStatistics
from daf_core.errors import PeerMemoryError
from daf_core.memory.system.release import release_memory
from daf_core.model.treatments import Treatments
from daf_core.plan.run.retry import is_out_of_memory, with_retries
from daf_core.snapshots.random_numbers import RandomNumbers
from daf_core.snapshots.step import Snapshot
from daf_core.unsupported.models import RERUNS
from daf_core.unsupported.table import Context, unsupported_reasons
from tests.core import failing, pressure
from tests.core.failing import CPU_TEXT, ERRORS, Fuse
from tests.core.harness import LARGE, Scale, assert_same, engine_for, make_model, normal

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    MemoryError("Unable to allocate 8 GiB for an array"),
    ActivationBudgetError(200, 100),
    RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] err == 0. {CPU_TEXT}"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 2 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("can't start new thread"),
]
OTHER = [
    KeyboardInterrupt(),
    SystemExit(1),
    RuntimeError("unsupported memory format option ChannelsLast"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("libgomp.so.1: cannot allocate memory in static TLS block"),
    RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    ValueError("the word list says: out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    AssertionError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_lack_of_memory_is_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = RuntimeError("torch.utils.checkpoint: recomputed values differ")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_errors_that_were_raised_while_memory_ran_out_count() -> None:
    """Where clean-up failed, say; but not where the link is cut, nor an interrupt, nor what was handled long before."""
    memory = MemoryError()
    for error in (ValueError(), KeyboardInterrupt()):
        error.__context__ = memory
        assert is_out_of_memory(error) == isinstance(error, Exception)
    cut = ValueError()
    cut.__context__, cut.__suppress_context__ = memory, True
    assert not is_out_of_memory(cut)
    later = ValueError()
    later.__context__ = memory
    assert not is_out_of_memory(later, handled=memory)


def test_errors_that_refer_to_each_other_end() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("place", ["forward", "late"])
def test_run_is_the_same_as_without_failure(place: str, error: Callable[[], Exception]) -> None:
    """Losses, gradients, weights, random numbers: the batch is neither skipped nor used twice."""
    model, loss_of = pressure.make_model("perceptron")
    expected, _ = failing.train(model, loss_of, Fuse(place, set()), None)
    fuse = Fuse(place, {2, 3}, error)
    found, _ = failing.train(model, loss_of, fuse, None)
    assert fuse.attempts == 3 + 2
    assert_same(found, expected)


@pytest.mark.parametrize("place", ["forward", "late"])
@pytest.mark.parametrize("name", ["convnet", "rnn"])
def test_running_statistics_and_accumulated_gradients_are_taken_back(name: str, place: str) -> None:
    """The convolutions have batch norms; the failures are in the second and third pass of an optimizer step."""
    model, loss_of = make_model(name)
    expected, _ = failing.train(model, loss_of, Fuse(place, set()), None, steps=2, accumulate=3)
    found, _ = failing.train(model, loss_of, Fuse(place, {2, 6}), None, steps=2, accumulate=3)
    assert_same(found, expected)


ENGINES: dict[str, dict[str, Any]] = {
    "exact": {"precision": "exact"},
    "stochastic": {"precision": 4, "rounding": "stochastic"},
    "workers": {"precision": 4, "packing": "workers"},
    "auto": {"precision": "auto"},
    "budget": {"precision": 8, "memory_budget": 120_000, "audit_every": None},
}


@pytest.mark.parametrize("place", ["forward", "late"])
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_engine_goes_on_as_if_nothing_had_happened(options: dict[str, Any], place: str) -> None:
    """Codes, plans, audits and statistics too."""
    model, loss_of = pressure.make_model("perceptron")
    config = DAFConfig(**options)
    expected, bytes_expected = failing.train(model, loss_of, Fuse(place, set()), config, accumulate=2)
    found, bytes_found = failing.train(model, loss_of, Fuse(place, {1, 6}), config, accumulate=2)
    assert bytes_found == bytes_expected
    assert_same(found, expected)


@pytest.mark.parametrize("packing", ["device", "workers"])
def test_memory_of_the_failed_attempt_is_gone(packing: Any) -> None:
    """At the retry no activation lives, no page is held, and the pool is the system's again."""
    model, activations = Scale(), list[weakref.ref[Tensor]]()
    engine = engine_for(model, 4, packing=packing)
    found: list[tuple[Any, ...]] = []

    def attempt() -> str:
        alive = [reference() is not None for reference in activations]
        found.append((*alive, engine.held_bytes, engine.leased_pages, engine.reserved_bytes))
        with engine.compress():
            x = normal(*LARGE)
            cycle: list[Any] = [x, model(x)]
            cycle.append(cycle)
            activations.append(weakref.ref(x))
            if len(found) < 3:
                raise MemoryError
        return "done"

    assert with_retries(attempt, Snapshot(model, engine.snapshot), lambda message: True) == "done"
    assert found == [(0, 0, 0), (False, 0, 0, 0), (False, False, 0, 0, 0)]


def test_error_of_the_first_attempt_is_raised_where_no_plan_is_tighter() -> None:
    """With its type and its text; a note says what was tried."""
    told: list[str] = []
    errors = [ActivationBudgetError(200, 100), MemoryError("the second"), MemoryError("the third")]

    def tighten(message: str) -> bool:
        told.append(message)
        return len(told) < 3

    def attempt() -> None:
        raise errors[len(told)]

    with pytest.raises(ActivationBudgetError) as raised:
        with_retries(attempt, Snapshot(nn.Linear(2, 2)), tighten)
    assert raised.value is errors[0]
    assert (raised.value.needed, raised.value.allowed) == (200, 100)
    assert told == [str(error) for error in errors]
    shown = "".join(traceback.format_exception(raised.value))
    assert "run 3 time(s)" in shown
    assert "the third" in shown
    assert "raise errors[len(told)]" in shown


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=repr)
def test_other_errors_pass_through_at_once(error: BaseException) -> None:
    """Also while an earlier lack of memory is handled."""

    def attempt() -> None:
        raise error

    def tighten(message: str) -> bool:
        raise AssertionError

    def run() -> None:
        try:
            raise MemoryError
        except MemoryError:
            with_retries(attempt, Snapshot(nn.Linear(2, 2)), tighten)

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error


def test_what_was_handled_before_keeps_its_frames() -> None:
    """Whoever handles it may want to show it."""
    tries: list[int] = []

    def attempt() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError
        return 7

    def run() -> BaseException:
        try:
            raise KeyError
        except KeyError as outer:
            assert with_retries(attempt, Snapshot(nn.Linear(2, 2)), lambda message: True) == 7
            return outer

    assert run().__traceback__ is not None


def test_gradients_come_back_in_the_same_tensors() -> None:
    """Others may have views of them, as optimizers that flatten them do."""
    model = nn.Linear(3, 3)
    flat = torch.arange(9.0)
    model.weight.grad = flat.view(3, 3)
    snapshot = Snapshot(model)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        assert model.bias.grad is not None
        model.weight.grad = torch.zeros(3, 3)
        flat.fill_(5)
        snapshot.restore()
        assert model.bias.grad is None
        assert model.weight.grad.data_ptr() == flat.data_ptr()
        assert flat.tolist() == list(range(9))


def test_modes_and_buffers_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    model[1].eval()
    snapshot = Snapshot(model)
    for _ in range(2):
        model(torch.ones(2, 3))
        model.train()
        model[0].running_mean = torch.ones(5)  # another tensor of another size
        snapshot.restore()
        assert [module.training for module in model] == [True, False]
        assert torch.equal(model[0].running_mean, torch.zeros(3))
        assert model[0].num_batches_tracked == 0


def test_generators_of_modules_come_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    generators = random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator().manual_seed(4)
    for number, generator in enumerate(generators):
        setattr(model[0], f"generator_{number}", generator)

    def drawn() -> list[float]:
        python, numpy, old, torchs = generators
        return [python.random(), numpy.random(), old.rand(), float(torch.rand((), generator=torchs))]

    snapshot = Snapshot(model)
    first = drawn()
    for _ in range(2):
        assert drawn() != first
        snapshot.restore()
        assert drawn() == first


def test_model_whose_weights_may_change_in_backward_is_known() -> None:
    """Optimizers that run as soon as a gradient is there cannot be taken back."""
    model = nn.Linear(2, 2)
    assert not unsupported_reasons(RERUNS, Context(model))
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "hook on a parameter" in unsupported_reasons(RERUNS, Context(model))[0]


def test_peer_error_pickles() -> None:
    """Launchers send errors of their workers on."""
    copied = pickle.loads(pickle.dumps(PeerMemoryError(3)))
    assert copied.attempts == 3
    assert "3 attempt(s)" in str(copied)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits and shows what a process maps like this")
def test_real_lack_of_memory_is_recovered() -> None:
    """A process that may map no more than it has and some."""
    script = Path(__file__).parents[1] / "out_of_memory_run.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", "retries,", "equal", "True"]


def test_engine_learns_nothing_from_a_failed_attempt() -> None:
    """What is remembered of the last pass is as before, which nothing but the next audit would show."""
    model, loss_of = pressure.make_model("perceptron")
    engine = engine_for(model, "auto", audit_every=2)
    engine.audit(lambda: loss_of(model, 0))
    pressure.backward(engine, model, loss_of)
    engine.finish_step()
    restore, before = engine.snapshot(), engine.state_dict()
    engine.audit(lambda: loss_of(model, 1))
    engine.treat(Treatments({"0": True}))
    with engine.compress():
        model[:4](normal(64, 64)).sum().backward()
    assert engine.state_dict() != before
    restore()
    assert engine.state_dict() == before
    assert engine.finish_step() == StepStatistics()


def test_devices_get_their_random_state_back_and_give_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device of a kind that has several, and the one of type mps, whose functions take no device."""
    called: list[tuple[Any, ...]] = []

    class Module:
        def __init__(self, device: Any) -> None:
            self.kind = torch.device(device).type

        def get_rng_state(self, *device: torch.device) -> str:
            return f"state of {self.kind}"

        def set_rng_state(self, *arguments: Any) -> None:
            called.append(arguments)

        def empty_cache(self) -> None:
            called.append((self.kind,))

    monkeypatch.setattr(torch, "get_device_module", Module)
    cuda, mps, cpu = torch.device("cuda", 1), torch.device("mps", 0), torch.device("cpu")
    RandomNumbers([cuda, mps, cpu]).restore()
    release_memory([cuda, torch.device("cuda", 0), cpu])
    assert called == [("state of cuda", cuda), ("state of mps",), ("cuda",)]
