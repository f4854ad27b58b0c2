"""Rules 3 to 5: what lives how long, and who may unpack it how often and where."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.harness import (
    LARGE,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    gradients,
    make_model,
    normal,
    pager_of,
    watch,
)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "relu": torch.relu,
    "dropout": nn.Dropout(0.5),
}


@pytest.mark.parametrize("precision", ["exact", 8, 1])
@pytest.mark.parametrize("rows", [2, 128])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_rule_3_graph_that_never_runs_backward_leaks_nothing(
    function: Callable[[Tensor], Tensor], rows: int, precision: Any
) -> None:
    """An operator that saves its own output must not be tied into a cycle by what the hook keeps."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, precision)
    with engine.compress():
        output = function(model(normal(rows, 64)))
    assert engine.held_bytes > 0
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
    assert_empty(engine)


def test_rule_4_retain_graph_unpacks_the_same_values_again() -> None:
    """A second backward through the same graph gives the same gradients."""
    model, loss_of = make_model("transformer")
    engine = engine_for(model, 4)
    with engine.compress():
        loss = loss_of(model, 0)
    results = []
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        results.append(gradients(model))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert_empty(engine)


def test_rule_4_backward_twice_without_retain_graph_is_torchs_error() -> None:
    """DAF does not hide torch's own message."""
    model, loss_of = make_model("mlp")
    with engine_for(model, 4).compress():
        loss = loss_of(model, 0)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
def test_rule_4_double_backward(inside: bool) -> None:
    """create_graph works: bit-identical in exact mode, close at 8 bits, and nothing is left."""

    expected = _penalized(None, inside)
    assert_same(_penalized("exact", inside), expected)
    assert 0 < error(_penalized(8, inside), expected) < 0.05


def _penalized(precision: Any, inside: bool) -> list[Tensor]:
    """Returns the gradients of a gradient penalty, taken inside DAF's scope or after it."""
    model, loss_of = make_model("mlp")
    engine = engine_for(model, precision) if precision else None
    with engine.compress() if engine else nullcontext():
        loss = loss_of(model, 0)
        if inside:
            _penalize(model, loss)
    if not inside:
        _penalize(model, loss)
    del loss
    if engine:
        assert_empty(engine)
    return gradients(model)


def _penalize(model: nn.Module, loss: Tensor) -> None:
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in first).backward()


class Forces(nn.Module):
    """Fits the gradient of an energy by the inputs, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())

    def forward(self, inputs: Tensor, scope: AbstractContextManager[None]) -> Tensor:
        inputs = inputs.requires_grad_()
        with scope:
            energy = self.layers(inputs).sum()
        forces = torch.autograd.grad(energy, inputs, create_graph=True)[0]
        return (forces - inputs.cos()).square().mean()


@pytest.mark.parametrize("inside", [True, False], ids=["gradient-inside", "gradient-outside"])
def test_rule_4_what_a_differentiated_gradient_reads_stays_exact(
    inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a part of the loss: after 1200 steps one at 4 bits was twice what it was reported to be, or half."""
    model = Forces()
    engine = engine_for(model, 4)
    for step in range(4):
        losses, found = list[Tensor](), list[list[Tensor]]()
        for compress in (nullcontext, engine.compress):
            model.zero_grad()
            with compress() if inside else nullcontext():
                loss = model(normal(512, 8, seed=step), nullcontext() if inside else compress())
            loss.backward()
            losses.append(loss.detach())
            found.append(gradients(model))
        assert torch.equal(*losses) is (step > 0)
        assert error(found[1], found[0]) < (0.3 if step == 0 else 0.05)
    assert [record.message.split(",")[0] for record in caplog.records] == ["a gradient is taken with create_graph=True"]


def test_rule_4_within_a_budget_it_has_the_bits_that_there_are(caplog: pytest.LogCaptureFixture) -> None:
    model = Forces()
    engine = engine_for(model, 4, memory_budget="100kB")
    for step in range(4):
        with engine.compress():
            loss = model(normal(512, 8, seed=step), nullcontext())
        loss.backward()
        assert pager_of(engine).finish_step().peak_bytes <= 100_000
    assert ["without memory_budget" in record.message for record in caplog.records] == [True]


def test_rule_4_a_plain_gradient_keeps_nothing_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_of = make_model("mlp")
    engine = engine_for(model, 8)
    for _ in range(3):
        backward(model, loss_of, engine)
    assert engine.finish_step().stored_as["planes"]
    assert not caplog.records


@pytest.mark.parametrize("function", ["exp", "softmax", "relu"])
def test_rule_4_every_unpack_is_private(function: str) -> None:
    """Writing into an unpacked tensor changes neither the next one nor the gradient."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    with engine.compress():
        output = FUNCTIONS[function](model(normal(*LARGE)))
    node: Any = output.grad_fn
    first = node._saved_result
    before = first.detach().clone()
    first.detach().fill_(77)
    second = node._saved_result
    assert torch.equal(second, before)
    assert second.data_ptr() != first.data_ptr()
    assert engine.finish_step().stored_as.keys() & {"planes", "signs"}


def test_rule_4_two_unpacked_neighbours_do_not_share_memory() -> None:
    """The base of an unpacked tensor holds nothing but itself: no view of a pool page is ever handed out."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    with engine.compress():
        node: Any = model(normal(*LARGE)).exp().grad_fn
    assert node._saved_result.untyped_storage().nbytes() == 4 * 128 * 64


def test_rule_5_handles_die_with_their_nodes() -> None:
    """Nothing is freed at unpack, everything when backward releases the graph."""
    model, loss_of = make_model("transformer")
    engine = engine_for(model, 4)
    handles: list[weakref.ref[Any]] = []
    watch(engine, lambda packed: handles.append(weakref.ref(packed)) if hasattr(packed, "stored") else None)
    with engine.compress():
        loss = loss_of(model, 0)
    pages, held = engine.leased_pages, engine.held_bytes
    assert pages > 0
    loss.backward(retain_graph=True)
    assert (engine.leased_pages, engine.held_bytes) == (pages, held)
    assert all(handle() is not None for handle in handles)
    loss.backward()
    assert all(handle() is None for handle in handles)
    assert_empty(engine)


def test_rule_5_dead_branch_is_held_until_it_is_dropped() -> None:
    """A branch that backward never visits keeps its pages as long as its output lives, not longer."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    with engine.compress():
        used, unused = model(normal(*LARGE)).sin(), model(normal(*LARGE, seed=1)).exp()
    used.sum().backward()
    assert engine.leased_pages == 2 * 4
    del unused
    assert_empty(engine)


def test_rule_5_forward_without_backward_then_the_next_step() -> None:
    """A skipped backward, as at the end of an epoch, disturbs no later step."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of, engine_for(model, 4))
    engine = engine_for(model, 4)
    with engine.compress():
        skipped = loss_of(model, 7)
    assert_same(backward(model, loss_of, engine), expected)
    assert engine.leased_pages > 0
    del skipped
    assert_empty(engine)


def test_rule_5_backward_in_another_thread() -> None:
    """Unpacking and freeing happen in whatever thread runs backward."""
    model, loss_of = make_model("transformer")
    expected = backward(model, loss_of, engine_for(model, 4))
    engine = engine_for(model, 4)
    model.zero_grad()
    torch.manual_seed(1)
    with engine.compress():
        loss = loss_of(model, 0)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same(gradients(model), expected)
    assert_empty(engine)


@pytest.mark.parametrize("precision", ["exact", 4])
def test_rule_5_a_forward_pass_that_backward_runs_is_one_of_its_own(precision: Any) -> None:
    """As with a cache of gradients. Checkpoints are recomputed in it as elsewhere: what they save is used at once."""
    model, loss_of = make_model("transformer")
    block: Any = next(module for name, module in model.named_modules() if name == "blocks.0")
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    expected = backward(model, loss_of, engine_for(model, precision))
    engine = engine_for(model, precision)
    with engine.compress():
        plain = loss_of(model, 0)
    sizes = engine.pass_raw_bytes, engine.held_bytes
    del plain
    found = []

    def again(_gradient: Tensor) -> None:
        with torch.enable_grad(), engine.compress():
            torch.manual_seed(1)
            loss = loss_of(model, 0)
        found.append((engine.pass_raw_bytes, engine.held_bytes))
        loss.backward()

    for _ in range(5):
        model.zero_grad()
        leaf = torch.ones((), requires_grad=True)
        leaf.register_hook(again)
        (2 * leaf).backward()
    assert found == [sizes] * 5
    assert_same(gradients(model), expected)
    assert_empty(engine)


def test_rule_5_what_a_checkpoint_runs_again_is_used_at_once() -> None:
    """Also where the checkpoint is around the whole model: what that saves in backward stays as it is."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of)
    engine = engine_for(model, 4)

    def compressed(_: Tensor) -> Tensor:
        with engine.compress():
            return loss_of(model, 0)

    for _ in range(4):
        model.zero_grad()
        checkpoint(compressed, torch.ones((), requires_grad=True), use_reentrant=True).backward()
        assert_same(gradients(model), expected)
    assert_empty(engine)


def test_rule_5_concurrent_unpacking_of_one_handle() -> None:
    """Many threads may decode the same pages at once."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    with engine.compress():
        node: Any = model(normal(*LARGE)).exp().grad_fn
    expected = node._saved_result.detach()
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: node._saved_result.detach(), range(64)))
    assert all(torch.equal(result, expected) for result in results)
    assert len({result.data_ptr() for result in results}) == 64


def test_rule_5_backward_while_another_thread_runs_forward() -> None:
    """Pages that one thread frees while another leases are never mixed up."""
    model, loss_of = make_model("mlp")
    engine = engine_for(model, 4)
    expected = backward(model, loss_of, engine)
    model.zero_grad()
    with engine.compress():
        losses = [loss_of(model, 0) for _ in range(10)]
    results: list[list[Tensor]] = []

    def run_backward() -> None:
        while losses:
            results.append(list(torch.autograd.grad(losses.pop(), list(model.parameters()))))

    thread = threading.Thread(target=run_backward)
    thread.start()
    while thread.is_alive():
        with engine.compress():
            kept = loss_of(model, 1)
        del kept
    thread.join()
    assert len(results) == 10
    for result in results:
        assert_same(result, expected)
    assert_empty(engine)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
@pytest.mark.parametrize("compiled", ["", "something", "a-part"])
@pytest.mark.parametrize("spills", [False, True], ids=["memory", "spill"])
@pytest.mark.parametrize("step", ["none", "forward", "backward"])
def test_memory_is_freed_with_its_engine(step: str, spills: bool, compiled: str, tmp_path: Path) -> None:
    """Pages go back to the system at once, by reference counting: the collector may be off, or late."""
    model, loss_of = make_model("transformer")
    if compiled == "something":
        torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    elif compiled:
        next(each for each in model.modules() if isinstance(each, nn.Linear)).compile(backend="aot_eager")
    options: dict[str, Any] = {"memory_budget": "200KB", "spill_dir": tmp_path} if spills else {}
    engine = engine_for(model, 4, **options)
    with _no_collection():
        pager = weakref.ref(pager_of(engine))
        pool = weakref.ref(pager_of(engine).pool)
        if step == "backward":
            backward(model, loss_of, engine)
        elif step == "forward":
            with engine.compress():
                loss = loss_of(model, 0)
            del loss
        assert (engine.finish_step().spilled_bytes > 0) == (spills and step != "none")
        engine.close()
        del engine
        assert (pager(), pool()) == (None, None)
