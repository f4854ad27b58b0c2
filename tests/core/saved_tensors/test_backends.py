"""Kernels follow a model to the device that it lies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from daf_core import ActivationEngine, DAFConfig, GraphCaptureError, UnsupportedDeviceError
from daf_core.saved_tensors import backends
from daf_core.saved_tensors.backends import Backends
from daf_kernels.reference.backend import ReferenceBackend
from tests.core.harness import make_model, normal
from tests.core.links import LateLink

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


@pytest.mark.parametrize("use", [ActivationEngine.compress, lambda engine: engine.probe_pass(pytest.fail)])
def test_a_model_that_loses_its_values_later(use: Any) -> None:
    """Said when it is used next, before anything runs."""
    model, loss_of = make_model("mlp")
    engine = ActivationEngine(model, DAFConfig(precision=4))
    model.to(META)
    with pytest.raises(UnsupportedDeviceError, match="device 'meta' have no values"):
        use(engine).__enter__()
    model.to_empty(device=CPU)
    with engine.compress():
        loss_of(model, 0)


def test_each_device_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model comes there; other devices keep theirs, as what lies there may still be wanted."""
    loaded: list[torch.device] = []

    def load(device: torch.device, _name: str) -> ReferenceBackend:
        loaded.append(device)
        return ReferenceBackend()

    monkeypatch.setattr(backends, "load_backend", load)
    model = nn.Linear(4, 4)
    found = Backends(model, DAFConfig())
    for device in (META, META, CPU, META):
        model.to_empty(device=device)
        found.follow()
        assert found.devices == {device}
    assert loaded == [CPU, META]
    assert (set(found), len(found)) == ({CPU, META}, 2)


def test_host_packs_for_itself_and_for_what_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a GPU unless that is asked for, nor for a device that the model has left."""
    monkeypatch.setattr(backends, "load_backend", lambda *_: ReferenceBackend())
    monkeypatch.setattr(backends, "host_bridge", lambda device: LateLink() if device == META else None)
    model = nn.Linear(4, 4)
    alone, linked = Backends(model, DAFConfig()), Backends(model, DAFConfig(packing="workers"))
    assert (alone.packs_on_host, linked.packs_on_host) == (True, True)
    model.to(META)
    for each in (alone, linked):
        each.follow()
    assert (alone.packs_on_host, linked.packs_on_host) == (False, True)
    assert (set(alone.links), set(linked.links)) == (set(), {META})


def test_pagers_know_links_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load_backend", lambda *_: ReferenceBackend())
    monkeypatch.setattr(backends, "host_bridge", lambda device: LateLink() if device == META else None)
    model = nn.Linear(4, 4)
    engine = ActivationEngine(model, DAFConfig(packing="workers"))
    model.to(META)
    engine._backends.follow()
    assert set(engine._pagers.links) == {META}


def test_a_capture_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch operations look at values, which would stop a capture with an error of CUDA's."""
    monkeypatch.setattr(backends, "load_backend", lambda *_: ReferenceBackend())
    model, _ = make_model("mlp")
    engine = ActivationEngine(model, DAFConfig(precision=4))
    monkeypatch.setattr("daf_core.saved_tensors.backends.is_capturing", lambda: True)
    with pytest.raises(GraphCaptureError, match=r"a CUDA graph is being captured, and torch operations.*daf doctor"):
        engine.compress().__enter__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_model_moves_to_a_gpu_after_it_was_prepared() -> None:
    """What it saves there is compressed."""
    model, _ = make_model("mlp")
    engine = ActivationEngine(model, DAFConfig(precision=4))
    model.to(GPU)
    with engine.compress():
        loss = model(normal(8192, 64).to(GPU)).square().mean()
    loss.backward()
    assert engine.finish_step().ratio > 4
