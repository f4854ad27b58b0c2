"""What a stored tensor costs the host of a GPU once steps are alike: a launch, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.memory.at_ease import LeasesAtEase
from daf_core.saved_tensors import backends
from daf_kernels.reference.backend import ReferenceBackend
from daf_kernels.triton.backend import TritonBackend
from daf_kernels.triton.direct import DirectCodec
from tests.core.harness import normal
from tests.kernels.pretended_gpu import Operations, pretend

WARM_STEPS = 5  # from the fifth on, tensors are stored and read by address
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels do not run on tensors of the CPU here")
STORING = ("encode", "encode_slopes", "encode_mask", "encode_nonzero")
READING = ("decode", "decode_slopes", "decode_mask", "rectify")
BY_ADDRESS = ("encode by address", "decode by address")


class Net(nn.Module):
    """Saves floats in groups that follow blocks, whole programs and not, the signs of a ReLU, and a GELU's slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(256), nn.Linear(256, 256)
        self.second, self.third = nn.Linear(256, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.gelu(self.first(self.norm(x)))))).square().mean()


def train(model: nn.Module, engine: ActivationEngine, step: int, device: str = "cpu") -> list[Tensor]:
    """Trains a step and returns its gradients."""
    model.zero_grad()
    with engine.compress():
        loss = model(normal(33, 256, seed=step).to(device))
    loss.backward()
    engine.finish_step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def counted(backend: TritonBackend, operations: Operations, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of a backend and of its codecs by their names, and the operations inside of them."""
    calls: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            with operations:
                return method(*arguments)

        return call

    for name in (*STORING, *READING):
        monkeypatch.setattr(backend, name, counting(name, getattr(backend, name)))
    for name in ("encode", "decode"):
        monkeypatch.setattr(DirectCodec, name, counting(f"{name} by address", getattr(DirectCodec, name)))
    return calls


@needs_none
@pytest.mark.parametrize("at_ease", [True, False], ids=["by address", "pages off the pool"])
def test_a_tensor_is_a_launch(monkeypatch: pytest.MonkeyPatch, at_ease: bool) -> None:
    """A step has besides them one copy of flags with one event; nothing is uploaded, set to zero or allocated."""
    if not at_ease:  # pages go back to the pool, and are taken off it again
        monkeypatch.setattr(LeasesAtEase, "_look_for_pressure", lambda pager: setattr(pager, "at_ease", False))
    records = []
    for is_gpu in (False, True):
        operations, backend = Operations(), TritonBackend() if is_gpu else ReferenceBackend()
        monkeypatch.setattr(backends, "load_backend", lambda *_, backend=backend: backend)
        torch.manual_seed(0)
        model = Net()
        engine = ActivationEngine(model, DAFConfig(precision=4, packing="device", audit_every=None))
        if isinstance(backend, TritonBackend):
            gpu, calls = pretend(monkeypatch, operations), counted(backend, operations, monkeypatch)
        gradients = []
        for step in range(WARM_STEPS + 2):
            if is_gpu and step >= WARM_STEPS:
                operations.names.clear()
                calls.clear()
                launches, events, uploads = gpu.given()
            gradients += train(model, engine, step)
            if is_gpu and step >= WARM_STEPS:
                assert sum(calls[name] for name in (*STORING, BY_ADDRESS[0])) >= 4
                assert sum(calls[name] for name in (*READING, BY_ADDRESS[1])) >= 4
                assert all((calls[name] >= 3) is at_ease for name in BY_ADDRESS)
                assert gpu.given() == (launches + calls.total(), events + 1, uploads)
                assert operations.names == []
        records.append(gradients)
        engine.close()
    assert all(torch.equal(*pair) for pair in zip(*records, strict=True))


@needs_gpu
def test_a_tensor_is_a_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's profiler sees it: besides the launches, a copy of flags to the host, and of the batch to the GPU."""
    operations, backend = Operations(), TritonBackend()
    monkeypatch.setattr(backends, "load_backend", lambda *_: backend)
    calls = counted(backend, operations, monkeypatch)
    model = Net().to("cuda")
    engine = ActivationEngine(model, DAFConfig(precision=4, packing="device", audit_every=None))
    for step in range(WARM_STEPS):
        train(model, engine, step, "cuda")
    torch.cuda.synchronize()
    operations.names.clear()
    calls.clear()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        train(model, engine, WARM_STEPS, "cuda")
        torch.cuda.synchronize()
    given = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum(name.startswith(("encode_", "decode_", "rectify")) for name in given) == calls.total() >= 8
    assert sum(name.startswith("Memcpy HtoD") for name in given) == 1
    assert sum(name.startswith("Memcpy DtoH") for name in given) == 1
    assert operations.names == []
