"""What is encoded before it is known whether it is finite, as on a GPU: with a device that answers late."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.codecs import deferred_check
from daf_core.errors import ActivationBudgetError, ModifiedInPlaceError
from daf_core.model.blocks import blocks_of
from daf_core.plan.observe.trace import observe
from daf_core.saved_tensors import backends
from daf_kernels import PlaneLayout, Seed
from daf_kernels.backend import PageMemory, Pages
from daf_kernels.reference.backend import ReferenceBackend
from daf_kernels.triton.flags import AsyncFlag
from tests.core.harness import LARGE, MODELS, Scale, assert_empty, assert_same, make_model, normal, train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SIZE = 4 * LARGE[0] * LARGE[1]


class LateAnswer:
    """Known when it is waited for, or when it is told to everybody."""

    def __init__(self, yes: bool) -> None:
        self.yes, self.is_known, self.waits, self.asked = yes, False, 0, 0

    def ask(self) -> None:
        self.asked += 1

    def __bool__(self) -> bool:
        self.waits += not self.is_known
        self.is_known = True
        return self.yes


class LateBackend(ReferenceBackend):
    """Kernels whose answers come late."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[LateAnswer] = []

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> LateAnswer:
        return self._late(super().encode(values, layout, planes, memory, pages, seed))

    def encode_slopes(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages
    ) -> LateAnswer:
        return self._late(super().encode_slopes(values, layout, planes, memory, pages))

    @property
    def waits(self) -> int:
        """How often somebody has waited."""
        return sum(answer.waits for answer in self.answers)

    def _late(self, yes: bool) -> LateAnswer:
        self.answers.append(LateAnswer(yes))
        return self.answers[-1]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateBackend:
    backend = LateBackend()
    monkeypatch.setattr(backends, "load_backend", lambda *_: backend)
    return backend


def engine_for(model: nn.Module, **options: Any) -> ActivationEngine:
    return ActivationEngine(model, DAFConfig(packing="device", audit_every=None, **{"precision": 4, **options}))


def with_one(value: float) -> Tensor:
    values = normal(*LARGE)
    values[3, 5] = value
    return values


def saved_by(model: Scale, engine: ActivationEngine, values: Tensor) -> Any:
    """Returns the node that has saved values."""
    with engine.compress():
        return model(values).grad_fn


def is_gone(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", [4, "auto"])
def test_training_is_that_of_prompt_answers(monkeypatch: pytest.MonkeyPatch, name: str, precision: Any) -> None:
    model, loss_of = make_model(name)
    config = DAFConfig(precision=precision, packing="device", audit_every=2)
    records = []
    for backend in (ReferenceBackend(), LateBackend()):
        monkeypatch.setattr(backends, "load_backend", lambda *_, backend=backend: backend)
        records.append(train(model, loss_of, config))
        assert isinstance(backend, LateBackend) == any(getattr(backend, "answers", []))
    assert_same(*records)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_what_is_not_finite_is_given_as_it_was(late: LateBackend, value: float) -> None:
    model, values = Scale(), with_one(value)
    engine = engine_for(model)
    node = saved_by(model, engine, values)
    assert late.waits == 0
    held = engine.held_bytes
    for _ in range(2):
        torch.testing.assert_close(node._saved_self, values, rtol=0, atol=0, equal_nan=True)
    assert late.waits == 1
    assert engine.held_bytes == held + SIZE  # as it is known that they stay
    del node
    assert_empty(engine)


def test_values_go_when_they_are_known_to_be_finite(late: LateBackend) -> None:
    model, values = Scale(), normal(*LARGE)
    engine = engine_for(model)
    node = saved_by(model, engine, values)
    storage = weakref.ref(values.untyped_storage())
    held, expected = engine.held_bytes, values.clone()
    assert 0 < held < SIZE
    del values
    late.answers[0].is_known = True
    other = saved_by(model, engine, normal(*LARGE, seed=1))
    assert is_gone(storage)
    assert late.waits == 0
    assert engine.held_bytes == 2 * held
    assert (node._saved_self - expected).abs().max() < 0.3
    del node, other
    assert_empty(engine)


def test_no_more_than_a_window_waits(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_check, "PENDING_BYTES", 3 * SIZE)
    model = Scale()
    engine = engine_for(model)
    nodes = [saved_by(model, engine, normal(*LARGE, seed=seed)) for seed in range(8)]
    assert [answer.waits for answer in late.answers] == [1] * 5 + [0] * 3
    monkeypatch.setattr(deferred_check, "PENDING_BYTES", SIZE // 2)
    nodes.append(saved_by(model, engine, normal(*LARGE, seed=8)))  # larger than all that may wait, but for a few
    assert [answer.waits for answer in late.answers] == [1] * 6 + [0] * 3
    del nodes
    assert_empty(engine)


def test_a_device_is_asked_once_for_many(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as enough bytes wait, for all that were not asked for: they may be of several devices."""
    monkeypatch.setattr(deferred_check, "ASKED_BYTES", 3 * SIZE)
    model = Scale()
    engine = engine_for(model)
    nodes, asked = [], []
    for seed in range(7):
        nodes.append(saved_by(model, engine, normal(*LARGE, seed=seed)))
        asked.append([answer.asked for answer in late.answers])
    assert asked[1] == [0, 0]
    assert asked[2] == asked[4][:3] == [1, 1, 1]
    assert asked[4][3:] == [0, 0]
    assert asked[6] == [1] * 6 + [0]
    assert late.waits == 0
    del nodes
    assert_empty(engine)


def test_under_a_budget_nothing_is_kept_in_doubt(late: LateBackend) -> None:
    """What it gives up may not depend on when a device answers."""
    model, values = Scale(), with_one(math.inf)
    engine = engine_for(model, memory_budget=10 * SIZE)
    node = saved_by(model, engine, values)
    assert late.waits == 1
    assert engine.finish_step().stored_as == {"raw": 1}
    assert torch.equal(node._saved_self, values)


def test_a_budget_that_is_set_later_finds_nothing_in_doubt(late: LateBackend) -> None:
    model = Scale()
    engine = engine_for(model)
    finite, infinite = saved_by(model, engine, normal(*LARGE)), saved_by(model, engine, with_one(math.nan))
    pages = engine.held_bytes
    with pytest.raises(ActivationBudgetError):
        engine.set_memory_budget(SIZE)  # and not the pages
    assert engine.held_bytes == pages + SIZE
    engine.set_memory_budget(pages + SIZE)
    assert late.waits == 2
    del finite, infinite
    assert_empty(engine)


def test_views_of_one_storage_are_counted_once(late: LateBackend) -> None:
    model, values = Scale(), torch.cat([with_one(math.inf), with_one(math.nan)])
    engine = engine_for(model)
    nodes = [saved_by(model, engine, part) for part in values.chunk(2)]
    pages = engine.held_bytes
    for node, part in zip(nodes, values.chunk(2), strict=True):
        torch.testing.assert_close(node._saved_self, part, rtol=0, atol=0, equal_nan=True)
    assert engine.held_bytes == pages + 2 * SIZE
    del nodes, node
    assert_empty(engine)


def test_nothing_is_in_doubt_while_something_is_measured(late: LateBackend) -> None:
    """What is found of a step must not depend on how late a device answers."""
    model = Scale()
    engine = engine_for(model)
    node = saved_by(model, engine, normal(*LARGE))
    assert late.waits == 0
    with engine.synchronous_packing():
        assert late.waits == 1
        other = saved_by(model, engine, with_one(math.inf))
        assert late.waits == 2
    with engine.itemized() as items:
        third = saved_by(model, engine, with_one(math.inf))
    assert items.at_peak()[0].codec == "raw"
    fourth = saved_by(model, engine, normal(*LARGE))
    assert late.waits == 3
    del node, other, third, fourth
    assert_empty(engine)


def test_measurements_that_overlap(late: LateBackend) -> None:
    """As of several threads: nothing is in doubt until the last one has ended, and then it may be again."""
    first, second = ExitStack(), ExitStack()
    model = Scale()
    engine = engine_for(model)
    first.enter_context(engine.synchronous_packing())
    second.enter_context(engine.synchronous_packing())
    first.close()
    nodes = [saved_by(model, engine, normal(*LARGE))]
    assert late.waits == 1
    second.close()
    nodes.append(saved_by(model, engine, normal(*LARGE)))
    assert late.waits == 1


def test_nothing_is_in_doubt_in_what_plans_are_made_from(late: LateBackend) -> None:
    """Steps that are planned keep a budget, under which nothing is."""
    model, loss_of = make_model("transformer")
    observe(model, blocks_of(model, ["blocks.0", "blocks.1"]), engine_for(model), lambda: loss_of(model, 0))
    assert late.waits == len(late.answers) > 0


def test_a_change_after_saving(late: LateBackend) -> None:
    """It does no harm to codes; what has to stay as it was is asked for as without DAF: with an error."""
    model = Scale()
    engine = engine_for(model)
    finite, infinite = normal(*LARGE), with_one(math.inf)
    nodes = [saved_by(model, engine, values) for values in (finite, infinite)]
    expected = finite.clone()
    finite.zero_()
    infinite.zero_()
    assert (nodes[0]._saved_self - expected).abs().max() < 0.3
    with pytest.raises(ModifiedInPlaceError, match="modified by an in-place operation"):
        _ = nodes[1]._saved_self


def test_a_graph_that_never_runs_backward_leaves_nothing(late: LateBackend) -> None:
    model, values = Scale(), with_one(math.nan)
    engine = engine_for(model)
    node, storage = saved_by(model, engine, values), weakref.ref(values.untyped_storage())
    del node, values
    assert is_gone(storage)
    assert_empty(engine)


@needs_gpu
def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once kernels are loaded and chosen, in forward passes."""
    gpu = torch.device("cuda", 0)
    layers = (nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256))
    model, batches = nn.Sequential(*layers).to(gpu), [normal(512, 256, seed=step).to(gpu) for step in range(8)]
    engine = engine_for(model)
    for step, batch in enumerate(batches):
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            if step == len(batches) - 1:  # torch sees no wait for an event
                patch.setattr(AsyncFlag, "__bool__", lambda answer: answer.is_known or pytest.fail("waited"))
                torch.cuda.set_sync_debug_mode("error")
            try:
                with engine.compress():
                    loss = model(batch).square().mean()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        loss.backward()
        model.zero_grad()
        engine.finish_step()
