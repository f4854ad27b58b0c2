"""What the saving thread, and others, do while a tensor is in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.autograd.torch_private import number_of
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.pending import PackJob
from daf_core.saved_tensors.store import ActivationStore
from tests.core.harness import LARGE, Scale, assert_empty, engine_for, normal
from tests.core.paces import Gate, late


def test_release_counts_after_what_was_saved_before() -> None:
    """What the saving thread itself releases makes no room for a tensor that was sent off before."""
    peaks = []
    for packing in ("device", "workers"):
        engine = engine_for(model := Scale(), 8, packing=packing)
        with engine.compress():
            earlier = model(normal(*LARGE))
        held = engine.held_bytes
        with Gate() as gate, engine.compress():
            later = model(normal(*LARGE, seed=1))
            del earlier
            gate.set()
        peaks.append(engine.finish_step().held_bytes)
        del later
        assert_empty(engine)
    assert peaks == [2 * held, 2 * held]


def test_graph_that_only_packing_needed_is_gone_before_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the saving thread packs itself, as the result of a ReLU, has the room that it leaves."""
    held: list[int] = []
    engine = engine_for(nn.Linear(1, 1), 8, packing="workers")
    store = ActivationStore.store

    def watch(self: ActivationStore, saved: SavedTensor, derivation: Derivation) -> Any:
        if saved.site.op == RELU:
            held.append(engine._pagers.held_bytes)
        return store(self, saved, derivation)

    monkeypatch.setattr(ActivationStore, "store", watch)
    x = normal(*LARGE).requires_grad_()
    for _ in range(2):  # until it is known who reads a tensor, graphs live on
        held.clear()
        with engine.compress():
            for _ in range(20):
                x.mul(2).exp().sin()
                kept = x.cos()
                x.relu()
    assert held == [engine.held_bytes] * 20
    del kept


def test_graph_that_dies_in_another_thread() -> None:
    """A thread that has saved more does not make a tensor look packed that is in flight."""
    engine = engine_for(model := Scale(), 8, packing="workers")
    for seed in range(9):
        with engine.compress():
            model(normal(*LARGE, seed=seed))
    outputs: list[Tensor] = []
    values: list[Tensor] = []
    saved, dropped = threading.Event(), threading.Event()

    def work() -> None:
        with engine.compress():
            outputs.append(model(normal(*LARGE)))
            saved.set()
            assert dropped.wait(30)
            with (gate := Gate()) as opened:
                output = model(normal(*LARGE, seed=1))
                assert gate.reached.wait(30)
                threading.Timer(0.05, opened.set).start()
                node: Any = output.grad_fn
                values.append(node._saved_self)

    thread = threading.Thread(target=work)
    thread.start()
    assert saved.wait(30)
    outputs.clear()
    dropped.set()
    thread.join(30)
    assert (values[0] - normal(*LARGE, seed=1)).abs().max() < 0.05
    assert_empty(engine)


def test_nothing_is_derived_from_what_was_changed_in_flight() -> None:
    """The factor of a product may be changed where its own backward is not run."""
    x, value = normal(4, 32, 64).requires_grad_(), normal(4, 64, 32).requires_grad_()
    found = []
    for packing in ("device", "workers"):
        torch.manual_seed(0)
        engine = engine_for(nn.Linear(1, 1), 8, packing=packing)
        with (gate := Gate()) as opened, engine.compress():
            probabilities = x.softmax(-1)
            product = F.dropout(probabilities, 0.5) @ value
            with torch.no_grad():
                probabilities.fill_(1.0)
            assert packing == "device" or gate.reached.wait(30)
            opened.set()
        found += torch.autograd.grad(product.sum(), [value])
    assert (found[0] - found[1]).abs().max() <= 0.02 * found[0].abs().max()


def test_statistics_inside_the_scope_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks gets what was saved so far."""
    late(monkeypatch)
    found = []
    for packing in ("device", "workers"):
        engine = engine_for(model := Scale(), 8, packing=packing)
        with engine.compress():
            outputs = [model(normal(*LARGE, seed=seed)) for seed in range(3)]
            held = engine.held_bytes, engine.lossy_bytes
            first = engine.finish_step()
            outputs += [model(normal(*LARGE, seed=seed)) for seed in range(3)]
            engine.finish_backward()
            outputs.append(model(normal(*LARGE)))
        second = engine.finish_step()
        found.append([held, first.stored_as, first.held_bytes, second.stored_as, second.raw_bytes])
        del outputs
    assert found[0] == found[1]


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("threads", ["one", "two"])
def test_backward_inside_the_scope_frees_what_packing_looks_at(threads: str) -> None:
    """What was saved before it is derived all the same, also where backward has a thread of its own, as on a GPU."""
    stored = []
    for packing in ("device", "workers"):
        norm, scale = nn.LayerNorm(64), Scale()
        engine = engine_for(nn.ModuleList([norm, scale]), 8, packing=packing)
        x = normal(*LARGE).requires_grad_()
        with engine.compress():
            h = norm(x)
            loss = h.exp().sum()
            scaled = scale(h)
            if threads == "one":
                loss.backward()
            else:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
                del thread
        stored.append(engine.finish_step().stored_as)
        del h, loss, scaled
        assert_empty(engine)
    assert stored[0] == stored[1]
    assert stored[0]["normalized"] == 1


def test_interrupt_while_waiting_leaves_nothing(monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """Not even the graph behind the tensor that was waited for."""
    engine = engine_for(model := Scale(), 8, packing="workers")
    settle = PackJob.settle
    waits: list[PackJob] = []

    def interrupted(self: PackJob) -> None:
        waits.append(self)
        if len(waits) == 1:
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(PackJob, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt), engine.compress():
        model(normal(*LARGE))
    assert [flight.saved for flight in sent] == [None]
    sent.clear()
    waits.clear()
    assert_empty(engine)


@pytest.mark.parametrize("method", ["start", "join"])
def test_thread_that_cannot_start_or_is_not_waited_for(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the caller as it is, and the next pass is compressed."""
    engine = engine_for(model := Scale(), 8, packing="workers")

    def fail(*_: object) -> None:
        raise RuntimeError(method)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, method, fail)
        with pytest.raises(RuntimeError, match=f"^{method}$"), engine.compress():
            model(normal(*LARGE))
    engine.finish_step()
    with engine.compress():
        output = model(normal(*LARGE))
    assert engine.finish_step().stored_as["planes"] >= 1
    del output


@pytest.mark.parametrize("first", ["the block", "the worker"])
def test_the_input_of_a_block_that_is_recomputed_counts_once(first: str) -> None:
    """The worker stores it while the block, which runs, says that it does not save it."""
    engine = engine_for(nn.Linear(1, 1), 8, packing="workers")
    store, recorder = engine._packer.replayed_by, engine._recorder
    assert store is not None
    shelf = store.shelf
    storage, waited = normal(*LARGE).untyped_storage(), list[bool]()

    def meet() -> None:
        shelf.meet(number_of(storage), storage)

    def others(run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.1)
        waited.append(thread.is_alive())
        return thread

    threads, size_of = list[threading.Thread](), shelf.sharing.size_of

    def size(each: torch.UntypedStorage) -> int:
        if not threads:  # after it was seen that nobody has counted the storage, and before it is
            threads.append(others((lambda: shelf.pass_by(storage)) if first == "the worker" else meet))
        return size_of(each)

    shelf.sharing.size_of = size  # pyright: ignore[reportAttributeAccessIssue]
    meet() if first == "the worker" else shelf.pass_by(storage)
    threads[0].join()
    assert waited == [True]
    assert recorder.batch_raw_bytes + recorder.batch_unsaved_bytes == storage.nbytes()
