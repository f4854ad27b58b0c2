"""The Triton kernels give the bytes of the reference, and read any bytes as the reference does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf_kernels import Seed
from daf_kernels.triton import launch
from daf_kernels.triton.autotune import Selector
from daf_kernels.triton.backend import TritonBackend
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal, random_bits
from tests.kernels.harness import REFERENCE, SEED, Embedded, bits, decode, encode, layout_of, used_bytes
from tests.kernels.triton_device import DEVICE, PAGE_BYTES, TRITON

# What is stored, how it is rounded, and what is left of it when read: the interpreter is too slow for all of them.
EIGHT, FOUR, TWO, ONE = (4, None, (4, 0)), (3, SEED, (2,)), (2, None, (2,)), (1, SEED, (1,))
TensorKind = tuple[int, "Seed | None", "tuple[int, ...]"]


AS_LAUNCHES = pytest.mark.parametrize("few", [0, launch.FEW_PROGRAMS], ids=["two launches", "one launch"])
"""Where the last program is not full."""


class InTwo(Selector):
    """Takes the last of the ways there are."""

    def choose(self, problem: str, ways: dict[str, object]) -> str:
        return list(ways)[-1]


def check(
    values: Tensor, form: TensorKind, page_bytes: int = PAGE_BYTES, backend: TritonBackend = TRITON, own: bool = False
) -> None:
    """Compares what is stored of a tensor, what is answered, and what is read back, bit for bit."""
    planes, seed, left = form
    expected, reference_answer = encode(REFERENCE, values, planes, seed, page_bytes, own=own)
    found, answer = encode(backend, values.to(DEVICE), planes, seed, page_bytes, own=own)
    assert answer == reference_answer
    assert torch.equal(found.content.cpu(), expected.content)
    for fewer in left:
        decoded = decode(backend, found, values.to(DEVICE), fewer, own)
        assert torch.equal(bits(decoded.cpu()), bits(decode(REFERENCE, expected, values, fewer, own)))


@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_bytes_are_those_of_the_reference(make: Make, dtype: torch.dtype) -> None:
    values = make(dtype)
    for form in (EIGHT, FOUR, TWO, ONE) if dtype is torch.float32 else (FOUR, TWO):
        check(values, form)


@pytest.mark.parametrize("planes", range(5))
@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("row", [256, 128, 64, 100])
def test_every_precision_in_every_kind_of_group(row: int, planes: int, seed: Seed | None) -> None:
    """Groups of one block, of half and of a quarter of one, and some that follow no block; the last one is cut."""
    values = normal(-(-900 // row), row)
    check(values, (planes, seed, tuple(range(planes + 1))))


@pytest.mark.parametrize("form", [EIGHT, FOUR, TWO, ONE], ids=str)
@pytest.mark.parametrize("row", [2, 7, 12, 32, 48, 63, 64])
def test_short_rows_may_have_groups_of_their_own(row: int, form: TensorKind) -> None:
    check(normal(-(-900 // row), row), form, own=True)


@pytest.mark.parametrize("form", [EIGHT, FOUR, TWO, ONE], ids=str)
@pytest.mark.parametrize("row", [256, 128])
def test_two_kernels_give_the_bytes_of_one(row: int, form: TensorKind) -> None:
    check(normal(2100 // row, row), form, backend=TritonBackend(InTwo(torch.device("cpu"))))


@pytest.mark.parametrize("page_bytes", [128, 256, 65536])
@pytest.mark.parametrize("row", [256, 100])
def test_pages_of_any_size(row: int, page_bytes: int) -> None:
    check(normal(1200 // row, row), (4, None, (4, 2)), page_bytes)


@AS_LAUNCHES
@pytest.mark.parametrize("row", [256, 192, 50])
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_full_programs_and_a_rest(monkeypatch: pytest.MonkeyPatch, row: int, dtype: torch.dtype, few: int) -> None:
    """More elements than a program takes; those of many programs are not asked whether they exist."""
    monkeypatch.setattr(launch, "FEW_PROGRAMS", few)
    values = normal(20000 // row, row).to(dtype)
    assert values.numel() > launch.blocks_of_program(dtype.itemsize, PAGE_BYTES, 4) * 256
    check(values, (4, SEED, (4, 1)))


def test_elements_need_not_be_aligned() -> None:
    """A view that begins in the middle of a vector."""
    check(normal(2049)[1:].view(8, 256), (3, None, (3,)))


@settings(max_examples=15)
@given(
    data=st.data(),
    rows=st.integers(1, 20),
    row=st.integers(1, 300),
    planes=st.integers(0, 4),
    seed=st.none() | st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
    dtype=st.sampled_from(FLOAT_TYPES),
)
def test_any_bits_in_any_shape(
    data: st.DataObject, rows: int, row: int, planes: int, seed: Seed | None, dtype: torch.dtype
) -> None:
    """Elements of random bits, NaNs and infinities among them, of a spread that varies from group to group."""
    seed_of_bits, shift = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from([0, 4, 12, 20, 26]))
    values = random_bits(seed_of_bits, shift, rows, row, dtype)
    check(values, (planes, seed, (planes, planes // 2)))


@pytest.mark.parametrize("row", [256, 100])
def test_encoding_writes_its_bytes_only(row: int) -> None:
    """What a page holds besides them stays, and every one of them is written, whatever was there before."""
    values = normal(10, row).to(DEVICE)
    used = used_bytes(layout_of(values, PAGE_BYTES), 4)
    dirty, other = (encode(TRITON, values, 4, None, PAGE_BYTES, fill)[0].content.cpu() for fill in (0x5A, 0xA5))
    assert (dirty[~used] == 0x5A).all()
    assert torch.equal(dirty[used], other[used])


@pytest.mark.parametrize("step", [1, 3], ids=["dense", "holes"])
@pytest.mark.parametrize("row", [256, 100])
def test_decoding_writes_its_elements_only(row: int, step: int) -> None:
    values = normal(7, row)
    memory, _ = encode(TRITON, values.to(DEVICE), 4, None, PAGE_BYTES)
    out = Embedded((7, row), torch.float32, step, DEVICE)
    layout = layout_of(values, PAGE_BYTES)
    TRITON.decode(out.tensor, layout, 4, memory, memory.pages)
    assert torch.equal(out.tensor, decode(TRITON, memory, values.to(DEVICE), 4))
    out.check()


@AS_LAUNCHES
def test_a_nan_anywhere_is_reported(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(launch, "FEW_PROGRAMS", few)
    for index in (0, 8191, 8192, 8999):
        values = normal(9000)
        values[index] = torch.nan
        assert not encode(TRITON, values.to(DEVICE), 1, None, PAGE_BYTES)[1]
