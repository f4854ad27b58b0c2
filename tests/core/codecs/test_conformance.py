"""What every codec of the registry must do, and that one more needs a class and a line in the registry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from daf_core import ActivationEngine, DAFConfig
from daf_core.codecs import registry
from daf_core.codecs.base import EncodeContext, PagedActivation, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.deferred_check import PendingChecks
from daf_core.codecs.gelu_derivative import GELU, GeluDerivativeActivation
from daf_core.codecs.logarithms import LogarithmsActivation, ProbabilitiesActivation
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import RELU, ReluSignsActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.codecs.scaling_groups import grouping_of, groups_for
from daf_core.codecs.sides import SidesActivation
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.codecs.without_values import ShapeActivation
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_core.memory.tiers.disk import SpillFile
from daf_core.precision import calibration
from daf_core.precision.policy import PrecisionPolicy
from daf_core.readers.table import Bounds, Kind, Reading
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.lossy import RandomStreams, TrainingStore
from daf_kernels import load_backend
from tests.core.books import let_go
from tests.core.harness import assert_empty, backward, engine_for, error, normal, saved_as, trainable

CPU = torch.device("cpu")
ROOM = 1 << 26
SIDES = Bounds(-0.5, 0.5)


def _same(values: Tensor) -> Tensor:
    return values


def _gelu_slope(values: Tensor) -> Tensor:
    leaf = values.float().requires_grad_()
    (slope,) = torch.autograd.grad(F.gelu(leaf).sum(), leaf)
    return slope


class Case(NamedTuple):
    """A tensor that a codec is made for.

    Attributes:
        tensor: Makes it from normal numbers.
        meaning: What its reader makes of the values, and what has to come back.
        error: The largest relative error of that, also of 16-bit types.
        saved: What the codec is told of the tensor, besides the tensor.
    """

    tensor: Callable[[Tensor], Tensor]
    meaning: Callable[[Tensor], Tensor] = _same
    error: float = 0.0
    saved: dict[str, Any] = {}  # noqa: RUF012  no case changes it


CASES: dict[type[StoredActivation], Case] = {
    ShapeActivation: Case(_same, torch.zeros_like, saved={"reading": Reading(Kind.SHAPE, "Gather0")}),
    NarrowIntActivation: Case(lambda x: (x * 100).long(), saved={"form": TensorKind.INTEGER}),
    BitmaskActivation: Case(lambda x: torch.where(x > 0.3, 1.25, 0.0).to(x.dtype), saved={"form": TensorKind.MASK}),
    SidesActivation: Case(_same, SIDES.inside, saved={"reading": Reading(Kind.SIDES, "Clamp1", SIDES)}),
    ReluSignsActivation: Case(torch.relu, lambda values: values > 0, saved={"op": RELU}),
    ReluOutputActivation: Case(torch.relu, error=0.02, saved={"op": RELU}),
    LogarithmsActivation: Case(
        lambda x: x.float().log_softmax(-1).to(x.dtype),
        lambda values: values.float().exp(),
        error=0.02,
        saved={"reading": Reading(Kind.LOGARITHMS, "LogSoftmaxBackward0", dim=-1)},
    ),
    ProbabilitiesActivation: Case(
        lambda x: x.float().softmax(-1),
        lambda values: values / values.amax(-1, keepdim=True),
        error=0.02,
        saved={"reading": Reading(Kind.PROBABILITIES, "MulBackward0", dim=-1)},
    ),
    GeluDerivativeActivation: Case(_same, _gelu_slope, error=0.02),
    PlanesActivation: Case(_same, error=0.02),
    ByteCopyActivation: Case(_same, saved={"form": TensorKind.MASK}),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": _same,
    "transposed": lambda x: x.T,
    "holes": lambda x: x[:, :50],
    "maps": lambda x: x.view(-1, 4, 8, 8).to(memory_format=torch.channels_last),
}
each_codec = pytest.mark.parametrize("codec", registry.CODECS, ids=lambda codec: codec.name)


@pytest.fixture
def pager(tmp_path: Path) -> Pager:
    """Never drops a plane, so that all it gives back is as it was."""
    return Pager(PagePool(CPU), ROOM, least_planes=4, spill=SpillFile(tmp_path, PAGE_BYTES))


def _saved(codec: type[StoredActivation], tensor: Tensor) -> SavedTensor:
    saved = saved_as(tensor, **CASES[codec].saved)
    saved.codec = codec.name
    return saved


def _encode(codec: type[StoredActivation], saved: SavedTensor, pager: Pager) -> Handle | None:
    """Encodes a tensor at 8 bits, as the store does."""
    config = DAFConfig(precision=8)
    geometry = geometry_of(tuple(saved.tensor.shape), tuple(saved.tensor.stride()))
    rows = saved.reading is not None and saved.reading.kind in (Kind.LOGARITHMS, Kind.PROBABILITIES)
    groups = groups_for(saved.reading, geometry, saved.site.op, False) if rows else grouping_of(geometry, saved.site.op)
    lossy = TrainingStore(PrecisionPolicy(config), RandomStreams(config), PendingChecks())
    backend, values = load_backend(CPU), geometry.compact(saved.tensor)
    stored = codec.encode(
        saved, EncodeContext(values, pager, backend, groups, lossy=lossy, codecs=(codec, PlanesActivation))
    )
    return None if stored is None else Handle.of(stored, geometry, saved)


def _error(codec: type[StoredActivation], found: Tensor, tensor: Tensor) -> float:
    expected, meant = CASES[codec].meaning(tensor), CASES[codec].meaning(found)
    if codec is ReluSignsActivation:
        meant = found > 0
    return error([meant.double()], [expected.double()]) if expected.any() else float(meant.double().norm())


def test_every_codec_has_a_case() -> None:
    """A new codec is held to this contract too."""
    assert list(CASES) == list(registry.CODECS)
    names = [codec.name for codec in registry.CODECS]
    assert len(set(names)) == len(names)


@each_codec
def test_a_codec_accepts_its_tensors(codec: type[StoredActivation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so before it looks at values; no lossy codec takes what must stay exact."""
    monkeypatch.setattr("daf_core.codecs.relu_signs.is_being_saved", lambda *_: True)
    tensor = CASES[codec].tensor(normal(128, 64))
    assert codec.accepts(_saved(codec, tensor))
    assert not (codec.lossy and codec.accepts(saved_as(tensor, TensorKind.MASK, reading=None)))


@each_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_comes_back(codec: type[StoredActivation], layout: str, dtype: torch.dtype, pager: Pager) -> None:
    """With its shape, strides and type, within the declared error, every time it is asked for; then all is freed."""
    tensor = LAYOUTS[layout](CASES[codec].tensor(normal(256, 64).to(dtype)))
    handle = _encode(codec, _saved(codec, tensor), pager)
    if handle is None:  # only logarithms need rows that lie one after the other
        assert (codec, layout == "dense") == (LogarithmsActivation, False)
        assert pager.settle() == 0
        return
    first, second = handle.unpack(), handle.unpack()
    alone = codec is ShapeActivation and tensor.is_contiguous()  # then the shape has no memory of its own
    strides = (0,) * tensor.dim() if alone else tensor.stride()
    assert (first.shape, first.stride(), first.dtype) == (tensor.shape, strides, tensor.dtype)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert _error(codec, first, tensor) <= CASES[codec].error
    assert codec.lossy or torch.equal(first, tensor)
    del handle
    assert (pager.settle(), pager.leased_pages) == (0, 0)


@each_codec
@pytest.mark.parametrize("elements", [1, 64, 4160, 640_000])
def test_bytes_are_counted(codec: type[StoredActivation], elements: int, pager: Pager) -> None:
    """A tensor of any size is held in fewer bytes than it has, in whole pages at most as many, or declined."""
    tensor = CASES[codec].tensor(normal(-(-elements // 64), min(elements, 64)))
    handle = _encode(codec, _saved(codec, tensor), pager)
    held = pager.settle()
    if handle is None:
        assert (held, pager.leased_pages) == (0, 0)
        assert elements <= 4160
        return
    assert (held == 0) == (codec is ShapeActivation)
    assert held <= -(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES
    assert elements < 5000 or held < 0.6 * tensor.nbytes or codec is ByteCopyActivation
    assert _error(codec, handle.unpack(), tensor) <= CASES[codec].error
    del handle
    assert (pager.settle(), pager.leased_pages) == (0, 0)


@each_codec
def test_pages_that_were_moved_to_the_next_tier_come_back(codec: type[StoredActivation], pager: Pager) -> None:
    """To the last bit."""
    tensor = CASES[codec].tensor(normal(1024, 64))
    handle = _encode(codec, _saved(codec, tensor), pager)
    assert handle is not None
    before, leased = handle.unpack(), pager.leased_pages
    room = ROOM - pager.settle() + leased * PAGE_BYTES
    pager.hold(room)
    assert pager.leased_pages == 0
    let_go(pager, room)
    assert torch.equal(handle.unpack(), before)
    assert leased or codec is ShapeActivation


@each_codec
def test_planes_that_are_dropped_free_bytes_and_add_error(codec: type[StoredActivation]) -> None:
    """A codec with planes gives them up one by one under a budget; all other codecs keep what they have."""
    tensor, pager = CASES[codec].tensor(normal(1024, 64)), Pager(PagePool(CPU), ROOM)
    handle = _encode(codec, _saved(codec, tensor), pager)
    if handle is None:
        assert codec is ByteCopyActivation
        return
    stored = handle.stored
    planes = stored if isinstance(stored, PlanesActivation) else getattr(stored, "values", None)
    if not isinstance(planes, PlanesActivation):
        assert not isinstance(stored, PagedActivation) or not stored.lease.planes
        return
    found = [(pager.settle(), _error(codec, handle.unpack(), tensor))]
    while planes.precision:
        pager.set_budget(pager.settle() - 1)
        found.append((pager.settle(), _error(codec, handle.unpack(), tensor)))
    held, errors = zip(*found, strict=True)
    assert [planes.precision, len(found)] == [0, 5]
    assert list(held) == sorted(held, reverse=True)
    assert list(errors) == sorted(errors)
    assert handle.unpack().isfinite().all()


class Repeated(StoredActivation):
    """A toy: the first half of values whose second half is the same."""

    name: ClassVar[str] = "repeated"
    lossy = False

    def __init__(self, half: Tensor, pager: Pager) -> None:
        self._half = half.clone()
        self._kept = KeptStorage(pager, self._half.nbytes)

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.form is not TensorKind.INTEGER

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation | None:
        first, second = ctx.values.view(2, -1)
        return cls(first, ctx.pager) if torch.equal(first, second) else None

    @override
    def decode_into(self, out: Tensor) -> None:
        out.view(2, -1).copy_(self._half)


class Short(Repeated):
    """A toy: values in bfloat16."""

    name: ClassVar[str] = "short"
    lossy = True

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.takes_approximations

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation:
        return cls(ctx.values.bfloat16(), ctx.pager)

    @override
    def decode_into(self, out: Tensor) -> None:
        out.copy_(self._half)


class OfGelu(PlanesActivation):
    """A toy: planes of values of which a calibration finds that GELU alone reads them."""

    name: ClassVar[str] = "of_gelu"
    only_reader: ClassVar[str] = GELU

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.codec == cls.name


def _model() -> nn.Module:
    """Returns layers of which the last one is frozen: what it saved would follow from what the GELU has saved."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64).requires_grad_(False))


def _loss(model: nn.Module) -> Tensor:
    half = normal(128, 64)
    return model(torch.cat([half, half])).square().mean()


@pytest.mark.parametrize(
    ("codec", "precision", "bound"), [(Repeated, "exact", 0.0), (Repeated, 8, 0.0), (Short, 8, 0.01)]
)
def test_one_more_codec_is_a_class_and_a_line(
    codec: type[StoredActivation], precision: Any, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step uses it, counts what it holds, and frees that; its error is that of the codec."""
    monkeypatch.setattr(registry, "CODECS", (codec, *registry.CODECS))
    model = _model()
    plain = copy.deepcopy(model)
    engine = engine_for(model, precision)
    for _ in range(2):
        with engine.compress():
            loss = _loss(model)
        held = engine.held_bytes
        loss.backward()
        statistics = engine.finish_step()
        assert set(statistics.stored_as) <= {codec.name, "shared"}
        assert statistics.stored_as[codec.name] >= 3
        assert 0 < held < 0.6 * statistics.raw_bytes
        assert_empty(engine)
        found = [parameter.grad for parameter in trainable(model)]
        model.zero_grad()
    _loss(plain).backward()
    expected = [parameter.grad for parameter in trainable(plain)]
    assert error(found, expected) <= bound
    assert bound or all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_exact_mode_asks_no_lossy_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands in the registry."""
    monkeypatch.setattr(registry, "CODECS", (Short, *registry.CODECS))
    engine, model = engine_for(_model(), "exact"), _model()
    with engine.compress():
        _loss(model).backward()
    assert "short" not in engine.finish_step().stored_as


def test_one_more_calibrated_codec_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration tries it where its reader alone reads, training takes it then, and a saved state knows it."""
    monkeypatch.setattr(registry, "CODECS", (OfGelu, *registry.CODECS))
    monkeypatch.setattr(calibration, "_is_less", lambda errors, others: max(errors) <= max(others))
    model = _model()
    plain = backward(model, lambda model, _: _loss(model))
    engine = ActivationEngine(model, DAFConfig(audit_every=1))
    engine.audit(lambda: _loss(model))
    taken = [site.op for site, name in engine._policy._codecs.items() if name == OfGelu.name]
    assert len(taken) == 1
    assert error(backward(model, lambda model, _: _loss(model), engine), plain) < 0.1
    assert engine.finish_step().stored_as[OfGelu.name] == 1
    other = ActivationEngine(model, DAFConfig(audit_every=1))
    other.load_state_dict(engine.state_dict())
    assert other._policy._codecs == engine._policy._codecs


def test_a_lossy_codec_that_declines_leaves_values_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later lossy codec is asked: of what the first one cannot hold, all others would lose as much."""
    monkeypatch.setattr(Short, "encode", lambda *_: None)
    monkeypatch.setattr(registry, "CODECS", (Short, *registry.CODECS))
    model = _model()
    engine = engine_for(model, 8)
    with engine.compress():
        loss = model(normal(256, 64)).square().mean()
    loss.backward()
    assert set(engine.finish_step().stored_as) <= {"raw", "shared"}
