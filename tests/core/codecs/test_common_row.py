"""What rows share is kept beside the codes of the rest, where that makes these more exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.autograd.sites import Site
from daf_core.codecs import common_row
from daf_core.codecs.base import EncodeContext
from daf_core.codecs.common_row import EVERY, LEAST_GAIN, LEAST_ROWS, Common, CommonRows, RowBlocks, possible_blocks
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import Grouping
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.errors import StateError
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_kernels import load_backend
from tests.core.books import check_pager
from tests.core.harness import assert_empty, engine_for, error, normal, pager_of, take_the_full_way

CPU = torch.device("cpu")
SITE = Site("attention", "TransposeBackward0", 1)


def geometry(tensor: Tensor) -> Geometry:
    return geometry_of(tuple(tensor.shape), tuple(tensor.stride()))


def found(tensor: Tensor) -> RowBlocks | None:
    """Returns the blocks of rows that a tensor is taken for."""
    group = Grouping(geometry(tensor).row).group
    return CommonRows().blocks(SITE, geometry(tensor), group, geometry(tensor).compact(tensor))


def heads(tokens: int = 64) -> Tensor:
    """Returns keys of 8 rows and 4 heads as a projection makes them: (rows, heads, tokens, width), tokens outermost."""
    return normal(8, tokens, 4, 32).transpose(1, 2)


SHARED: dict[str, tuple[Tensor, tuple[int, int, int]]] = {
    "hidden states": (normal(8, 64, 96) + 5 * normal(96, seed=1), (1, 512, 96)),
    "a few large channels": (normal(8, 64, 96) + 40 * (torch.arange(96) % 32 == 7), (1, 512, 96)),
    "channels that grow together": (
        normal(8, 64, 96) + 5 * normal(8, 64, 1, seed=2).exp() * normal(96, seed=1), (1, 512, 96)
    ),
    "heads of each token": (heads() + 5 * normal(4, 1, 32, seed=1), (1, 512, 128)),
    "heads one after the other": (
        heads().contiguous() + 5 * normal(4, 1, 32, seed=1), (32, 64, 32)
    ),
    "parts of a larger tensor": (
        (normal(8, 64, 288) + 5 * normal(288, seed=1)).split(96, 2)[1], (1, 512, 96)
    ),
    "channels of each head, tokens innermost": (
        normal(12, 48, 64) + 5 * normal(12, 48, 1, seed=1), (1, 576, 64)
    ),
    "a row for each matrix": (normal(12, 64, 48) + 5 * normal(12, 1, 48, seed=1), (12, 64, 48)),
}  # fmt: skip

NOT_SHARED: dict[str, Tensor] = {
    "normal": normal(8, 64, 96),
    "heads": heads(),
    "every head of its own, with too few tokens to pay": normal(512, 4, 32) + 5 * normal(512, 1, 32, seed=1),
    "one row": normal(1, 4096) + 5,
    "a vector": normal(4096),
    "a broadcast one": normal(64, 1).expand(64, 96),
    "overlapping rows": torch.as_strided(normal(4096), (64, 96), (48, 1)),
    "meta": torch.empty(8, 64, 96, device="meta"),
    "a shift of all": normal(8, 64, 96) + 7,
    "zeros": torch.zeros(8, 64, 96),
    "with a NaN": torch.full((8, 64, 96), torch.nan),
}


@pytest.mark.parametrize(("tensor", "shape"), SHARED.values(), ids=SHARED)
def test_finds_rows_that_share_much(tensor: Tensor, shape: tuple[int, int, int]) -> None:
    """However they lie in memory: as tokens, as heads of each token, or as tokens of each head."""
    blocks = found(tensor)
    assert blocks is not None
    assert blocks.shape == shape


@pytest.mark.parametrize("tensor", NOT_SHARED.values(), ids=NOT_SHARED)
def test_takes_others_as_they_are(tensor: Tensor) -> None:
    """Also where each group keeps what its values share by itself, or what rows share would take more than it saves."""
    assert found(tensor) is None


def test_heads_at_equal_distances_are_not_taken_for_all() -> None:
    """Rows of 64 heads in turn: each 64th is of the same head, and shares far more with the others than all do."""
    keys = normal(4096 // 64, 64, 32) + 5 * normal(64, 32, seed=1)
    one_block = possible_blocks(geometry(keys), 256)[0]
    assert one_block.gain(keys) - one_block.bits < LEAST_GAIN


@pytest.mark.parametrize(("tensor", "shape"), SHARED.values(), ids=SHARED)
def test_no_group_deviates_more(tensor: Tensor, shape: tuple[int, int, int]) -> None:
    """A row that is unlike the others, such as a class token, is not spoiled by them, nor one of a large mean."""
    blocks, tensor = found(tensor), tensor.clone(memory_format=torch.preserve_format)
    tensor[0] = normal(*tensor.shape[1:], seed=3) / 100
    tensor[1] = 10 + normal(*tensor.shape[1:], seed=4) / 100
    values = geometry(tensor).compact(tensor)
    assert blocks is not None
    common, rest = blocks.split(values)
    rows = values.reshape(shape)
    if blocks.length % blocks.group == 0:  # otherwise rows share groups, and their means count
        pairs = [each.view(-1, blocks.group).std(1) for each in (rest, values.reshape(-1))]
    else:
        pairs = [each.reshape(shape).norm(dim=2) for each in (rest, rows)]
    assert (pairs[0] <= pairs[1] * 1.02 + 1e-3).all()
    both = rest.clone()
    common.restore(both)
    torch.testing.assert_close(both.view(shape), rows, rtol=1e-5, atol=1e-5)


def test_heads_are_told_apart_with_any_default_type() -> None:
    """Rows are taken at places that are computed in float32, whatever the default is."""
    keys = normal(64, 64, 32) + 5 * normal(64, 32, seed=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        one_block = possible_blocks(geometry(keys), 256)[0]
        assert one_block.gain(keys) - one_block.bits < LEAST_GAIN
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("rows", [2, LEAST_ROWS - 1])
def test_few_rows_are_stored_as_they_are(rows: int) -> None:
    """Also where many were measured at the same site: what so few share would take more than it saves."""
    known, many = CommonRows(), normal(LEAST_ROWS, 4096) + 5 * normal(4096, seed=1)
    assert known.blocks(SITE, geometry(many), 256, many) == RowBlocks(1, LEAST_ROWS, 4096, 256)
    few = many[:rows]
    assert known.blocks(SITE, geometry(few), 256, few) is None


def stored(tensor: Tensor, precision: int, backend: str, shares: bool = True) -> tuple[PlanesActivation, Pager]:
    """Returns a tensor in few bits, without what its rows share or as it is."""
    pager, values = Pager(PagePool(CPU)), geometry(tensor).compact(tensor)
    groups = Grouping(geometry(tensor).row, beside=found(tensor) if shares else None)
    activation = PlanesActivation.write(
        EncodeContext(values, pager, load_backend(CPU, backend), groups, precision=precision)
    )
    assert activation is not None
    return activation, pager


def noise(tensor: Tensor, *arguments: Any, **options: Any) -> float:
    """Returns the error of decoded values, beside what rows do not share."""
    restored, out = geometry(tensor).allocate(tensor.dtype, CPU)
    stored(tensor, *arguments, **options)[0].decode_into(out)
    return float((restored.float() - tensor.float()).norm())


@pytest.mark.parametrize("precision", [8, 4, 2, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", SHARED)
def test_codes_are_more_exact(name: str, backend: str, dtype: torch.dtype, precision: int) -> None:
    """By more than what rows share takes. In 16 bits, the values of 8 bits are as exact as the type."""
    tensor = SHARED[name][0].to(dtype, memory_format=torch.preserve_format)
    bound = 0.7 if precision != 8 or dtype is torch.float32 else 1.1
    assert noise(tensor, precision, backend) < bound * noise(tensor, precision, backend, shares=False)


@pytest.mark.parametrize("name", SHARED)
def test_backends_decode_the_same(name: str) -> None:
    """What rows share is computed by torch, whatever kernel encodes the rest."""
    out = [torch.empty_like(geometry(SHARED[name][0]).compact(SHARED[name][0])) for _ in range(2)]
    for each, backend in zip(out, ["auto", "reference"], strict=True):
        stored(SHARED[name][0], 4, backend)[0].decode_into(each)
    assert torch.equal(*out)


@pytest.mark.parametrize("name", SHARED)
def test_bytes_are_accounted_for(name: str) -> None:
    """What rows share is held as long as the codes are, and is among the sizes that plans are made with."""
    tensor, blocks = SHARED[name][0], found(SHARED[name][0])
    assert blocks is not None
    activation, pager = stored(tensor, 4, "auto")
    without, _ = stored(tensor, 4, "auto", shares=False)
    assert activation.held_bytes == without.held_bytes + blocks.nbytes == pager.held_bytes
    groups, values = activation.groups, geometry(tensor).compact(tensor)
    ctx = EncodeContext(values, pager, load_backend(CPU), groups)
    sizes, plain = PlanesActivation.sizes(ctx), PlanesActivation.sizes(replace(ctx, groups=without.groups))
    assert [size - other for size, other in zip(sizes, plain, strict=True)] == [*[blocks.nbytes] * (len(sizes) - 1), 0]
    del activation
    assert pager.settle() == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_stay_as_they_are(value: float) -> None:
    tensor = SHARED["hidden states"][0].clone()
    groups = Grouping(96, beside=found(tensor))
    tensor[3, 5, 7] = value
    assert (
        PlanesActivation.write(EncodeContext(tensor.view(-1), Pager(PagePool(CPU)), load_backend(CPU), groups)) is None
    )


def test_a_device_adds_what_a_host_has_taken() -> None:
    common = Common(torch.ones(2, 1, 32, dtype=torch.bfloat16), torch.ones(2, 64, 1, dtype=torch.bfloat16))
    common.restore(torch.empty(2, 64, 32, device="meta"))  # which fails where devices differ


def test_sites_are_measured_again() -> None:
    """After some passes: what rows share changes while a model trains."""
    rows, alike = normal(128, 96), normal(128, 96) + 5 * normal(96, seed=1)
    known = CommonRows()
    assert known.blocks(SITE, geometry(rows), 96, rows) is None
    known.passes += EVERY - 1
    assert known.blocks(SITE, geometry(alike), 96, alike) is None
    known.passes += 1
    assert known.blocks(SITE, geometry(alike), 96, alike) == RowBlocks(1, 128, 96, 96)
    assert known.blocks(SITE, geometry(rows[:64]), 96, rows[:64]) == RowBlocks(1, 64, 96, 96)


def test_what_every_other_pass_shares_is_known() -> None:
    """As of two kinds of batches: the same was measured each time, and whatever was measured last counted."""
    rows, alike = normal(128, 96), normal(128, 96) + 5 * normal(96, seed=1)
    known, found = CommonRows(), list[bool]()
    for known.passes in range(4 * EVERY):
        values = alike if known.passes % 2 else rows
        found.append(known.blocks(SITE, geometry(values), 96, values) is not None)
    assert not any(found[:EVERY])
    assert all(found[EVERY:])


def test_what_is_not_shared_any_more_is_forgotten() -> None:
    rows, alike = normal(128, 96), normal(128, 96) + 5 * normal(96, seed=1)
    known, found = CommonRows(), list[bool]()
    for values in (alike, rows, rows):
        resumed = CommonRows()
        resumed.load(json.loads(json.dumps(known.state())))
        found.append(known.blocks(SITE, geometry(values), 96, values) is not None)
        assert (resumed.blocks(SITE, geometry(values), 96, values) is not None) is found[-1]
        known.passes += EVERY
    assert found == [True, True, False]


class Attention(nn.Module):
    """Self-attention of two heads whose keys or values have much in common, as those of trained models have."""

    def __init__(self, bias: dict[str, float], way: str) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(128, 128, bias=False), nn.Linear(128, 128), nn.Linear(128, 128)
        self._way = way
        for name, deviation in bias.items():
            with torch.no_grad():
                self.get_parameter(f"{name}.bias").copy_(deviation * normal(128, seed=7))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).view(len(x), -1, 2, 64).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if self._way == "with earlier keys":
            key, value = (torch.cat([each[:, :, :1], each[:, :, 1:]], 2) for each in (key, value))
        if self._way == "written out":
            return torch.softmax(query @ key.mT / 8, -1) @ value
        return F.scaled_dot_product_attention(query, key, value)


def make(bias: dict[str, float], way: str) -> Attention:
    torch.manual_seed(0)
    return Attention(bias, way)


def attention_loss(model: nn.Module, number: int = 0, tokens: int = 128) -> Tensor:
    return (model(normal(4, tokens, 128, seed=number)) * normal(4, 2, tokens, 64, seed=number + 100)).sum()


def gradient(model: Attention, loss: Callable[[], Tensor], engine: Any = None) -> list[Tensor]:
    """Returns the gradients that what rows share has no part in."""
    if engine is None:
        value = loss()
    else:
        with engine.compress():
            value = loss()
    found = torch.autograd.grad(value, [model.query.weight, model.key.weight])
    if engine is not None:
        check_pager(pager_of(engine))
        engine.finish_step()
    return list(found)


@pytest.mark.parametrize(("precision", "bound"), [(8, 0.02), (4, 0.22)])
@pytest.mark.parametrize("bias", [{"key": 10.0}, {"value": 10.0}, {"key": 5.0, "value": 5.0}], ids=str)
@pytest.mark.parametrize("way", ["fused", "with earlier keys", "written out"])
def test_attention_is_as_exact_as_without(way: str, bias: dict[str, float], precision: int, bound: float) -> None:
    """In the first pass, in those that are replayed, and with other lengths; .15 at 4 bits without a bias."""
    model = make(bias, way)
    engine = engine_for(model, precision, packing="device")
    for number, tokens in enumerate([128, 128, 128, 96, 64, 128]):

        def loss(number: int = number, tokens: int = tokens) -> Tensor:
            return attention_loss(model, number, tokens)

        exact = gradient(model, loss)
        for mine, others in zip(gradient(model, loss, engine), exact, strict=True):
            assert error([mine], [others]) < bound
    assert_empty(engine)


class Fused(Attention):
    """The same with queries, keys and values that are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__({}, "fused")
        self.all = nn.Linear(128, 384)
        with torch.no_grad():
            self.all.bias.copy_(5 * normal(384, seed=7))

    def forward(self, x: Tensor) -> Tensor:
        parts = [each.view(len(x), -1, 2, 64).transpose(1, 2) for each in self.all(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts)


@pytest.mark.parametrize("packing", ["device", "workers", "auto"])
def test_parts_of_one_projection(packing: str) -> None:
    """They have holes between their rows, in passes that are replayed, too."""
    torch.manual_seed(0)
    model = Fused()
    engine = engine_for(model, 4, packing=packing)
    for number in range(4):
        exact = torch.autograd.grad(attention_loss(model, number), list(model.all.parameters()))
        with engine.compress():
            loss = attention_loss(model, number)
        assert error(list(torch.autograd.grad(loss, list(model.all.parameters()))), list(exact)) < 0.25
        engine.finish_step()
    assert_empty(engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_has_no_part_in_it(dtype: torch.dtype) -> None:
    """Products of float32 values overflow in float16, and differ from those of a thread that has no autocast."""
    values = normal(512, 1024) + 40 * (torch.arange(1024) % 256 < 2)
    values[7, 7] = 4000
    blocks = found(values)
    assert blocks is not None
    expected, rest = blocks.split(values)
    with torch.autocast("cpu", dtype):
        assert found(values) == blocks
        again, same = blocks.split(values)
    assert torch.equal(rest, same)
    assert all(torch.equal(*pair) for pair in zip(expected, again, strict=True))


def errors_while_training(passes: int, bias: dict[int, float], tokens: Sequence[int] = (128,)) -> list[float]:
    """Returns the error of each pass, of one length after the other, bit for bit those of the full way.

    From the passes that are keys of `bias` on values share a vector of so many deviations.
    """
    model, twin = make({}, "fused"), make({}, "fused")
    engine, other = (engine_for(each, 4, packing="device") for each in (model, twin))
    take_the_full_way(other)
    errors: list[float] = []
    for number in range(passes):
        length = tokens[number % len(tokens)]
        if number in bias:
            with torch.no_grad():
                for each in (model, twin):
                    each.value.bias.copy_(bias[number] * normal(128, seed=7))
        exact = gradient(model, lambda number=number, length=length: attention_loss(model, number, length))
        found = gradient(model, lambda number=number, length=length: attention_loss(model, number, length), engine)
        others = gradient(twin, lambda number=number, length=length: attention_loss(twin, number, length), other)
        assert all(torch.equal(*pair) for pair in zip(found, others, strict=True))
        errors.append(error(found, exact))
    return errors


def test_what_comes_while_a_model_trains_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is measured anew every so many passes, and where passes are replayed in the same one."""
    monkeypatch.setattr(common_row, "EVERY", 8)
    errors = errors_while_training(20, {4: 10.0})
    assert errors[3] < 0.22
    assert min(errors[4:8]) > 0.5
    assert max(errors[8:]) < 0.22


def test_what_comes_and_goes_is_noticed_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided for a length is not forgotten with what was measured, nor does it outlive that."""
    monkeypatch.setattr(common_row, "EVERY", 8)
    errors = errors_while_training(40, {12: 10.0, 28: 0.0}, (128, 96, 64))
    assert min(errors[12:16]) > 0.5
    assert max(errors[:12] + errors[16:]) < 0.22


def test_a_resumed_run_knows_what_rows_share() -> None:
    """It was measured in an earlier pass, when rows shared something else."""
    model = make({"key": 10.0, "value": 10.0}, "fused")
    engine, resumed = engine_for(model, 4), engine_for(model, 4)
    gradient(model, lambda: attention_loss(model, 0), engine)
    resumed.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    assert resumed.state_dict() == engine.state_dict()
    with torch.no_grad():
        model.key.bias.zero_()
        model.value.bias.zero_()
    expected = gradient(model, lambda: attention_loss(model, 1), engine)
    assert all(map(torch.equal, gradient(model, lambda: attention_loss(model, 1), resumed), expected))
    anew = gradient(model, lambda: attention_loss(model, 1), engine_for(model, 4))
    assert not all(map(torch.equal, anew, expected))


def test_a_state_holds_what_zeros_share_and_may_know_nothing_of_rows() -> None:
    """An adapter's values are zero in its first passes; states had no rows before."""
    layer = nn.Linear(96, 96)
    engine, resumed = engine_for(layer, 4), engine_for(layer, 4)
    with engine.compress():
        loss = layer(torch.zeros(4096, 96)).sum()
    loss.backward()
    state = json.loads(json.dumps(engine.state_dict()))
    assert state["rows"]["gains"]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    del state["rows"]
    engine_for(layer, 4).load_state_dict(state)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"passes": -1, "gains": []},
        {"passes": 1, "gains": [["", "", 0, True, 0, 0]]},
        {"passes": 1, "gains": [["", "", 0, 1, 0, 0, 2.0]]},
        {"passes": 1, "gains": [["", "", 0, True, 0, -2, 2.0]]},
        {"passes": 1, "gains": [["", "", 0, True, 0, 0, math.nan]]},
    ],
)
def test_what_is_no_state_changes_nothing(rows: dict[str, Any]) -> None:
    model = make({"key": 10.0}, "fused")
    engine = engine_for(model, 4)
    gradient(model, lambda: attention_loss(model, 0), engine)
    before = engine.state_dict()
    with pytest.raises(StateError, match="no saved state of what rows share"):
        engine.load_state_dict({**before, "rows": rows})
    assert engine.state_dict() == before


def test_a_budget_counts_what_rows_share() -> None:
    """It is never exceeded, and planes are dropped as ever."""
    model = make({"key": 5.0, "value": 5.0}, "fused")
    engine = engine_for(model, 8, packing="device", memory_budget=300_000)
    for number in range(4):
        with engine.compress():
            loss = attention_loss(model, number)
            assert engine.held_bytes <= 300_000
        assert engine.held_bytes <= 300_000
        check_pager(pager_of(engine))
        loss.backward()
        del loss
    assert engine.finish_step().dropped_planes > 0
    assert_empty(engine)
