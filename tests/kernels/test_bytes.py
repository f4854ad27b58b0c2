"""Every backend gives the bytes of the reference, and reads any bytes as the reference does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daf_kernels import Backend, Seed
from daf_kernels.cpu import backend as cpu
from daf_kernels.cpu.backend import CpuBackend
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal, random_bits
from tests.kernels.harness import CPU, REFERENCE, SEED, bits, decode, encode, layout_of

ROUNDINGS = [pytest.param(None, id="nearest"), pytest.param(SEED, id="stochastic")]


@pytest.mark.parametrize("planes", range(5), ids="planes{}".format)
@pytest.mark.parametrize("seed", ROUNDINGS)
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_bytes_are_those_of_the_reference(make: Make, dtype: torch.dtype, seed: Seed | None, planes: int) -> None:
    """Header, planes and answer agree, and so does every decoding of what is left, bit for bit."""
    values = make(dtype)
    expected, reference_answer = encode(REFERENCE, values, planes, seed)
    found, answer = encode(CPU, values, planes, seed)
    assert answer == reference_answer
    assert torch.equal(found.content, expected.content)
    for left in range(planes + 1):
        assert torch.equal(bits(decode(CPU, found, values, left)), bits(decode(REFERENCE, found, values, left)))


@pytest.mark.parametrize("planes", range(5), ids="planes{}".format)
@pytest.mark.parametrize("seed", ROUNDINGS)
@pytest.mark.parametrize("row", [2, 7, 12, 32, 33, 48, 63, 64])
def test_short_rows_may_have_groups_of_their_own(row: int, seed: Seed | None, planes: int) -> None:
    """Rows that normalizations read; elsewhere they share groups. Each has its own mean, and its own spread."""
    values = normal(300, row) * torch.logspace(-6, 6, 300)[:, None] + torch.arange(300)[:, None]
    expected, _ = encode(REFERENCE, values, planes, seed, own=True)
    found, answer = encode(CPU, values, planes, seed, own=True)
    assert answer
    assert torch.equal(found.content, expected.content)
    for left in range(planes + 1):
        decoded = decode(CPU, found, values, left, own=True)
        assert torch.equal(bits(decoded), bits(decode(REFERENCE, found, values, left, own=True)))
        spreads = values.amax(1) - values.amin(1)
        assert bool(((decoded - values).abs().amax(1) <= spreads).all())


@pytest.mark.parametrize("page_bytes", [128, 256, 4096, 65536])
@pytest.mark.parametrize("row", [79, 64, 8])
def test_bytes_do_not_depend_on_the_page_size(row: int, page_bytes: int) -> None:
    """A page holds a power of two of bytes, from 128 on; what is decoded is the same for each."""
    values = normal(12000 // row, row)
    expected, _ = encode(REFERENCE, values, 4, SEED, page_bytes)
    found, _ = encode(CPU, values, 4, SEED, page_bytes)
    assert torch.equal(found.content, expected.content)
    usual, _ = encode(CPU, values, 4, SEED)
    for planes in range(5):
        assert torch.equal(decode(CPU, found, values, planes), decode(CPU, usual, values, planes))


@pytest.mark.parametrize("seed", ROUNDINGS)
@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_no_planes_are_the_header_alone(holes: bool, backend: Backend, seed: Seed | None) -> None:
    """It takes the header's pages, with the bytes that it has beside planes, and decodes to the means of the groups."""
    values = normal(120, 2 * 129)[:, ::2] if holes else normal(120, 129)
    layout = layout_of(values)
    alone, usable = encode(backend, values, 0, seed)
    assert usable
    assert alone.pages.size == layout.header_pages > 1
    assert torch.equal(alone.content, encode(backend, values, 4, seed)[0].content[: layout.header_pages])
    decoded = decode(backend, alone, values, 0)
    for group, mean in zip(decoded.split(1), values.mean(1), strict=True):
        assert group.unique().numel() == 1
        assert float(group[0, 0]) == pytest.approx(float(mean), abs=1e-3)


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_no_planes_report_what_is_not_finite(backend: Backend) -> None:
    """The header says it as it does beside planes: its group is NaN, no other is."""
    values = normal(5, 128)
    values[3, 4] = torch.inf
    alone, usable = encode(backend, values, 0)
    assert not usable
    assert torch.equal(decode(backend, alone, values, 0).isnan(), (torch.arange(5) == 3)[:, None].expand(5, 128))


@pytest.mark.parametrize("seed", ROUNDINGS)
@pytest.mark.parametrize("planes", range(4))
def test_headers_depend_neither_on_precision_nor_on_rounding(planes: int, seed: Seed | None) -> None:
    """Moments are those of the values, not of the codes: lowering the precision leaves the header as it is."""
    values = normal(5, 129)
    header_pages = layout_of(values).header_pages
    full, fewer = encode(CPU, values, 4)[0], encode(CPU, values, planes, seed)[0]
    assert torch.equal(full.content[:header_pages], fewer.content[:header_pages])


@settings(max_examples=60)
@given(
    data=st.data(),
    rows=st.integers(1, 40),
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
    expected, reference_answer = encode(REFERENCE, values, planes, seed)
    found, answer = encode(CPU, values, planes, seed)
    assert answer == reference_answer
    assert torch.equal(found.content, expected.content)
    for left in range(planes + 1):
        assert torch.equal(bits(decode(CPU, found, values, left)), bits(decode(REFERENCE, found, values, left)))


@pytest.mark.parametrize("seed", ROUNDINGS)
@pytest.mark.parametrize("row", [768, 100, 64, 8])
@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, row: int, seed: Seed | None, holes: bool) -> None:
    """A tensor that is split over threads, and staged in pieces, gives the bytes of one that is not."""
    values = normal(80000 // row, 2 * row)
    values = values[:, ::2] if holes else values[:, :row].contiguous()
    alone, _ = encode(CPU, values, 3, seed)
    monkeypatch.setattr(cpu, "SPLIT", 512)
    monkeypatch.setattr(cpu, "STAGE", 8192)
    split = CpuBackend(threads=3)
    together, answer = encode(split, values, 3, seed)
    assert answer
    assert torch.equal(together.content, alone.content)
    out = torch.empty_strided(values.shape, values.stride())
    split.decode(out, layout_of(values), 2, together, together.pages)
    assert torch.equal(out, decode(CPU, alone, values, 2))


@pytest.mark.parametrize("index", [0, 40000, 79999])
def test_a_nan_is_reported_from_any_thread(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """The answer counts the groups of all threads."""
    monkeypatch.setattr(cpu, "SPLIT", 512)
    values = normal(80000)
    values[index] = torch.nan
    assert not encode(CpuBackend(threads=3), values, 1)[1]


@pytest.mark.parametrize("word", range(4))
def test_every_word_of_the_seed_counts(word: int) -> None:
    """The same seed gives the same bytes; another in any of its words gives others."""
    values = normal(4, 256)
    other = tuple(number ^ (index == word) for index, number in enumerate(SEED))
    first, again, different = (encode(CPU, values, 2, seed)[0].content for seed in (SEED, SEED, other))
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


def test_generators_of_others_are_left_alone() -> None:
    """Stochastic rounding draws from its own counter: a run with DAF sees torch's random numbers unchanged."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    values = normal(4, 256)
    for backend in (CPU, REFERENCE):
        decode(backend, encode(backend, values, 2, SEED)[0], values, 2)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
