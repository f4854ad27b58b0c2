"""What a host packs for a device is what the device would pack, however late its copies are done."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core import ActivationEngine, DAFConfig, ModifiedInPlaceError
from daf_core.autograd.sites import ModuleScopes, Site
from daf_core.codecs.common_row import CommonRows, RowBlocks
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import capture
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pages.host_linked_pool import LinkedPool
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.readers.waiting import EXACT_MODE
from daf_core.saved_tensors import background
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.classify import TensorKind
from daf_core.saved_tensors.pending import PackJob
from daf_kernels.reference.backend import ReferenceBackend
from tests.core import pressure
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
    train,
)
from tests.core.links import LateLink, connect
from tests.core.paces import Gate


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> LateLink:
    return connect(monkeypatch)


def pool_of(engine: ActivationEngine) -> LinkedPool:
    pool = pager_of(engine).pool
    assert isinstance(pool, LinkedPool)
    return pool


def host_pages(engine: ActivationEngine) -> int:
    """Pages in host memory that are in use."""
    pager_of(engine).settle()
    return pool_of(engine)._host.used_pages


@pytest.mark.parametrize(("name", "precision"), [("transformer", "auto"), ("transformer", 2), ("rnn", 8)])
def test_same_training(name: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, weights and torch's random numbers of three steps, bit by bit."""
    model, loss = make_model(name)
    expected = train(model, loss, DAFConfig(precision=precision, packing="device"))
    link = connect(monkeypatch)
    assert_same(train(model, loss, DAFConfig(precision=precision, packing="workers")), expected)
    assert len(link.copied) >= 3


def test_what_rows_share_is_looked_for_where_they_are_packed(link: LateLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may not have made the values yet, and its thread would wait for them."""
    looked_at, blocks = list[Tensor](), CommonRows.blocks

    def counting(self: CommonRows, site: Any, geometry: Any, group: int, values: Tensor) -> RowBlocks | None:
        looked_at.append(values)
        return blocks(self, site, geometry, group, values)

    monkeypatch.setattr(CommonRows, "blocks", counting)
    model, loss = make_model("mlp")
    train(model, loss, DAFConfig(precision=4, packing="workers"), steps=1)
    assert looked_at
    assert all(link.has(values.data_ptr()) for values in looked_at)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_any_kernels_of_the_device_decode_what_the_host_packs(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = make_model("mlp")
    expected = train(model, loss, DAFConfig(precision=4, packing="device"), steps=1)
    if kernels == "triton":
        backend = pytest.importorskip("daf_kernels.triton.backend", reason="Triton is not installed").TritonBackend()
    else:
        backend = ReferenceBackend()
    link = connect(monkeypatch, backend)
    assert_same(train(model, loss, DAFConfig(precision=4, packing="workers"), steps=1), expected)
    assert link.copied


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("name", ["encoder", "resnet"])
def test_same_drops_under_a_budget(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of the device holds for pages in both memories together."""
    budget = max(int(share * pressure.peak_of(name, 8)), pressure.least_budget(name, 8))
    expected = pressure.steps(name, 2, packing="device", precision=8, memory_budget=budget)
    link = connect(monkeypatch)
    found = pressure.steps(name, 2, packing="workers", precision=8, memory_budget=budget)
    assert_same(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert all(step.peak_bytes <= budget for step in found[1])
    assert share > 0.5 or found[1][0].dropped_planes > 0
    assert link.copied or share == 0.5


@pytest.mark.parametrize("share", [0.6, 2.0])
def test_same_moves_to_the_spill_file(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"precision": 4, "spill_dir": str(tmp_path)}
    peak, least = pressure.peak_of("encoder", **options), pressure.least_budget("encoder", **options)
    options["memory_budget"] = max(int(share * peak), least)
    expected = pressure.steps("encoder", 2, packing="device", **options)
    connect(monkeypatch)
    found = pressure.steps("encoder", 2, packing="workers", **options)
    assert_same(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_every_form_is_packed_by_the_host(link: LateLink) -> None:
    """Indices, masks, tensors with holes, and values that are not finite and stay on the device."""
    indices = torch.arange(8192).flip(0)
    cases = {
        "planes": normal(*LARGE),
        "bitmask": (normal(*LARGE) > 0).float(),
        "narrow_int": indices,
        "raw": normal(*LARGE).where(normal(*LARGE) > -2, float("inf")),
    }
    for form, values in cases.items():
        engine = engine_for(model := Scale(), 8, packing="workers")
        with engine.compress():
            if form == "narrow_int":
                output: Any = normal(8192).requires_grad_().gather(0, values).grad_fn
                saved = "_saved_index"
            else:
                output, saved = model(values).grad_fn, "_saved_self"
        assert engine.finish_step().stored_as.get(form) == 1
        assert (host_pages(engine) > 0) == (form != "raw")
        error = (getattr(output, saved) - values).nan_to_num().abs().max()
        assert error < 0.05 if form == "planes" else error == 0
        del output
        assert_empty(engine)
    assert len(link.copied) == 1 + len(cases)  # a gather saves what it takes from, too


def test_holes_are_not_copied(link: LateLink) -> None:
    """Of a part of a larger tensor."""
    values = normal(128, 192)[:, 64:128]
    engine = engine_for(model := Scale(), 8, packing="workers")
    with engine.compress():
        node: Any = model(values).grad_fn
    assert (node._saved_self - values).abs().max() < 0.05
    assert link.copied == [values.numel() * 4]


def test_result_of_a_relu_stays_on_the_device(link: LateLink) -> None:
    """It is packed at once, and by the device."""
    engine = engine_for(nn.Linear(64, 64), 4, packing="workers")
    with engine.compress():
        y = normal(*LARGE).requires_grad_().relu()
        own = engine.leased_pages
        assert host_pages(engine) == 0
        z = y.exp()
    assert host_pages(engine) == engine.leased_pages - own > 0
    assert len(link.copied) == 1
    del y, z
    assert_empty(engine)


def test_tensor_is_kept_until_it_is_packed_and_no_longer(link: LateLink, sent: list[PackJob]) -> None:
    engine = engine_for(model := Scale(), 4, packing="workers")
    backward(model, lambda model, _: model(normal(*LARGE)).sum(), engine)  # values wait until their reader is known
    sent.clear()
    link.copied.clear()
    with Gate() as gate, engine.compress():
        x = normal(*LARGE)
        model(x)
        storage = StorageWeakRef(x.untyped_storage())
        del x
        assert not storage.expired()
        gate.set()
        packer = engine._packer._own.background
        assert packer is not None
        sent[0].done.wait()
        for timer in threading.enumerate():  # it holds the tensor that it has copied
            if isinstance(timer, threading.Timer):
                timer.join(30)
        assert storage.expired()
    assert link.copied == [128 * 64 * 4]


def test_one_buffer_takes_all_copies(link: LateLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as all that may be in flight: what is larger is packed at once."""
    monkeypatch.setattr(background, "PENDING_BYTES", 100_000)
    engine = engine_for(model := Scale(), 8, packing="workers")
    with engine.compress():
        nodes: list[Any] = [model(normal(rows, 64, seed=rows)).grad_fn for rows in (128, 390, 391, 128, 200)]
    for rows, node in zip((128, 390, 391, 128, 200), nodes, strict=True):
        assert (node._saved_self - normal(rows, 64, seed=rows)).abs().max() < 0.05
    assert link.copied == [256 * rows for rows in (128, 390, 128, 200)]
    assert sum(memory.nbytes == 100_000 for memory in link.reserved) == 1


def test_no_page_is_written_that_is_still_read(link: LateLink) -> None:
    """A backward inside the pass gives pages back before the device has read them, and a budget has no others."""
    engine = engine_for(model := Scale(), 8, packing="workers", memory_budget=64 * PAGE_BYTES)
    with engine.compress():
        for seed in range(12):
            model(normal(*LARGE, seed=seed)).sum().backward()
    assert len(link.copied) == 12
    assert link.reading
    assert_empty(engine)


def test_budget_covers_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 2 * pressure.peak_of("encoder", 8)
    connect(monkeypatch)
    model, loss_of = pressure.make_model("encoder")
    engine = engine_for(model, 8, packing="workers", memory_budget=budget)
    seen = pressure.held_with_window(engine, monkeypatch)
    pressure.backward(engine, model, loss_of)
    assert budget / 2 < max(seen) <= budget


@pytest.mark.parametrize("error", [RuntimeError("the device has fallen off"), MemoryError("no bytes")])
def test_errors_are_raised_in_the_pass(error: Exception, link: LateLink) -> None:
    """And nothing is left of it; the next one works."""
    engine = engine_for(model := Scale(), 4, packing="workers")

    def run() -> Tensor:
        with engine.compress():
            return model(normal(*LARGE)).sum()

    link.error = error
    with pytest.raises(type(error), match=str(error)):
        run()
    link.error = error.__traceback__ = None
    gc.collect()
    assert_empty(engine)
    run().backward()
    assert gradients(model)
    assert_empty(engine)


def test_all_that_flies_is_of_one_device() -> None:
    """What counts against whose budget is clear then; a model on several devices goes from one to the next."""
    meta = torch.device("meta")
    pagers = DevicePagers(DAFConfig(), links={meta: LateLink()})
    packer = BackgroundPacker(lambda saved: RawActivation(saved.tensor, None), lambda: None, pagers)
    flying = []
    for device in ("cpu", "cpu", "meta", "meta", "cpu"):
        saved = capture(
            torch.empty(*LARGE, device=device), TensorKind.RAW, Site("", "leaf", 0), EXACT_MODE, False, ModuleScopes()
        )
        assert packer.admits(saved)
        packer.send(saved)
        flying.append(len(packer._window))
    packer.close()
    assert flying == [1, 2, 1, 2, 1]


def test_change_in_place_is_an_error(link: LateLink) -> None:
    engine = engine_for(model := nn.Linear(64, 64), 8, packing="workers")
    with engine.compress():
        h = model(normal(*LARGE))
        loss = h.sin().sum()
        with torch.no_grad():
            h.mul_(2)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    assert link.copied


def test_packing_on_the_device_needs_no_link(link: LateLink, sent: list[PackJob]) -> None:
    engine = engine_for(model := Scale(), 4, packing="device")
    with engine.compress():
        model(normal(*LARGE))
    assert not isinstance(pager_of(engine).pool, LinkedPool)
    assert not sent
    assert not link.reserved


def test_auto_is_packing_on_the_device(link: LateLink, monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """Whether the host is faster is seen in backward too, which reads its memory, and was never measured."""
    monkeypatch.setattr("daf_core.saved_tensors.background_choice.idle_cores", lambda: 1)
    engine = engine_for(model := Scale(), 4)
    for _ in range(4):
        with engine.compress():
            model(normal(*LARGE))
    assert not isinstance(pager_of(engine).pool, LinkedPool)
    assert not link.reserved
