"""Channels of maps get scaling groups of their own, in either memory format; everything else keeps its rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from daf_core.codecs.base import EncodeContext
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import LEAST_MAP, OWN_ROW, Grouping, grouping_of, normalized_groups
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_kernels import load_backend
from daf_kernels.layout import MAX_GROUP, SHARED_ROW, group_size
from tests.core.harness import normal

CPU = torch.device("cpu")
CONVOLUTION, ADDITION, LINEAR = "ConvolutionBackward0", "AddBackward0", "ViewBackward0"


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


MAPS: dict[str, tuple[Tensor, str]] = {
    "small": (normal(6, 16, 7, 7), CONVOLUTION),
    "one-position": (normal(64, 16, 1, 1), CONVOLUTION),
    "one-below-large": (normal(4, 16, LEAST_MAP - 1), CONVOLUTION),
    "large": (normal(4, 16, 16, 16), CONVOLUTION),
    "just-large": (normal(4, 16, LEAST_MAP), CONVOLUTION),
    "one-dimension": (normal(8, 16, 20), CONVOLUTION),
    "three-dimensions": (normal(4, 8, 4, 4, 4), CONVOLUTION),
    "one-image": (normal(1, 16, 8, 8), CONVOLUTION),
    "one-channel": (normal(8, 1, 8, 8), CONVOLUTION),
    "channels-last": (_channels_last(normal(4, 16, 16, 16)), CONVOLUTION),
    "channels-last-small": (_channels_last(normal(6, 16, 7, 7)), CONVOLUTION),
    "channels-last-3d": (
        normal(4, 8, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d),
        CONVOLUTION,
    ),
    "transposed-sequence": (normal(8, 20, 16).transpose(1, 2), CONVOLUTION),
    "images-innermost": (normal(16, 7, 7, 6).permute(3, 0, 1, 2), CONVOLUTION),
    "rows-before-channels": (normal(6, 7, 16, 7).transpose(1, 2), CONVOLUTION),
    "batch-norm": (normal(6, 16, 20), "NativeBatchNormBackward0"),
    "pooled": (normal(6, 16, 7, 7), "MaxPool2DWithIndicesBackward0"),
    "relu": (normal(6, 16, 7, 7), "ReluBackward0"),
    "sum": (normal(6, 16, 7, 7), ADDITION),
}

OTHERS: dict[str, tuple[Tensor, str]] = {
    "linear": (normal(6, 16, 7, 7), LINEAR),
    "leaf": (normal(6, 16, 7, 7), "leaf"),
    "matrix": (normal(64, 32), CONVOLUTION),
    "sum-of-sequences": (normal(8, 20, 16), ADDITION),
    "sum-of-many-dimensions": (normal(2, 2, 3, 4, 5, 6), ADDITION),
    "holes": (normal(6, 32, 7, 7)[:, ::2], CONVOLUTION),
    "part-of-each-row": (normal(6, 16, 7, 9)[..., :7], CONVOLUTION),
    "broadcast-images": (normal(1, 16, 7, 7).expand(6, -1, -1, -1), CONVOLUTION),
    "broadcast-positions": (normal(6, 16, 1, 1).expand(-1, -1, 7, 7), CONVOLUTION),
}


def _grouping(tensor: Tensor, op: str) -> Grouping:
    return grouping_of(geometry_of(tuple(tensor.shape), tuple(tensor.stride())), op)


def _flat(tensor: Tensor) -> Tensor:
    return geometry_of(tuple(tensor.shape), tuple(tensor.stride())).compact(tensor)


@pytest.mark.parametrize(("tensor", "op"), MAPS.values(), ids=MAPS)
def test_rows_hold_one_channel(tensor: Tensor, op: str) -> None:
    """In the order that values are taken, each row is of one channel, all of its images where it is small."""
    grouping, positions = _grouping(tensor, op), tensor[0, 0].numel()
    numbers = torch.arange(tensor.shape[1]).view(1, -1, *[1] * (tensor.dim() - 2))
    channels = torch.empty_like(tensor, dtype=torch.int64).copy_(numbers.expand_as(tensor))
    rows = grouping.arrange(_flat(channels)).reshape(-1, grouping.row)
    assert (rows == rows[:, :1]).all()
    assert grouping.row == (positions if tensor.is_contiguous() and positions >= LEAST_MAP else positions * len(tensor))


@pytest.mark.parametrize(("tensor", "op"), [*MAPS.values(), *OTHERS.values()], ids=[*MAPS, *OTHERS])
def test_order_is_a_view_of_all_values(tensor: Tensor, op: str) -> None:
    """Each value is there once, in the memory it has."""
    flat = _flat(tensor)
    arranged = _grouping(tensor, op).arrange(flat)
    assert arranged.data_ptr() == flat.data_ptr() == tensor.data_ptr()
    assert torch.equal(arranged.flatten().sort().values, flat.flatten().sort().values)


@pytest.mark.parametrize("offset", [0, 5])
def test_order_begins_where_the_values_do(offset: int) -> None:
    """Flat values may be a part of a larger memory."""
    memory = torch.arange(64 + offset)
    arranged = Grouping(8, (4, 4, 4), (4, 16, 1)).arrange(memory[offset:])
    assert arranged.min() == offset


@pytest.mark.parametrize(("tensor", "op"), OTHERS.values(), ids=OTHERS)
def test_others_keep_their_rows(tensor: Tensor, op: str) -> None:
    """What is no map, or does not lie in one piece, is taken as it lies."""
    row = geometry_of(tuple(tensor.shape), tuple(tensor.stride())).row
    assert _grouping(tensor, op) == Grouping(row)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("precision", [8, 2, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("layout", [_as_it_is, _channels_last])
def test_means_of_channels_are_restored(
    layout: Callable[[Tensor], Tensor], backend: str, dtype: torch.dtype, precision: int
) -> None:
    """Channels of small maps whose means and deviations are far apart; several in a group would blur them."""
    means, deviations = torch.logspace(-2, 2, 32), torch.logspace(1, -3, 32)
    values = normal(16, 32, 6, 6) * deviations.view(-1, 1, 1) + means.view(-1, 1, 1)
    values = layout(values).to(dtype)
    pager, grouping, flat = Pager(PagePool(CPU)), _grouping(values, CONVOLUTION), _flat(values)
    stored = PlanesActivation.write(
        EncodeContext(flat, pager, load_backend(CPU, backend), grouping, precision=precision)
    )
    assert stored is not None
    decoded = torch.full_like(values, torch.nan)
    stored.decode_into(_flat(decoded))
    found, expected = (each.float().mean((0, 2, 3)) for each in (decoded, values))
    deviation = values.float().std((0, 2, 3))
    assert ((found - expected).abs() <= 0.01 * deviation + torch.finfo(dtype).eps * means).all()


@pytest.mark.parametrize(("tensor", "op"), MAPS.values(), ids=MAPS)
def test_values_come_back_to_their_places(tensor: Tensor, op: str) -> None:
    """Whatever the order they are taken in."""
    pager, grouping, flat = Pager(PagePool(CPU, page_bytes=128)), _grouping(tensor, op), _flat(tensor)
    stored = PlanesActivation.write(EncodeContext(flat, pager, load_backend(CPU), grouping))
    assert stored is not None
    decoded = torch.full_like(tensor, torch.nan)
    stored.decode_into(_flat(decoded))
    assert (decoded - tensor).abs().max() < 0.05


@pytest.mark.parametrize("row", [1, 8, 31, 32, 48, 64, 65, 256, 257, 768])
def test_rows_that_are_normalized_share_no_groups(row: int) -> None:
    """But for very short ones, whose headers would take more than 1.5 bits an element."""
    usual, normalized = Grouping(row), Grouping(row).for_rows()
    assert usual.group == group_size(row)
    assert usual.shares is (row <= SHARED_ROW or row == 257)  # which has no divisor: groups run through rows
    assert normalized.group == (row if 32 <= row <= SHARED_ROW else group_size(row))
    assert normalized.shares is (row < 32 or row == 257)
    assert normalized.group <= MAX_GROUP


def test_channels_that_are_normalized_have_their_groups() -> None:
    """A normalization of the batch reads them, and no rows."""
    groups = _grouping(normal(2, 3, 5, 5), "ConvolutionBackward0")
    assert groups.shape is not None
    assert groups.for_rows() is groups


@pytest.mark.parametrize(("images", "size"), [(4, 4), (1, 7), (32, 1), (2, 4)])
@pytest.mark.parametrize("layout", [_as_it_is, _channels_last])
def test_channels_of_few_positions_share_no_groups(layout: Callable[[Tensor], Tensor], images: int, size: int) -> None:
    """Where means were 20 times the deviation, the gradient of a BatchNorm's weight was off by .9 at 4 bits."""
    groups = _grouping(layout(normal(images, 96, size, size)), CONVOLUTION)
    assert groups.group == images * size * size
    assert not groups.shares


def test_columns_that_a_batch_normalization_reads_have_groups() -> None:
    reader = "NativeBatchNormBackward0"
    for rows in (2, OWN_ROW, 100, 512):
        matrix = normal(rows, 24) + torch.arange(24)
        geometry = geometry_of((rows, 24), (24, 1))
        groups = normalized_groups(geometry, reader, 0)
        assert groups is not None
        assert not groups.shares
        assert torch.equal(groups.arrange(_flat(matrix)), matrix.t())
        assert normalized_groups(geometry, "NativeLayerNormBackward0", 0) is None
    assert normalized_groups(geometry_of((64, 24), (48, 1)), reader, 0) is None


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
@pytest.mark.parametrize("shape", [(8, 24, 4, 4), (1, 24, 8, 8), (8, 24, 16, 16), (8, 24, 64, 1), (2, 24, 1, 300)])
def test_channels_that_a_batch_normalization_reads_have_groups(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    """In whatever order they lie in memory, and whatever has made them."""
    tensor = torch.arange(math.prod(shape)).view([shape[place] for place in order])
    tensor = tensor.permute([order.index(place) for place in range(4)])
    assert tensor.shape == shape
    geometry = geometry_of(tuple(tensor.shape), tensor.stride())
    groups = normalized_groups(geometry, "NativeBatchNormBackward0", 0)
    assert groups is not None
    assert not groups.shares
    memory = tensor.as_strided((tensor.numel(),), (1,))
    channel_of = torch.empty_like(memory)
    channel_of[tensor] = torch.arange(24).view(1, -1, 1, 1).expand_as(tensor)
    channels = channel_of[groups.arrange(memory)].reshape(-1, groups.group)
    assert (channels == channels[:, :1]).all()
    assert groups == grouping_of(geometry, "ConvolutionBackward0")


@pytest.mark.parametrize(("heads", "width"), [(16, 8), (8, 16), (4, 32), (4, 64), (2, 96), (2, 300)])
def test_heads_that_are_normalized_share_no_groups(heads: int, width: int) -> None:
    tokens = torch.arange(40 * heads * width).view(40, -1)
    groups = normalized_groups(geometry_of(tuple(tokens.shape), tokens.stride()), "NativeGroupNorm", -1, heads)
    assert groups is not None
    assert not groups.shares
    assert width % groups.group == 0
    head_of = groups.arrange(_flat(tokens)).reshape(-1, groups.group) // width % heads
    assert (head_of == head_of[:, :1]).all()


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)], ids=str)
def test_groups_run_along_what_is_normalized(order: tuple[int, ...], dim: int) -> None:
    """Wherever its elements lie in memory."""
    tensor = normal(40, 48, 56).permute(order)
    groups = normalized_groups(geometry_of(tuple(tensor.shape), tensor.stride()), "NativeLayerNormBackward0", dim)
    assert groups is not None
    assert not groups.shares
    memory = tensor.as_strided((tensor.numel(),), (1,))
    rows = groups.arrange(memory).reshape(-1, groups.row)
    expected = tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
    assert torch.equal(rows.sort(0).values, expected.sort(0).values)


def test_what_has_holes_has_groups_as_it_lies() -> None:
    geometry = geometry_of((8, 40, 48), (4800, 1, 100))
    assert normalized_groups(geometry, "NativeLayerNormBackward0", -1) == Grouping(40, own=True)
