"""What the CPU packs for a GPU, on a machine that has one: the link itself, and the same training."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from daf_core import ActivationEngine, DAFConfig
from daf_core.memory.pages.host_linked_pool import LinkedPool
from daf_kernels import host_bridge
from daf_kernels.host.link import HostBridge
from tests.core.harness import LARGE, Scale, make_model, normal
from tests.core.test_gpu_kernels import Net

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda", 0)


def gradients_of(net: Net, packing: Any, stream: Any, **options: Any) -> tuple[list[Tensor], list[int]]:
    """Returns the gradients of three steps with dropout, and the bytes held at most in each."""
    torch.manual_seed(0)
    model = copy.deepcopy(net).to(GPU)
    engine = ActivationEngine(model, DAFConfig(packing=packing, audit_every=None, **options))
    found, held = [], []
    with torch.cuda.stream(stream):
        for step in range(3):
            model.zero_grad()
            with engine.compress():
                loss = model(normal(512, 64, seed=step).to(GPU))
            assert isinstance(engine._pagers.on(GPU).pool, LinkedPool) == (packing != "device")
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            held.append(engine.finish_step().held_bytes)
            del loss
            assert (engine.leased_pages, engine.held_bytes) == (0, 0)
    torch.cuda.synchronize()
    engine.close()
    return found, held


@needs_gpu
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": 4}, id="4 bits"),
        pytest.param({"precision": 2, "rounding": "stochastic"}, id="2 bits, stochastic"),
        pytest.param({"precision": 8, "memory_budget": "300KB"}, id="a budget: pages in both memories"),
        pytest.param({"precision": "exact"}, id="exact"),
    ],
)
def test_gradients_are_those_of_packing_on_the_gpu(options: dict[str, Any], own_stream: bool) -> None:
    """On any stream that the model computes on."""
    stream, net = torch.cuda.Stream() if own_stream else torch.cuda.default_stream(), Net()
    expected, expected_held = gradients_of(net, "device", stream, **options)
    found, held = gradients_of(net, "workers", stream, **options)
    assert held == expected_held
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(found, expected, strict=True))


@needs_gpu
def test_values_are_those_of_when_they_are_made() -> None:
    """The GPU is far behind when the tensor is saved."""
    model = Scale().to(GPU)
    engine = ActivationEngine(model, DAFConfig(precision=8, packing="workers"))
    values = normal(*LARGE).to(GPU)
    with engine.compress():
        torch.cuda._sleep(200_000_000)
        saved: Any = model(values.sin()).grad_fn
    assert (saved._saved_self - values.sin()).abs().max() < 0.05


@needs_gpu
def test_pages_take_no_memory_of_the_gpu() -> None:
    """What is packed lies in host memory until backward asks for it."""
    model, _ = make_model("mlp")
    model, values = model.to(GPU), normal(8192, 64).to(GPU)
    model(values).sum().backward()  # cuBLAS takes its workspace when it is first used
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    engine = ActivationEngine(model, DAFConfig(precision=8, packing="workers"))
    with engine.compress():
        loss = model(values).square().mean()
    assert engine.held_bytes > 1 << 20
    assert torch.cuda.memory_allocated() - before < engine.held_bytes
    loss.backward()


@needs_gpu
def test_link_orders_copies_and_reads() -> None:
    """A copy begins when the values are made, also on another stream, and a read of host memory is waited for."""
    link = HostBridge(GPU)
    values, into = torch.zeros(1 << 20, device=GPU), link.reserve(4 << 20).view(torch.float32)
    torch.cuda._sleep(200_000_000)
    values += 1
    with link.after(link.mark()):
        link.copy(values, into).synchronize()
    assert bool((into == 1).all())
    torch.cuda._sleep(200_000_000)
    link.note_reads()
    link.await_reads()
    assert torch.cuda.current_stream(GPU).query()


def test_other_devices_have_no_link() -> None:
    assert host_bridge(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_link_gives_its_stream_what_belongs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, where no GPU would show what comes of it."""
    streams, calls = ["theirs"], []

    class Stream:
        cuda_stream = 7
        wait_event = staticmethod(lambda event: calls.append("wait"))

    class Event:
        record = staticmethod(lambda stream: calls.append(f"record {streams[-1]}"))
        synchronize = staticmethod(lambda: calls.append("synchronize"))

    @contextmanager
    def enter(stream: Stream) -> Generator[None]:
        streams.append("own")
        yield
        streams.pop()

    patches = {"Stream": lambda device: Stream(), "Event": Event, "stream": enter, "current_stream": lambda _: Stream()}
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)
    link, into = host_bridge(GPU), torch.zeros(3)
    assert isinstance(link, HostBridge)
    with link.after(link.mark()):
        link.copy(torch.ones(3), into).synchronize()
    assert calls == ["record theirs", "wait", "record own", "synchronize"]
    assert into.tolist() == [1.0] * 3
    calls.clear()
    link.note_reads()
    link.note_reads()
    link.await_reads()
    assert calls == ["record theirs", "record theirs", "synchronize"]
    with pytest.raises(MemoryError, match="the system gives no 33 MB of pinned memory"):
        link.reserve(33_000_000)
