"""Which kernels a device gets, what is said where there are none, and that broken ones are not used."""

from __future__ import annotations

import logging
import sys
from functools import lru_cache

import numba
import pytest
import torch

from daf_kernels import NoKernelError, dispatch, load_backend
from daf_kernels.backend import WrongBytesError
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu import compile_ahead, compile_cache, loader_pages
from daf_kernels.cpu.backend import CpuBackend
from daf_kernels.reference.backend import ReferenceBackend
from tests.kernels.triton_device import DEVICE


def test_the_cpu_has_kernels() -> None:
    assert isinstance(load_backend(torch.device("cpu")), CpuBackend)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:1"])
def test_the_reference_works_on_any_device(device: str) -> None:
    assert isinstance(load_backend(torch.device(device), "reference"), ReferenceBackend)


def test_nothing_is_kept_of_what_has_no_values() -> None:
    with pytest.raises(NoKernelError, match="device 'meta' have no values"):
        load_backend(torch.device("meta"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that torch describes and Triton never sees; what was said of others is forgotten."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(dispatch, "_build_driver", lambda: None)
    monkeypatch.setattr(dispatch, "_warn_once", lru_cache(dispatch._warn_once.__wrapped__))
    monkeypatch.setattr(dispatch, "_load_triton", lru_cache(dispatch._load_triton.__wrapped__))
    return torch.device("cuda:0")


def warnings_of(caplog: pytest.LogCaptureFixture, device: torch.device) -> list[str]:
    """Loads the kernels of a device that has none, twice, and returns what is said."""
    with caplog.at_level(logging.WARNING, logger="daf"):
        for _ in range(2):
            assert isinstance(load_backend(device), ReferenceBackend)
    return caplog.messages


def test_an_old_gpu_works_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    (message,) = warnings_of(caplog, gpu)
    assert "device 'cuda' with plain torch operations" in message
    assert "its compute capability is 7.5, and kernels need 8.0" in message


def test_without_triton_a_gpu_works_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    monkeypatch.setitem(sys.modules, "daf_kernels.triton.backend", None)
    (message,) = warnings_of(caplog, gpu)
    assert "Triton cannot be imported" in message
    assert "pip install triton" in message


def test_without_a_compiler_a_gpu_works_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    def no_compiler() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(dispatch, "_build_driver", no_compiler)
    (message,) = warnings_of(caplog, gpu)
    assert "Failed to find C compiler" in message
    assert "needs a C compiler" in message


def test_a_gpu_whose_driver_is_too_old_works_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    from daf_kernels.triton import backend

    def load(_device: torch.device) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(backend, "load", load)
    (message,) = warnings_of(caplog, gpu)
    assert "device 'cuda' with plain torch operations" in message
    assert "cannot be compiled or run (RuntimeError: Triton Error [CUDA]: device kernel image is invalid)" in message
    assert "driver may be older" in message


@pytest.mark.parametrize("error", [WrongBytesError("other bytes"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_a_slower_way_would_hide_is_raised(
    monkeypatch: pytest.MonkeyPatch, gpu: torch.device, error: Exception
) -> None:
    """A GPU that computes wrongly, and one that has no memory left."""
    from daf_kernels.triton import backend

    def load(_device: torch.device) -> None:
        raise error

    monkeypatch.setattr(backend, "load", load)
    with pytest.raises(type(error), match=str(error)):
        load_backend(gpu)


def test_a_cpu_works_slowly_where_numba_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_warn_once", lru_cache(dispatch._warn_once.__wrapped__))
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    (message,) = warnings_of(caplog, torch.device("cpu"))
    assert "device 'cpu' with plain torch operations" in message
    assert "NUMBA_DISABLE_JIT is set" in message


def test_another_device_works_slowly(caplog: pytest.LogCaptureFixture, gpu: torch.device) -> None:
    (message,) = warnings_of(caplog, torch.device("xpu"))
    assert "device 'xpu'" in message
    assert "the GPUs that torch calls 'cuda'" in message


def test_a_gpu_has_kernels(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    """They are loaded once for each GPU, and looked at."""
    from daf_kernels.triton import backend

    loaded: list[torch.device] = []
    monkeypatch.setattr(backend, "load", lambda device: loaded.append(device) or backend.TritonBackend())
    for index in (0, 0, 1):
        assert isinstance(load_backend(torch.device("cuda", index)), backend.TritonBackend)
    assert loaded == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_triton_kernels_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted here: they give the reference's bytes, and a backend that gives others is refused."""
    from daf_kernels.triton import backend

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a device")
    assert isinstance(backend.load(DEVICE), backend.TritonBackend)
    monkeypatch.setattr(backend, "launch_over_blocks", lambda *_, **__: None)
    with pytest.raises(WrongBytesError, match="other bytes than the reference on a device"):
        backend.load(DEVICE)


@pytest.mark.parametrize("compiled", [0, 2])
@pytest.mark.parametrize("kept", [True, False])
def test_only_compilations_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiled: int, kept: bool
) -> None:
    """Whoever waits for a compiler learns why, and whether it will happen again; a busy machine is no compiler."""
    counts = iter([3, 3 + compiled])
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda: None)
    monkeypatch.setattr(cpu, "warm_up", lambda: 12.34)
    monkeypatch.setattr(compile_cache, "compilations", lambda: next(counts))
    monkeypatch.setattr(compile_cache, "_not_kept", [] if kept else ["no room"])
    with caplog.at_level(logging.INFO, logger="daf"):
        load_backend(torch.device("cpu"))
    again = "the next run finds them on disk" if kept else "does so again: they cannot be kept on disk (no room). Set"
    assert len(caplog.records) == bool(compiled)
    assert all("compiled its CPU kernels in 12.3 s; " in message for message in caplog.messages)
    assert all(again in message for message in caplog.messages)


def test_the_compiler_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find its pages takes longer than all else that an engine begins with."""
    found: list[None] = []
    monkeypatch.setattr(loader_pages, "give_back_compiler", lambda: found.append(None))
    dispatch._give_back_compiler.cache_clear()
    for _ in range(3):
        load_backend(torch.device("cpu"))
    assert len(found) == 1
    monkeypatch.setattr(compile_cache, "_kernels", [*compile_cache._kernels, compile_cache._kernels[0]])
    load_backend(torch.device("cpu"))
    assert len(found) == 2  # more are loaded now
    dispatch._give_back_compiler.cache_clear()


@pytest.mark.parametrize(
    ("method", "result"), [("decode", None), ("two_values", None), ("encode_mask", False), ("decode_mask", None)]
)
def test_kernels_that_give_back_something_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, method: str, result: object
) -> None:
    """A broken compiler is found at the start, not in the loss."""
    monkeypatch.setattr(CpuBackend, method, lambda *_: result)
    with pytest.raises(WrongBytesError, match="reinstall numba"):
        load_backend(torch.device("cpu"))
