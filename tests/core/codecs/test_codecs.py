"""Which form each kind of tensor takes, and that the exact forms are exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_core.memory.tiers.disk import SpillFile
from daf_core.saved_tensors.classify import LEAST_ELEMENTS
from daf_kernels import load_backend
from tests.core.books import let_go, used_slots
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    engine_for,
    error,
    integers,
    normal,
    saved_as,
    spill_all,
    watch,
)

CPU = torch.device("cpu")
ROWS = Grouping(64)
GROUP = 4
"""Rows of `LARGE` that share a scaling group."""


def _planes(values: Tensor, precision: int, pager: Pager, finite: bool = True) -> PlanesActivation | None:
    ctx = EncodeContext(values, pager, load_backend(CPU), ROWS, require_finite=finite, precision=precision)
    return PlanesActivation.write(ctx)


def _signs(values: Tensor, pager: Pager) -> ReluSignsActivation:
    return ReluSignsActivation.pack(values, pager, load_backend(CPU), values._version)


def _rectified(values: Tensor, precision: int, pager: Pager, finite: bool = True) -> ReluOutputActivation | None:
    """Returns planes together with signs; None where there are no planes."""
    planes = _planes(values, precision, pager, finite)
    return None if planes is None else ReluOutputActivation(_signs(values, pager), planes)


def _narrow(values: Tensor, pager: Pager) -> NarrowIntActivation | None:
    return NarrowIntActivation.encode(
        saved_as(values, TensorKind.INTEGER), EncodeContext(values, pager, load_backend(CPU))
    )


def _decoded(stored: StoredActivation | None, like: Tensor) -> Tensor:
    assert stored is not None
    decoded = torch.empty_like(like)
    stored.decode_into(decoded)
    return decoded


def _mask(dtype: torch.dtype = torch.bool) -> Tensor:
    return (normal(*LARGE) > 0).to(dtype)


def _with(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with one special value among them."""
    tensor = normal(*LARGE).to(dtype)
    tensor[3, 5] = value
    return tensor


def _third_value_late() -> Tensor:
    """Looks like a mask until the last element."""
    mask = _mask(torch.float32)
    mask[-1, -1] = 2.0
    return mask


FORMS: dict[str, tuple[Tensor, str]] = {
    "float32": (normal(*LARGE), "planes"),
    "bfloat16": (normal(256, 64).bfloat16(), "planes"),
    "float16": (normal(256, 64).half(), "planes"),
    "float64": (normal(*LARGE).double(), "raw"),
    "complex": (torch.complex(normal(*LARGE), normal(*LARGE)), "raw"),
    "negative-view": (torch.complex(normal(*LARGE), normal(*LARGE)).conj().imag, "raw"),
    "dropout-mask": (_mask(torch.float32) / 0.9, "bitmask"),
    "float64-mask": (_mask(torch.float64), "bitmask"),
    "zeros": (torch.zeros(LARGE), "bitmask"),
    "two-zeros": (_mask(torch.float32) * -0.0, "bitmask"),
    "infinite-mask": (torch.zeros(LARGE).masked_fill(_mask(), float("-inf")), "bitmask"),
    "nan-mask": (torch.ones(LARGE).masked_fill(_mask(), float("nan")), "bitmask"),
    "one-infinity": (_with(float("inf")), "raw"),
    "one-nan": (_with(float("nan")), "raw"),
    "float16-overflow": (_with(1e6, torch.float16), "raw"),
    "third-value-late": (_third_value_late(), "planes"),
    "few-elements": (normal(LEAST_ELEMENTS - 1), "raw"),
    "no-smaller-as-pages": (normal(LEAST_ELEMENTS), "raw"),
    "last-dimension-one": (normal(8192, 1), "raw"),
    "maps-of-one-position": (normal(*LARGE, 1, 1), "planes"),
    "empty": (torch.empty(0, 64), "raw"),
    "empty-inside": (torch.empty(64, 0, 5), "raw"),
    "scalar": (torch.tensor(2.5), "raw"),
    "indices": (integers(100, *LARGE), "narrow_int"),
    "large-indices": (integers(1 << 40, *LARGE), "raw"),
    "bytes": (integers(256, *LARGE).byte(), "raw"),
    "boolean": (_mask(), "bitmask"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("tensor", "form"), FORMS.values(), ids=FORMS)
def test_form_of_a_saved_tensor(tensor: Tensor, form: str, backend: str) -> None:
    """Each kind takes its form at 4 bits; every form but planes gives the same bits back."""
    model = Scale()
    engine = engine_for(model, 4, backend=backend)
    seen = watch(engine)
    with engine.compress():
        node: Any = model(tensor).grad_fn
    assert [saved.form for saved in seen if saved.form != "parameter"] == [form]
    unpacked = node._saved_self
    assert (unpacked.shape, unpacked.stride(), unpacked.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    same = torch.equal(_bits(unpacked), _bits(tensor))
    assert same == (form != "planes")


SPILLABLE = {"planes": "verbatim", "raw": "verbatim"}
"""What lies on pages where these could not move to the spill file."""

STAYS_RAW = ("few-elements", "complex", "negative-view", "empty", "empty-inside", "scalar")
"""Too small, or bytes that say less than the tensor."""


@pytest.mark.parametrize("name", FORMS)
def test_form_of_a_saved_tensor_that_may_be_spilled(name: str, tmp_path: Path) -> None:
    """With a spill folder and a budget nothing large stays raw, and every bit survives the way to the file."""
    tensor, form = FORMS[name]
    model = Scale()
    engine = engine_for(model, "exact", spill_dir=tmp_path, memory_budget="1MB")
    seen = watch(engine)
    with engine.compress():
        node: Any = model(tensor).grad_fn
    expected = form if name in STAYS_RAW else SPILLABLE.get(form, form)
    assert [saved.form for saved in seen if saved.form != "parameter"] == [expected]
    spill_all(engine)
    unpacked = node._saved_self
    assert (unpacked.shape, unpacked.stride(), unpacked.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(_bits(unpacked), _bits(tensor))


def test_spill_folder_without_a_budget_changes_no_form(tmp_path: Path) -> None:
    """Nothing will ever move, so nothing is copied; the next pass knows of a budget that was set meanwhile."""
    model = Scale()
    engine = engine_for(model, "exact", spill_dir=tmp_path)
    for budget, form in ((None, "raw"), ("1MB", "verbatim"), (None, "raw")):
        engine.set_memory_budget(budget)
        with engine.compress():
            model(normal(*LARGE)).sum().backward()
        assert engine.finish_step().stored_as == {form: 1}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous().view(torch.uint8) if tensor.dim() else tensor[None].view(torch.uint8)


INTEGERS: dict[str, tuple[Tensor, torch.dtype | None]] = {
    "uint8": (integers(256, *LARGE), torch.uint8),
    "int16-negative": (integers(300, *LARGE) - 150, torch.int16),
    "int8-small": (integers(100, *LARGE) - 100, torch.int8),
    "int16": (integers(1 << 15, *LARGE), torch.int16),
    "int32": (integers(1 << 31, *LARGE), torch.int32),
    "int64": (integers(1 << 40, *LARGE), None),
    "largest": (torch.full(LARGE, torch.iinfo(torch.int64).max), None),
    "smallest": (torch.full(LARGE, torch.iinfo(torch.int64).min), None),
    "limits-int32": (torch.tensor([-(1 << 31), (1 << 31) - 1]).repeat(4096), torch.int32),
    "one-beyond-uint8": (torch.tensor([0, 256]).repeat(4096), torch.int16),
    "one-beyond-int8": (torch.tensor([-1, 128]).repeat(4096), torch.int16),
    "one-below-int8": (torch.tensor([-129, 0]).repeat(4096), torch.int16),
    "one-beyond-int16": (torch.tensor([0, 1 << 15]).repeat(4096), torch.int32),
    "one-beyond-int32": (torch.tensor([0, 1 << 31]).repeat(4096), None),
    "one-below-int32": (torch.tensor([-(1 << 31) - 1, 0]).repeat(4096), None),
    "int32-as-int16": (integers(1 << 15, *LARGE).int(), torch.int16),
    "int32-full": (integers(1 << 31, *LARGE).int(), None),
    "int16-as-uint8": (integers(256, *LARGE).short(), torch.uint8),
}


@pytest.mark.parametrize(("values", "dtype"), INTEGERS.values(), ids=INTEGERS)
def test_integers_are_narrowed_exactly_or_not_at_all(values: Tensor, dtype: torch.dtype | None) -> None:
    """The smallest type that holds all values; None where none is smaller than the one they have."""
    pager = Pager(PagePool(CPU))
    stored = _narrow(values, pager)
    if dtype is None:
        assert stored is None
        return
    assert pager.settle() == values.numel() * dtype.itemsize
    decoded = torch.empty_like(values)
    stored.decode_into(decoded)
    assert torch.equal(decoded, values)
    del stored
    assert pager.settle() == 0


@pytest.mark.parametrize("values", [values for values, dtype in INTEGERS.values() if dtype is not None])
def test_narrow_integers_come_back_from_the_spill_file(values: Tensor, tmp_path: Path) -> None:
    """Also where they end within a page."""
    values, file = values.flatten()[:-100], SpillFile(tmp_path, PAGE_BYTES)
    pager = Pager(PagePool(CPU), 1 << 20, spill=file)
    stored = _narrow(values, pager)
    held = pager.settle()
    pager.hold(1 << 20)
    assert (used_slots(file) * PAGE_BYTES, pager.leased_pages) == (held, 0)
    let_go(pager, 1 << 20)
    decoded = torch.full_like(values, 77)
    stored.decode_into(decoded)
    assert torch.equal(decoded, values)
    del stored
    assert (pager.settle(), used_slots(file)) == (0, 0)


def test_indices_of_max_pooling_are_narrow_and_exact() -> None:
    """The gradient goes where plain training sends it."""
    results = []
    for compressed in (False, True):
        x = normal(4, 8, 32, 32).requires_grad_()
        engine = engine_for(nn.Linear(1, 1), "exact")
        with engine.compress() if compressed else nullcontext():
            loss = (F.max_pool2d(x, 2) * normal(4, 8, 16, 16, seed=1)).sum()
        assert not compressed or engine.finish_step().stored_as["narrow_int"] == 1
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")], ids=str)
def test_gradients_of_masked_log_probabilities(value: float) -> None:
    """Of those with -inf among them the probability is decoded as 2e-9 of the largest at most; others stay raw."""
    results = []
    for compressed in (False, True):
        model = nn.Linear(1, 1)
        model.logits = nn.Parameter(normal(*LARGE))
        engine = engine_for(model, 1)
        with engine.compress() if compressed else nullcontext():
            masked = model.logits.masked_fill(normal(*LARGE, seed=1) > 1.5, value)
            loss = F.nll_loss(masked.log_softmax(-1), integers(64, 128))
        loss.backward()
        results.append(model.logits.grad)
    if value == float("-inf"):
        assert error([results[1]], [results[0]]) < 0.1
    else:
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_float16_overflow_reaches_the_gradient() -> None:
    """A gradient scaler must see the infinity where plain training has it, and nowhere else."""
    results = []
    for compressed in (False, True):
        x = normal(256, 64).half().requires_grad_()
        engine = engine_for(nn.Linear(1, 1), 4)
        with engine.compress() if compressed else nullcontext():
            loss = (x * 4).exp().mul(100).square()
        loss.backward(torch.ones_like(loss))
        results.append(x.grad)
    assert results[0].isinf().any()
    assert torch.equal(results[0].isfinite(), results[1].isfinite())


@pytest.mark.parametrize("elements", range(4096, 24576, 1024))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planes_are_always_smaller_than_the_values(dtype: torch.dtype, elements: int) -> None:
    """Pages are whole: where they would take no less, the codec declines."""
    pager, values = Pager(PagePool(CPU)), normal(elements).relu().to(dtype)
    for precision in (8, 4, 2, 1):
        stored = _planes(values, precision, pager)
        assert stored is None or 0 < pager.settle() < values.nbytes
        del stored
        assert pager.settle() == 0


@pytest.mark.parametrize("elements", [4096, 5000, 32_768, 32_769, 100_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signs_take_a_bit_an_element(dtype: torch.dtype, elements: int) -> None:
    """In whole pages, and decode to 1 where the value is positive, else to 0."""
    pager, values = Pager(PagePool(CPU)), normal(elements).relu().to(dtype)
    stored = _signs(values, pager)
    assert pager.settle() == -(-elements // (8 * PAGE_BYTES)) * PAGE_BYTES
    assert torch.equal(_decoded(stored, values), (values > 0).to(dtype))
    del stored
    assert pager.settle() == 0


def test_declined_values_leave_no_page_behind() -> None:
    """A codec that finds out while encoding that it cannot hold the values gives its pages back."""
    pager, backend = Pager(PagePool(CPU)), load_backend(CPU)
    assert BitmaskActivation.pack(_third_value_late(), pager, backend) is None
    assert _planes(_with(float("nan")), 4, pager) is None
    assert _rectified(_with(float("inf")).relu(), 4, pager) is None
    assert (pager.leased_pages, pager.settle()) == (0, 0)
    assert pager.account.peak_bytes > 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.T,
    "holes": lambda x: x[:, :50],
    "part": lambda x: x[7:101],
    "broadcast": lambda x: x[:, None].expand(128, 3, 64),
    "one-byte-beyond-a-page": lambda x: x.view(-1).view(torch.int8)[: PAGE_BYTES + 1],
    "more-than-a-chunk": lambda x: x.repeat(40, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_verbatim_gives_every_byte_back(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Whatever lies between or beside the elements."""
    values, pager = layout(normal(*LARGE).to(dtype)), Pager(PagePool(CPU))
    stored = ByteCopyActivation.copy(values, pager)
    assert pager.settle() == -(-values.numel() * values.element_size() // PAGE_BYTES) * PAGE_BYTES
    decoded = torch.full_like(values, 77)
    stored.decode_into(decoded)
    assert torch.equal(decoded, values)
    del stored
    assert pager.settle() == 0


@pytest.mark.parametrize("encode", [_planes, _rectified])
def test_not_finite_groups_can_be_had_as_nan(encode: Callable[..., StoredActivation | None]) -> None:
    """Asked to, a lossy form takes them: the infinity's group is NaN (but for a ReLU's zeros), no other."""
    values, pager = _with(float("inf")).relu(), Pager(PagePool(CPU))
    decoded = _decoded(encode(values, 4, pager, finite=False), values)
    assert decoded[:GROUP][values[:GROUP] != 0].isnan().all()
    assert decoded[GROUP:].isfinite().all()


@pytest.mark.parametrize("planes", range(4))
def test_planes_that_are_left_decode_to_the_means_of_their_groups(planes: int) -> None:
    """Each plane that is dropped frees its pages and adds error; means and, while there are codes, deviations stay."""
    values, pager = normal(*LARGE), Pager(PagePool(CPU))
    stored = _planes(values, 4, pager)
    pager.set_budget((1 + planes) * PAGE_BYTES)
    assert stored is not None
    assert (stored.lease.planes, pager.settle()) == (planes, (1 + planes) * PAGE_BYTES)
    decoded = _decoded(stored, values)
    found, expected = (tensor.view(-1, GROUP * 64) for tensor in (decoded, values))
    torch.testing.assert_close(found.mean(1), expected.mean(1), rtol=0, atol=1e-3)
    spread = expected.std(1, correction=0) if planes else torch.zeros(len(expected))
    torch.testing.assert_close(found.std(1, correction=0), spread, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("planes", range(4))
def test_relu_keeps_its_zeros_whatever_is_dropped(planes: int) -> None:
    """The bit beside the planes is never given up."""
    values, pager = normal(*LARGE).relu(), Pager(PagePool(CPU))
    stored = _rectified(values, 4, pager)
    pager.set_budget((2 + planes) * PAGE_BYTES)
    decoded = _decoded(stored, values)
    assert torch.equal(decoded > 0, values > 0)
    assert torch.equal(decoded == 0, values == 0)


@pytest.mark.parametrize("precision", ["exact", 4])
def test_empty_batches_train(precision: Any) -> None:
    """An expert that gets no token, a batch without a box: backward works as in plain torch."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    engine = engine_for(model, precision)
    with engine.compress():
        loss = model(torch.empty(0, 64)).sum() + model(normal(*LARGE)).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_empty(engine)


def test_negative_view_and_its_base_do_not_share() -> None:
    """The memory of a lazily negated view holds the other sign."""
    model = Scale()
    engine = engine_for(model, 8)
    base = normal(*LARGE)
    with engine.compress():
        plain, negated = model(base), model(torch._neg_view(base))
    assert (plain.grad_fn._saved_self - base).abs().max() < 0.1
    assert torch.equal(negated.grad_fn._saved_self, -base)


def test_sparse_and_subclass_tensors_pass_through() -> None:
    """What has no plain memory is left to torch."""

    class Wrapped(Tensor):
        pass

    model = Scale()
    engine = engine_for(model, 4)
    seen = watch(engine)
    x = normal(*LARGE).requires_grad_()
    with engine.compress():
        loss = torch.sparse.mm(torch.eye(128).to_sparse(), x).sum()
        loss = loss + model(normal(*LARGE).as_subclass(Wrapped)).sum().as_subclass(Tensor)
    loss.backward()
    assert torch.equal(x.grad, torch.ones(LARGE))
    assert {saved.form for saved in seen if saved.shape in ((128, 128), LARGE)} == {"parameter"}


def test_page_size_is_what_the_forms_assume() -> None:
    """`LEAST_ELEMENTS` is where pages at 4 bits begin to pay."""
    assert LEAST_ELEMENTS == PAGE_BYTES
