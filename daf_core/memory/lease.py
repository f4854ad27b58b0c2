"""The pages of one activation, and what it may lose of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from daf_kernels import PageAddresses, Pages

Drop = tuple[float, int]
"""Importance of a drop, and the planes that are left after it."""

Callback = Callable[["Lease"], None]
"""What is done at the end of a block in which a lease is written or read."""

NOWHERE: Pages = np.empty(0, np.int64)
NO_ADDRESSES = PageAddresses(NOWHERE)


class Outside:
    """Bytes that are counted, and lie outside of the pool."""

    __slots__ = ("reference", "size")

    def __init__(self, size: int = 0) -> None:
        self.size = size  # how many; 0 before they are counted, and when they are no longer
        self.reference: object = None  # refers to their owner, if they have one


class Lease:
    """Pages of the pool that belong to one activation, from when it is encoded until its last handle dies.

    The page list begins with the pages that the activation cannot do without (its header; all of a mask), followed by
    those of its planes, most significant first. The fields belong to the pager, except that who reads or writes the
    pages inside `Pager.reading` or `Pager.writing` may rely on `pages` and `planes`.
    """

    __slots__ = (
        "_ends", "addresses", "drops", "kind", "least", "loading", "pages", "planes", "readers", "reference",
        "released", "serial", "size", "slots",
    )  # fmt: skip

    def __init__(self, serial: int, fixed: int, planes: Sequence[int], drops: list[Drop]) -> None:
        if fixed < 1:
            raise ValueError(f"an activation has at least one page that it cannot do without, got {fixed}")
        self.serial = serial  # leases count up in the order of encoding; backward needs them in the opposite order
        self.pages: Pages = NOWHERE  # page numbers; empty while the activation is not in memory
        self.planes = len(planes)  # how many leading planes are stored
        self.drops = drops  # what may be dropped, the next one last
        self.readers = 0  # reads and writes in progress; nothing is taken from the lease meanwhile
        self.slots: Pages | None = None  # its place in the next tier, or None
        # Set when a read from there, now in progress, ends; None without one.
        self.loading: threading.Event | None = None
        self.released = False  # whether its last handle died
        # What leases like it have in common; None where they do not keep their pages.
        self.kind: LeaseKind | None = None
        self.reference: object = None  # refers to its owner, where it has a kind
        self.addresses = NO_ADDRESSES  # where its pages lie, where it has a kind
        self._ends = list(accumulate(planes, initial=fixed))
        self.size = self._ends[-1]  # pages of the planes that are stored, and of what comes before them
        # Pages that are left when everything was dropped that may be.
        self.least = self._ends[drops[0][1]] if drops else self.size

    @property
    def resident(self) -> bool:
        """Whether it is in memory."""
        return self.pages.size > 0

    def drop(self) -> int:
        """Gives the next planes up and returns how many there are; their pages are those beyond `size`."""
        before, planes = self.planes, self.drops[-1][1]
        # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all three.
        del self.drops[-1]
        self.planes = planes
        self.size = self._ends[planes]
        return before - planes


class LeaseKind:
    """What leases have in common whose activations are of one size, and in as many bits.

    Attributes:
        fixed: Pages that they cannot do without.
        planes: Pages of each plane.
        importances: Growth of the error if a plane is dropped, per byte that this frees.
        size: Pages of one of them.
        bytes: Their bytes.
        free: Those that were given back, with their pages: the activation of the next step takes one as it is.
        retired: Whether it is not remembered any more, so that none of them keeps its pages.
    """

    __slots__ = ("bytes", "fixed", "free", "importances", "planes", "retired", "size")

    def __init__(self, fixed: int, planes: Sequence[int], importances: Sequence[float], page_bytes: int) -> None:
        self.fixed, self.planes, self.importances = fixed, tuple(planes), tuple(importances)
        self.size = fixed + sum(planes)
        self.bytes = self.size * page_bytes
        self.free: list[Lease] = []
        self.retired = False


def plan_drops(planes: Sequence[int], importances: Sequence[float], least: int) -> list[Drop]:
    """Returns in which portions planes are dropped, the next one last.

    Planes can only be dropped from the end, so a plane that is less important than the one behind it goes together with
    that one, at their common importance. The portions' importances fall from the first plane to the last, and taking
    always the least important portion of all leases gives the least error for the bytes that are freed.

    Args:
        planes: Pages of each plane.
        importances: Growth of the error if the plane is dropped, per byte that this frees.
        least: Leading planes that are kept in any case.

    Raises:
        ValueError: A plane has no page, there is not one importance for each, or one is NaN or negative.
    """
    if min(planes, default=1) < 1:
        raise ValueError(f"a plane has at least one page, got {list(planes)}")
    if len(planes) != len(importances) or not all(importance >= 0 for importance in importances):
        raise ValueError(f"{len(planes)} planes need as many importances of 0 or more, got {list(importances)}")
    portions: list[tuple[float, int, int]] = []  # importance, pages, planes left
    for plane in range(least, len(planes)):
        importance, pages, left = importances[plane], planes[plane], plane
        while portions and portions[-1][0] < importance:
            before, more, left = portions.pop()
            importance = (importance * pages + before * more) / (pages + more) if importance < math.inf else math.inf
            pages += more
        portions.append((importance, pages, left))
    return [(importance, left) for importance, _, left in portions]


planned_drops = lru_cache(maxsize=4096)(plan_drops)


class LeaseScope:
    """Context manager inside which a lease is written, or its pages and planes stay as they are.

    A class: a generator would cost 20 us with cold caches, a tenth of what storing an activation takes in Python.
    `leave` is called at the end, and then `fail`, if there is one, where the block has raised an error.
    """

    __slots__ = ("_fail", "_leave", "lease")

    def __init__(self, lease: Lease, leave: Callback, fail: Callback | None = None) -> None:
        self.lease, self._leave, self._fail = lease, leave, fail

    def __enter__(self) -> Lease:
        return self.lease

    def __exit__(self, kind: object, *_: object) -> None:
        self._leave(self.lease)
        if kind is not None and self._fail is not None:
            self._fail(self.lease)
