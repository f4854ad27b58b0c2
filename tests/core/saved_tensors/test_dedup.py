"""Rule 6: one stored copy for tensors that share storage, and never one for tensors that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from daf_core.autograd.torch_private import storage_id
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import ProductActivation
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.readers import table
from daf_core.readers.table import Kind
from daf_core.saved_tensors.dedup import StorageTable, sharing_key
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    backward,
    engine_for,
    error,
    form_of,
    make_model,
    normal,
    watch,
)

BOUND = 0.05
"""Far above the error of 8 bits on normal numbers (0.02), far below the distance of other numbers (1)."""


def _leaf(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).requires_grad_()


def test_rule_6_storage_saved_by_two_operators_is_stored_once() -> None:
    """The second save costs no page and no raw bytes."""
    engine = engine_for(Scale(), 8)
    x = _leaf(*LARGE)
    with engine.compress():
        first = x.sin()
        pages, held = engine.leased_pages, engine.held_bytes
        second = x.cos()
        assert (engine.leased_pages, engine.held_bytes) == (pages, held)
    (first.sum() + second.sum()).backward()
    assert error([x.grad], [x.detach().cos() - x.detach().sin()]) < BOUND
    statistics = engine.finish_step()
    assert statistics.stored_as == {"planes": 1, "shared": 1}
    assert statistics.raw_bytes == x.nbytes


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "reshaped": lambda x: x.view(8, 16, 64),
    "flat": lambda x: x.view(-1),
    "detached": lambda x: x.detach(),
    "unsqueezed": lambda x: x[None, :, None],
    "expanded": lambda x: x.expand(3, -1, -1),
}

OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "other-offset": lambda x: x[8:],
    "other-half": lambda x: x.split(64)[1],
    "columns": lambda x: x[:, :48],
    "prefix": lambda x: x[:120],
    "strided": lambda x: x[::1, ::2].expand(2, -1, -1),
    "copy": lambda x: x.clone(),
    "other-type": lambda x: x.detach().view(torch.float16).nan_to_num(0, 0, 0),
}


@pytest.mark.parametrize("view", SAME.values(), ids=SAME)
def test_view_of_the_same_elements_shares(view: Callable[[Tensor], Tensor]) -> None:
    """A view that covers the same memory is decoded from the same pages with its own shape and strides."""
    second, seen = _save_both(view)
    assert seen[1] is seen[0]
    assert error([second._saved_self], [view(normal(*LARGE))]) < BOUND
    assert second._saved_self.stride() == view(normal(*LARGE)).stride()


@pytest.mark.parametrize("view", OTHER.values(), ids=OTHER)
def test_view_of_other_elements_does_not_share(view: Callable[[Tensor], Tensor]) -> None:
    """Another offset, another part, another type or another storage is another activation."""
    second, seen = _save_both(view)
    assert seen[1] is not seen[0]
    expected = view(normal(*LARGE)).float()
    assert error([second._saved_self.float()], [expected]) < BOUND


def _save_both(view: Callable[[Tensor], Tensor]) -> tuple[Any, list[Any]]:
    """Saves a tensor and a view of it; returns the node of the second and what stores them."""
    model = Scale()
    engine, seen = engine_for(model, 8), []
    watch(engine, lambda packed: seen.append(getattr(packed, "stored", packed)) if _is_activation(packed) else None)
    x = normal(*LARGE)
    with engine.compress():
        first = model(x)
        second = model(view(x))
    assert len(seen) == 2
    del first
    return second.grad_fn, seen


def _is_activation(packed: Any) -> bool:
    return form_of(packed) != "parameter"


def _halves() -> tuple[Tensor, Tensor]:
    first, second = normal(256, 64).split(128)
    return first, second


def _two_types() -> tuple[Tensor, Tensor]:
    half = normal(256, 64).half()
    return half, half.view(torch.bfloat16)


def _two_widths() -> tuple[Tensor, Tensor]:
    x = normal(256, 64)
    return x.as_strided((128, 64), (96, 1)), x.as_strided((128, 64), (128, 1))


NEIGHBOURS = {"other-offset": _halves, "other-type": _two_types, "other-strides": _two_widths}


@pytest.mark.parametrize("make", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_views_that_differ_in_one_thing_do_not_share(make: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Of offset, type and strides each alone makes another activation."""
    model = Scale()
    engine, tensors = engine_for(model, 8), make()
    with engine.compress():
        nodes: list[Any] = [model(tensor).grad_fn for tensor in tensors]
    assert engine.finish_step().stored_as == {"planes": 2}
    for node, tensor in zip(nodes, tensors, strict=True):
        assert node._saved_self.dtype is tensor.dtype
        assert error([node._saved_self.float()], [tensor.float()]) < BOUND


def test_rule_6_address_reuse_is_never_a_share() -> None:
    """Storages that come and go inside the scope reuse addresses: each must still be stored as its own."""
    model = Scale()
    engine = engine_for(model, 8)
    nodes: list[Any] = []
    addresses: set[int] = set()
    with engine.compress():
        for seed in range(60):
            x = normal(*LARGE, seed=seed)
            addresses.add(x.data_ptr())
            nodes.append(model(x).grad_fn)
            del x
    assert len(addresses) < 60, "no address was reused, so that this test says nothing"
    assert "shared" not in engine.finish_step().stored_as
    assert all(error([node._saved_self], [normal(*LARGE, seed=seed)]) < BOUND for seed, node in enumerate(nodes))


def test_rule_6_address_reuse_in_the_next_forward_pass() -> None:
    """Nothing of an earlier forward pass is found by a later one, even while its graph lives."""
    model = Scale()
    engine = engine_for(model, 8)
    nodes: list[Any] = []
    for seed in range(40):
        with engine.compress():
            nodes.append(model(normal(*LARGE, seed=seed)).grad_fn)
    assert all(error([node._saved_self], [normal(*LARGE, seed=seed)]) < BOUND for seed, node in enumerate(nodes))


def test_rule_6_raw_storages_that_reuse_an_address_are_each_counted() -> None:
    """The account of raw storages follows their life as well."""
    model = Scale()
    engine = engine_for(model, "exact")
    for rounds in range(3):
        with engine.compress():
            kept = [model(normal(*LARGE, seed=seed)) for seed in range(5)]
        assert engine.held_bytes == 5 * 4 * 128 * 64, rounds
        del kept
        assert_empty(engine)


def test_rule_6_new_version_is_packed_anew() -> None:
    """After a change in place the same memory holds another activation; both gradients are right."""
    engine = engine_for(Scale(), 8)
    x = _leaf(*LARGE)
    with engine.compress():
        h = x * 1
        first = h.sin()
        second = h.add_(1).sin()
    (first.sum() + second.sum()).backward()
    assert engine.finish_step().stored_as == {"planes": 2}
    assert error([x.grad], [x.detach().cos() + (x.detach() + 1).cos()]) < BOUND


def test_no_share_of_what_was_dropped() -> None:
    """An activation whose graph was dropped is stored again when the same tensor is saved again."""
    engine = engine_for(Scale(), 8)
    x = _leaf(*LARGE)
    with engine.compress():
        del_me = x.sin()
        del del_me
        assert_empty(engine)
        kept = x.sin()
    kept.sum().backward()
    assert error([x.grad], [x.detach().cos()]) < BOUND


class _Overwrites(torch.autograd.Function):
    """Squares, and uses its saved tensor as the buffer for the gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)


@pytest.mark.parametrize("precision", [8, 1])
def test_shared_pages_are_decoded_privately(precision: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that overwrites its saved tensor in backward spoils nothing for the others."""
    name = f"{_Overwrites.__module__}.{_Overwrites.__qualname__}"
    monkeypatch.setitem(table._FUNCTIONS, name, Kind.APPROXIMATE)
    grads = []
    for function in (_Overwrites.apply, torch.square):
        engine = engine_for(Scale(), precision)
        x = _leaf(*LARGE)
        with engine.compress():
            h = x * 1
            loss = h.sin().sum() + function(h).sum() + function(h).sum() + h.cos().sum()
        assert engine.finish_step().stored_as == {"planes": 1, "shared": 3}
        loss.backward()
        grads.append(x.grad)
    assert error([grads[0]], [grads[1]]) < 1e-6


def test_two_forward_passes_share_nothing() -> None:
    """Two forward passes of one step each store their own copy of the same input."""
    model = Scale()
    engine, x = engine_for(model, 8), normal(*LARGE)
    with engine.compress():
        first = model(x)
    with engine.compress():
        second = model(x)
    assert engine.finish_step().stored_as == {"planes": 2}
    assert torch.equal(first.grad_fn._saved_self, second.grad_fn._saved_self)


def test_sharing_lowers_what_a_transformer_holds() -> None:
    """Without dropout between them, the LoRA layers of q, k and v save the same tensor."""
    model, loss = make_model("transformer")
    engine = engine_for(model.eval(), 4)
    backward(model, loss, engine)
    assert engine.finish_step().stored_as["shared"] >= 4


def test_table_that_another_thread_clears_gives_no_address_to_two_storages() -> None:
    """The pass of another thread may end while a tensor is being encoded."""
    factor = RawActivation(normal(*LARGE), None)
    table, stored = StorageTable(), ProductActivation(factor, factor)
    for _ in range(50):  # one of the next storages takes the place of the first
        tensor = normal(*LARGE)
        number, storage = storage_id(tensor), tensor.untyped_storage()
        key = sharing_key(tensor, geometry_of(tuple(tensor.shape), tuple(tensor.stride())))
        assert table.get(number, storage) is None
        met = table.add(number, storage)
        assert met.find(key, 0) is None
        table.clear()
        met.add(key, 0, stored)
        assert table.get(number, storage) is None
        del tensor, storage
