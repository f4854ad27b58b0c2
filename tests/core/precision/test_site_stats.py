"""The census of a pass: bytes and bits of each site, without keeping an activation alive."""

from __future__ import annotations

import itertools

import pytest
import torch

from daf_core.autograd.sites import Site
from daf_core.codecs.base import EncodeContext
from daf_core.codecs.plane_importance import LEVELS
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_core.precision.site_stats import SiteStatistics
from daf_kernels import load_backend
from tests.core.harness import LARGE, normal
from tests.core.leases import PAGE

CPU = torch.device("cpu")
HERE, THERE = Site("block.0", "GeluBackward0", 1), Site("block.1", "GeluBackward0", 1)
SIZES = (1, 2, 3, 4, 5, 6)


def _pager(page_bytes: int = PAGE) -> Pager:
    return Pager(PagePool(CPU, page_bytes=page_bytes))


def _context(pager: Pager, elements: int, precision: int = 8) -> EncodeContext:
    backend = load_backend(CPU, "auto")
    return EncodeContext(normal(elements), pager, backend, Grouping(LARGE[-1]), precision=precision)


def _store(pager: Pager, precision: int, elements: int = 8192) -> PlanesActivation | None:
    return PlanesActivation.write(_context(pager, elements, precision))


def _stored(pager: Pager, precision: int) -> PlanesActivation:
    stored = _store(pager, precision)
    assert stored is not None
    return stored


def _precisions(census: SiteStatistics) -> dict[Site, int | None]:
    return dict(census.precisions())


def test_nothing_was_stored() -> None:
    """An empty pass has no sites and holds nothing."""
    assert (SiteStatistics().sizes, SiteStatistics().precisions(), SiteStatistics().held_bytes) == ({}, {}, 0)


def test_sizes_add_up_by_site() -> None:
    """A module that is called twice takes the bytes of both calls; other sites count for themselves."""
    census = SiteStatistics()
    for site, sizes in ((HERE, SIZES), (THERE, (10,) * 6), (HERE, (100,) * 6)):
        census.add(site, sizes)
    assert census.sizes == {HERE: [101, 102, 103, 104, 105, 106], THERE: [10] * 6}


def test_sizes_that_were_given_stay_as_they_are() -> None:
    """Codecs hand out the same list every time."""
    sizes, census = list(SIZES), SiteStatistics()
    for _ in range(3):
        census.add(HERE, sizes)
    assert sizes == list(SIZES)
    assert census.sizes[HERE] == [3 * size for size in SIZES]


@pytest.mark.parametrize("fewest", [0, 2])
@pytest.mark.parametrize("places", [*itertools.permutations(range(3))], ids=str)
def test_fewest_bits_of_a_site_count(places: tuple[int, ...], fewest: int) -> None:
    """In whatever order they were stored; other sites do not matter."""
    pager, census = _pager(), SiteStatistics()
    kept = [_stored(pager, precision) for precision in (*((8, fewest, 4)[place] for place in places), 1)]
    for site, stored in zip((HERE, HERE, HERE, THERE), kept, strict=True):
        census.add(site, SIZES, stored)
    assert _precisions(census) == {HERE: fewest, THERE: 1}


@pytest.mark.parametrize("precision", LEVELS)
def test_bits_of_a_single_activation(precision: int) -> None:
    """0 bits, of which the means of scaling groups are left, are fewer than 1, not exact."""
    census = SiteStatistics()
    stored = _stored(_pager(), precision)
    census.add(HERE, SIZES, stored)
    assert _precisions(census) == {HERE: precision}


def test_activation_that_stays_as_it_is_is_exact() -> None:
    """None is more than 8 bits."""
    census = SiteStatistics()
    census.add(HERE, SIZES)
    census.add(HERE, SIZES, None)
    assert _precisions(census) == {HERE: None}
    assert census.held_bytes == 0


@pytest.mark.parametrize("exact_first", [True, False])
@pytest.mark.parametrize("precision", [0, 4])
def test_exact_beside_coded(exact_first: bool, precision: int) -> None:
    """The coded one has fewer bits."""
    census, stored = SiteStatistics(), _stored(_pager(), precision)
    for occurrence in (None, stored) if exact_first else (stored, None):
        census.add(HERE, SIZES, occurrence)
    assert _precisions(census) == {HERE: precision}


def test_planes_that_were_dropped_since_do_not_count() -> None:
    """What is left now is asked for, not what was stored: the budget takes planes when later activations come."""
    pager, census = _pager(), SiteStatistics()
    stored = _stored(pager, 8)
    census.add(HERE, SIZES, stored)
    before = census.held_bytes
    pager.set_budget(pager.settle() // 2)
    assert _precisions(census) == {HERE: stored.precision}
    assert stored.precision < 8
    assert 0 < census.held_bytes == pager.settle() <= before // 2


def test_activations_are_not_kept_alive() -> None:
    """A graph that goes gives its pages back, and its bytes count no more; what is left counts on."""
    pager, census = _pager(), SiteStatistics()
    kept = [_stored(pager, 4), _stored(pager, 8)]
    for stored in kept:
        census.add(HERE, SIZES, stored)
    del stored
    assert census.held_bytes == pager.settle() == sum(stored.held_bytes for stored in kept)
    kept.pop(0)
    assert census.held_bytes == pager.settle() == kept[0].held_bytes
    assert _precisions(census) == {HERE: 4}, "of what is gone, the bits that it was stored with"
    kept.clear()
    assert census.held_bytes == pager.settle() == pager.leased_pages == 0
    assert _precisions(census).keys() == census.sizes.keys() == {HERE}


@pytest.mark.parametrize("page_bytes", [128, 4096])
@pytest.mark.parametrize("elements", [128, 200, 1000, 4096, 8192, 100_000])
def test_sizes_of_a_codec_are_what_it_takes(page_bytes: int, elements: int) -> None:
    """At each level, and as the values are, which is the most: a level that takes no less leaves them so."""
    *sizes, raw = PlanesActivation.sizes(_context(_pager(page_bytes), elements))
    assert raw == 4 * elements
    for precision, size in zip(LEVELS, sizes, strict=True):
        pager = _pager(page_bytes)
        stored = _store(pager, precision, elements)
        assert size == (raw if stored is None else stored.held_bytes)
        assert pager.settle() == (0 if stored is None else size)
