"""Which kernels a device gets, what is said where there are none, and that broken ones are not used."""

from __future__ import annotations

import logging

import pytest
import torch

from daf_kernels import NoKernelError, cpu, dispatch, load_backend
from daf_kernels.cpu import CpuBackend
from daf_kernels.reference_backend import ReferenceBackend


def test_the_cpu_has_kernels() -> None:
    assert isinstance(load_backend(torch.device("cpu")), CpuBackend)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:1"])
def test_the_reference_works_on_any_device(device: str) -> None:
    assert isinstance(load_backend(torch.device(device), "reference"), ReferenceBackend)


@pytest.mark.parametrize("device", ["meta", "cuda", "cuda:1"])
def test_a_device_without_kernels_is_named_with_those_that_have_some(device: str) -> None:
    allowed = ", ".join(dispatch.DEVICES_WITH_KERNELS)
    with pytest.raises(NoKernelError, match=f"no kernels for device '{device}'; devices with kernels: {allowed}$"):
        load_backend(torch.device(device))


@pytest.mark.parametrize(("seconds", "messages"), [(0.1, 0), (12.34, 1)])
def test_only_slow_warm_ups_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, messages: int
) -> None:
    """Whoever waits for a compiler learns why, and that it will not happen again."""
    monkeypatch.setattr(cpu, "warm_up", lambda: seconds)
    with caplog.at_level(logging.INFO, logger="daf"):
        load_backend(torch.device("cpu"))
    assert len(caplog.records) == messages
    assert all("compiled its CPU kernels in 12.3 s" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("method", "result"), [("decode", None), ("two_values", None), ("encode_mask", False), ("decode_mask", None)]
)
def test_kernels_that_give_back_something_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, method: str, result: object
) -> None:
    """A broken compiler is found at the start, not in the loss."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(CpuBackend, method, lambda *_: result)
    with pytest.raises(RuntimeError, match="reinstall numba"):
        load_backend(torch.device("cpu"))
