"""Numbers of free pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from daf_kernels import Pages


def runs(numbers: Pages, cuts: Pages | None = None) -> Iterator[slice]:
    """Yields where numbers count up one by one; no run goes across one of the `cuts`."""
    breaks = np.diff(numbers) != 1
    if cuts is not None:
        breaks |= np.isin(numbers[1:], cuts)
    ends = [0, *(np.flatnonzero(breaks) + 1).tolist(), numbers.size]
    yield from (slice(first, stop) for first, stop in pairwise(ends))


class FreeList:
    """A stack of page numbers: what was given back last is taken first, while it is in the cache.

    A step gives back in another order than it takes, and the next one would take other pages. After `sort`, a step that
    does as the last one gets the pages of the last one.

    Taking and giving a page is one copy of its number. Every number is known to be free or taken, so that giving one
    back twice is an error and not a page with two owners.
    """

    def __init__(self) -> None:
        self._stack = np.empty(0, np.int64)
        self._taken = np.empty(0, np.bool_)
        self.count = 0
        self.untouched = 0
        """Free pages that were never taken: those of the highest numbers, at the bottom of the stack."""

    @property
    def total(self) -> int:
        """Pages, free or taken; their numbers count from 0."""
        return self._taken.size

    @property
    def used(self) -> int:
        """Pages that are taken."""
        return self.total - self.count

    def take(self, count: int) -> Pages:
        """Returns the numbers of `count` pages, in ascending order.

        Raises:
            ValueError: Fewer are free.
        """
        if count > self.count:
            raise ValueError(f"{count} pages were asked for, and {self.count} of {self.total} are free")
        self.count -= count
        self.untouched = min(self.untouched, self.count)
        numbers = self._stack[self.count : self.count + count].copy()
        numbers.sort()
        self._taken[numbers] = True
        return numbers

    def give(self, numbers: Pages) -> None:
        """Takes pages back.

        Raises:
            ValueError: One of them is free already, named twice, or beyond those that there are.
        """
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.total:
            raise ValueError(f"some of the pages {numbers.tolist()} are none of the {self.total} that there are")
        # Numbers are ascending as they were taken, so that no two are alike, and a pool that has not been used much has
        # runs of neighbours: a slice is four times as fast as a list of numbers.
        ascending = bool((numbers[1:] > numbers[:-1]).all())
        neighbours = ascending and numbers.size > 0 and int(numbers[-1]) - int(numbers[0]) < numbers.size
        where = slice(int(numbers[0]), int(numbers[-1]) + 1) if neighbours else numbers
        twice = not ascending and np.unique(numbers).size < numbers.size
        if twice or not self._taken[where].all():
            raise ValueError(f"some of the pages {numbers.tolist()} are given back twice")
        self._taken[where] = False
        self._stack[self.count : self.count + numbers.size] = numbers[::-1]
        self.count += numbers.size

    def extend(self, count: int) -> None:
        """Adds `count` pages beneath those that are free, lowest on top, so that used ones are used again first."""
        fresh = np.arange(self.total + count - 1, self.total - 1, -1)
        grown = np.empty(self.total + count, np.int64)
        grown[:count] = fresh
        grown[count : count + self.count] = self._stack[: self.count]
        self._stack = grown
        self._taken = np.concatenate([self._taken, np.zeros(count, np.bool_)])
        self.count += count
        self.untouched += count

    def truncate(self, total: int) -> None:
        """Forgets the pages from number `total` on.

        Raises:
            ValueError: One of them is taken.
        """
        if self._taken[total:].any():
            raise ValueError(f"pages from {total} on are in use")
        kept = self._stack[: self.count]
        kept = kept[kept < total]
        self.count = kept.size
        self.untouched = max(total - (self.total - self.untouched), 0)
        self._stack = np.concatenate([kept, np.empty(total - kept.size, np.int64)])
        self._taken = self._taken[:total].copy()

    def sort(self) -> None:
        """Has the lowest free numbers taken first, whatever the order in which they were given back."""
        self._stack[: self.count] = np.flatnonzero(~self._taken)[::-1]

    def free_from(self, first: int) -> bool:
        """Says whether all pages from number `first` on are free."""
        return not self._taken[first:].any()
