"""What is in flight: how much of it, who waits for it, how long it lives, and where its errors surface."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core import ActivationEngine
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.saved_tensors import background
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.pending import PackJob
from tests.core import pressure
from tests.core.books import check_pager
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
)
from tests.core.paces import Gate, late


def background_of(engine: ActivationEngine) -> BackgroundPacker:
    """Returns the background of the forward pass that is running."""
    found = engine._packer._own.background
    assert found is not None
    return found


def flying_bytes(engine: ActivationEngine) -> int:
    """Returns the bytes of all tensors in flight."""
    return background_of(engine)._window.size


def test_budget_covers_what_is_in_flight(monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """Tensors that are kept for packing alone are held too: with the pages they never exceed the budget."""
    late(monkeypatch)
    model, loss_of = pressure.make_model("encoder")
    budget = 2 * pressure.peak_of("encoder", 8)
    engine = engine_for(model, 8, packing="workers", memory_budget=budget)
    seen = pressure.held_with_window(engine, monkeypatch)
    pressure.backward(engine, model, loss_of)
    assert budget / 2 < max(seen) <= budget
    assert len(sent) > 1


def test_few_bytes_are_in_flight(monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """Without a budget too; what is too large by itself is packed where it is saved."""
    monkeypatch.setattr(background, "PENDING_BYTES", 100_000)
    late(monkeypatch)
    model, seen = Scale(), []
    engine = engine_for(model, 4, packing="workers")
    with engine.compress():
        for rows in (128, 128, 128, 300, 500, 128):  # of 256 bytes
            model(normal(rows, 64))
            seen.append(flying_bytes(engine))
    assert seen == [32_768, 65_536, 98_304, 76_800, 0, 32_768]
    assert [flight.size for flight in sent] == [32_768, 32_768, 32_768, 76_800, 32_768]


def test_tensor_is_kept_alive_until_it_is_packed_and_no_longer(sent: list[PackJob]) -> None:
    """The memory is free for others before the forward pass ends."""
    model = Scale()
    engine = engine_for(model, 4, packing="workers")
    backward(model, lambda model, _: model(normal(*LARGE)).sum(), engine)  # values wait until their reader is known
    sent.clear()
    with Gate() as gate, engine.compress():
        x = normal(*LARGE)
        model(x)
        storage = StorageWeakRef(x.untyped_storage())
        del x
        assert not storage.expired()
        gate.set()
        sent[0].done.wait()
        assert storage.expired()


def test_memory_that_is_freed_is_not_used_again() -> None:
    """A tensor that only the background needs keeps its memory from whoever allocates next."""
    model = Scale()
    engine = engine_for(model, 8, packing="workers")
    with Gate() as gate, engine.compress():
        outputs = [model(normal(*LARGE, seed=seed)) for seed in range(8)]
        others = [torch.full(LARGE, 1e6) for _ in range(8)]
        gate.set()
    for seed, output in enumerate(outputs):
        node: Any = output.grad_fn
        assert (node._saved_self - normal(*LARGE, seed=seed)).abs().max() < 0.05
    assert len(others) == 8


def test_unpacking_inside_the_scope_waits() -> None:
    """Whoever asks for a tensor that has not landed gets it when it has."""
    model = Scale()
    engine = engine_for(model, 8, packing="workers")
    with (gate := Gate()) as opened, engine.compress():
        output = model(normal(*LARGE))
        assert gate.reached.wait(30)
        threading.Timer(0.05, opened.set).start()
        node: Any = output.grad_fn
        assert (node._saved_self - normal(*LARGE)).abs().max() < 0.05


def test_backward_inside_the_scope() -> None:
    """What it needs is waited for."""
    results = []
    for packing in ("device", "workers"):
        model, loss_of = make_model("mlp")
        engine = engine_for(model, 4, packing=packing)
        with engine.compress():
            loss_of(model, 0).backward()
        results.append(gradients(model))
        assert_empty(engine)
    assert_same(results[1], results[0])


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("made", ["leaf", "result"])
def test_graph_that_dies_in_the_pass(made: str) -> None:
    """What it held is given up in the order of saving, so that the same planes are dropped each time.

    A tensor that an operator made keeps its graph alive while it is in flight, and is shared as long.
    """
    found = []
    for packing in ("device", "workers", "workers"):
        x = normal(*LARGE).requires_grad_(made == "result")
        engine = engine_for(model := Scale(), 8, packing=packing, memory_budget=48 * PAGE_BYTES)
        with engine.compress():
            outputs = []
            for seed in range(12):
                model(x if made == "leaf" else x * 2)
                outputs.append(model(normal(*LARGE, seed=100 + seed)))
        step = engine.finish_step()
        found.append((step.stored_as, step.dropped_planes, step.held_bytes))
        del outputs
        assert_empty(engine)
        check_pager(pager_of(engine))
    assert found[1] == found[2]
    assert found[0][1] > 0
    assert made != "leaf" or found[0] == found[1]


def test_graph_in_flight_is_let_go_with_the_pass(sent: list[PackJob]) -> None:
    """The tensor itself is never kept, and the graph behind it not beyond the pass."""
    engine = engine_for(model := nn.Linear(64, 64), 4, packing="workers")
    with Gate() as gate, engine.compress():
        output = model(normal(*LARGE)).exp()
        alive = weakref.ref(output)
        del output
        assert alive() is None
        gate.set()
    assert [flight.saved for flight in sent] == [None, None]
    assert_empty(engine)


class _Broken(RuntimeError):
    pass


def test_exception_in_the_forward_pass_leaves_nothing(monkeypatch: pytest.MonkeyPatch, sent: list[PackJob]) -> None:
    """No thread runs, no page is leased and no tensor kept when it reaches the caller."""
    late(monkeypatch)
    model = Scale()
    engine = engine_for(model, 4, packing="workers")

    def fail() -> None:
        with engine.compress():
            outputs = [model(normal(*LARGE, seed=seed)) for seed in range(4)]
            raise _Broken(len(outputs))

    with pytest.raises(_Broken) as raised:
        fail()
    assert not packing_threads()
    assert len(sent) == 4
    assert all(flight.saved is None for flight in sent)
    del raised
    sent.clear()
    gc.collect()
    assert_empty(engine)
    with engine.compress():
        loss = model(normal(*LARGE)).sum()
    loss.backward()
    assert_empty(engine)


def test_what_was_given_up_with_a_pass_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of a graph from a pass that failed before all was packed."""
    late(monkeypatch)
    engine, losses = engine_for(model := Scale(), 4, packing="workers"), []

    def run() -> None:
        with engine.compress():
            losses.append(sum(model(normal(*LARGE, seed=seed)).sum() for seed in range(4)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    with pytest.raises(RuntimeError, match="the forward pass that saved this tensor ended with an error"):
        losses.pop().backward()


def _break_encoding(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Makes one encoding fail."""
    write, calls = PlanesActivation._write, []

    def broken(*arguments: Any) -> bool:
        calls.append(1)
        if len(calls) == failing:
            raise _Broken("kernel")
        return write(*arguments)

    monkeypatch.setattr(PlanesActivation, "_write", staticmethod(broken))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_error_of_the_background_is_raised_in_the_pass(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the pass; the next one works."""
    _break_encoding(monkeypatch, failing)
    model = Scale()
    engine = engine_for(model, 4, packing="workers")

    def run() -> None:
        with engine.compress():
            for seed in range(3):
                model(normal(*LARGE, seed=seed))

    with pytest.raises(_Broken, match="kernel"):
        run()
    gc.collect()  # the error refers to the frames that it came from
    assert_empty(engine)
    run()
    assert_empty(engine)


def test_error_of_the_background_is_raised_by_who_needs_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the pass."""
    _break_encoding(monkeypatch, 1)
    engine = engine_for(model := Scale(), 4, packing="workers")
    with pytest.raises(_Broken, match="kernel"), engine.compress():
        model(normal(*LARGE)).sum().backward()


def packing_threads() -> list[threading.Thread]:
    """The threads that pack now."""
    return [thread for thread in threading.enumerate() if thread.name == "daf-pack"]


def test_many_small_steps(sent: list[PackJob]) -> None:
    """No page, byte or thread is lost over 300 steps."""
    model = Scale()
    engine = engine_for(model, 4, packing="workers", memory_budget="400KB")
    for step in range(300):
        with engine.compress():
            loss = model(normal(*LARGE, seed=step)).sum() + model(normal(*LARGE, seed=-step)).sum()
            assert len(packing_threads()) == 1
        assert not packing_threads()
        loss.backward()
        engine.finish_step()
        del loss
        sent.clear()
        assert_empty(engine)
    check_pager(pager_of(engine))


def test_many_threads_save_at_once() -> None:
    """Each gets its own gradient, and has a background of its own."""
    model = nn.Linear(1, 1)
    engine = engine_for(model, 8, packing="workers", memory_budget="2MB")
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(20):
                x = normal(*LARGE, seed=100 * seed + step).requires_grad_()
                with engine.compress():
                    loss = x.sin().exp().sum()
                loss.backward()
                expected = x.detach().sin().exp() * x.detach().cos()
                assert (x.grad - expected).abs().max() < 0.1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert_empty(engine)
    check_pager(pager_of(engine))


def test_a_pass_that_saves_nothing_starts_no_thread(sent: list[PackJob]) -> None:
    """Nor does evaluation, or a rehearsal."""
    engine = engine_for(model := Scale(), 4, packing="workers")
    with engine.compress(), torch.no_grad():
        model(normal(*LARGE))
        assert not packing_threads()
    engine.audit(lambda: model(normal(*LARGE)).sum())
    assert not sent


def test_in_the_order_of_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed at once, as the results of a ReLU, comes after what was sent off before."""
    late(monkeypatch)
    order: list[str] = []
    engine = engine_for(nn.Linear(64, 64), 4, packing="workers")
    store = type(engine._packer._store).store

    def noted(self: Any, saved: SavedTensor, derivation: Any) -> Any:
        order.append(f"{saved.site.op} {threading.current_thread().name == 'daf-pack'}")
        return store(self, saved, derivation)

    monkeypatch.setattr(type(engine._packer._store), "store", noted)
    x = normal(*LARGE).requires_grad_()
    with engine.compress():
        y: Tensor = x.sin().relu().exp()
    del y
    assert order == ["leaf True", "ReluBackward0 False", "ExpBackward0 True"]
