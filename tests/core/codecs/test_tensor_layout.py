"""How a saved tensor lies in memory: the compact form holds every value once and gives the tensor back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf_core.codecs.tensor_layout import geometry_of
from tests.core.harness import Scale, engine_for, form_of, normal, watch


def _numbered(count: int) -> Tensor:
    """Different numbers, so that a value at the wrong place is noticed."""
    return torch.arange(1.0, count + 1)


@st.composite
def views(draw: st.DrawFn, longest: int = 6) -> Tensor:
    """Tensors as models make them: permuted, sliced with steps, expanded, unsqueezed; never overlapping otherwise."""
    shape = draw(st.lists(st.integers(1, longest), max_size=4))
    tensor = _numbered(int(torch.Size(shape).numel())).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        first, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(first, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
    sizes = [size if size > 1 else draw(st.sampled_from([1, 3])) for size in tensor.shape]
    return tensor.expand(sizes)


@st.composite
def windows(draw: st.DrawFn) -> Tensor:
    """Any strides at all: overlapping windows, gaps, broadcasts."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 9))
    return _numbered(10 + 4 * 4 * 12 + 1).as_strided(shape, strides, offset)


def _addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> set[int]:
    indices = itertools.product(*(range(size) for size in shape))
    return {sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices}


@given(st.one_of(views(), windows()))
@settings(max_examples=400)
def test_copy_of_the_compact_form_gives_the_tensor_back(tensor: Tensor) -> None:
    """Shape, strides and values survive; no more memory is taken than the tensor spans."""
    geometry = geometry_of(tuple(tensor.shape), tensor.stride())
    restored, compact = geometry.allocate(tensor.dtype, tensor.device)
    restored.untyped_storage().fill_(0)
    compact.copy_(geometry.compact(tensor))
    assert restored.shape == tensor.shape
    assert restored.stride() == tensor.stride()
    assert torch.equal(restored, tensor)
    assert restored.storage_offset() == 0
    assert restored.untyped_storage().nbytes() == 4 * geometry.span


@given(st.one_of(views(), windows()))
@settings(max_examples=400)
def test_span_is_minimal(tensor: Tensor) -> None:
    """The span ends with the last element that is addressed, and the compact form addresses nothing outside."""
    geometry = geometry_of(tuple(tensor.shape), tensor.stride())
    addresses = _addresses(tuple(tensor.shape), tensor.stride())
    compact = _addresses(geometry.compact_shape, geometry.compact_strides)
    assert geometry.span == max(addresses) + 1
    assert addresses <= compact <= set(range(geometry.span))


@given(views())
@settings(max_examples=400)
def test_compact_form_holds_every_value_once(tensor: Tensor) -> None:
    """Without overlaps, nothing but the values is stored: no gaps, no repetitions."""
    geometry = geometry_of(tuple(tensor.shape), tensor.stride())
    stored = geometry.compact(tensor).flatten().tolist()
    assert len(stored) == len(set(stored))
    assert set(stored) == set(tensor.flatten().tolist())


EXAMPLES: dict[str, tuple[Tensor, tuple[int, ...], int]] = {
    "dense": (torch.zeros(2, 3, 4), (24,), 4),
    "transposed": (torch.zeros(3, 4).t(), (12,), 4),
    "channels-last": (torch.zeros(2, 8, 5, 5).to(memory_format=torch.channels_last), (400,), 8),
    "expanded-row": (torch.zeros(1, 7).expand(9, 7), (7,), 7),
    "expanded-scalar": (torch.zeros(()).expand(9, 7), (1,), 1),
    "columns": (torch.zeros(6, 10)[:, 2:5], (6, 3), 3),
    "every-second": (torch.zeros(10)[::2], (5,), 5),
    "unfolded": (torch.zeros(10).unfold(0, 4, 1), (10,), 4),
    "windows-with-gaps": (torch.zeros(100).as_strided((3, 4, 2), (20, 3, 3)), (53,), 2),
    "scalar": (torch.zeros(()), (1,), 1),
}


@pytest.mark.parametrize(("tensor", "compact_shape", "row"), EXAMPLES.values(), ids=EXAMPLES)
def test_compact_shapes_by_example(tensor: Tensor, compact_shape: tuple[int, ...], row: int) -> None:
    """Dense and overlapping tensors become flat, others keep the dimensions that lie apart."""
    geometry = geometry_of(tuple(tensor.shape), tensor.stride())
    assert geometry.row == row
    assert geometry.compact_shape == compact_shape


LARGE_VIEWS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "channels-last": lambda x: x[None].to(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, 1:, 3:-2],
    "stepped": lambda x: x[:, :, ::2],
    "rows-apart": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, None].expand(-1, 5, -1, -1),
    "expanded-inner": lambda x: x[..., None].expand(-1, -1, -1, 3),
    "unfolded": lambda x: x.flatten().unfold(0, 9, 3),
    "overlapping": lambda x: x.as_strided((1000, 60), (20, 1), 7),
    "offset": lambda x: x[5:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("view", LARGE_VIEWS.values(), ids=LARGE_VIEWS)
def test_round_trip_through_the_engine(view: Any, backend: str, dtype: torch.dtype) -> None:
    """At 8 bits, what backward gets has the same geometry and type, and values within two steps of the code."""
    tensor = view(normal(24, 20, 64).to(dtype))
    decoded, form = _round_trip(tensor, backend)
    assert form == "planes"
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (tensor.shape, tensor.stride(), dtype)
    bound = 2 * (tensor.max() - tensor.min()).item() / 255
    assert (decoded.float() - tensor.float()).abs().max().item() <= bound


def _round_trip(tensor: Tensor, backend: str) -> tuple[Tensor, str]:
    model, packed = Scale(), []
    engine = engine_for(model.to(tensor.dtype), 8, backend=backend)
    watch(engine, packed.append)
    with engine.compress():
        node: Any = model(tensor).grad_fn
    return node._saved_self, next(form_of(item) for item in packed if form_of(item) != "parameter")


@given(st.data())
@settings(max_examples=60)
def test_round_trip_of_random_views(data: st.DataObject) -> None:
    """The same for views that nobody thought of."""
    base = normal(12, 20, 40)
    tensor = base.permute(data.draw(st.permutations(range(3))))
    for dim in range(3):
        first, step = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 1, 2]))
        tensor = tensor[(slice(None),) * dim + (slice(first, None, step),)]
    tensor = tensor.unsqueeze(dim := data.draw(st.integers(0, 3)))
    tensor = tensor.expand(*tensor.shape[:dim], 8, *tensor.shape[dim + 1 :])
    decoded, _ = _round_trip(tensor, "auto")
    assert (decoded.shape, decoded.stride()) == (tensor.shape, tensor.stride())
    assert (decoded - tensor).abs().max().item() <= 2 * (base.max() - base.min()).item() / 255


def test_expanded_tensor_stores_its_base_only() -> None:
    """A broadcast costs the bytes of what is broadcast."""
    model = Scale()
    engine = engine_for(model, 4)
    with engine.compress():
        loss = model(normal(128, 1, 64).expand(-1, 100, -1))
    assert engine.leased_pages == 4
    del loss
