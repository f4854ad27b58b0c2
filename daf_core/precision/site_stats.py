"""The lossy activations of one forward pass: what they could take, and what they take."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daf_core.autograd.sites import Site
from daf_core.codecs.plane_importance import LEVELS
from daf_core.codecs.planes import PlanesActivation
from daf_core.model.treatments import Treatments
from daf_core.state_checks import count, flag

KINDS = 4
"""Kinds of steps that are remembered beside the last: elastic training has three, and those of plans are others."""

Sizes = Mapping[Site, Sequence[int]]  # bytes of each site's activations at each of `LEVELS`, and as they are


_Counted = tuple[Site, Sequence[int], int | None, weakref.ref[PlanesActivation] | None]
"""An activation's site, its bytes at each precision and as it is, the bits it has (None: exact), and its codes; a tuple
with names takes nine times as long to make."""


class SiteStatistics:
    """Counts lossy activations by site, without keeping them alive."""

    def __init__(self) -> None:
        self._stored: list[_Counted] = []

    def add(self, site: Site, sizes: Sequence[int], stored: PlanesActivation | None = None) -> None:
        """Counts an activation; None stays as it is."""
        if stored is None:
            self._stored.append((site, sizes, None, None))
        else:
            self._stored.append((site, sizes, stored.precision, weakref.ref(stored)))

    def withdraw(self, site: Site) -> None:
        """Takes back the last activation of a site, if it is gone: others may share it."""
        for place in reversed(range(len(self._stored))):
            counted, _, _, stored = self._stored[place]
            if counted == site and (stored is None or stored() is None):
                del self._stored[place]
                return

    @property
    def sizes(self) -> dict[Site, list[int]]:
        """Bytes of each site."""
        found: dict[Site, list[int]] = {}
        for site, sizes, _, _ in self._stored:
            known = found.get(site)
            found[site] = list(sizes) if known is None else [a + b for a, b in zip(known, sizes, strict=True)]
        return found

    def precisions(self) -> dict[Site, int | None]:
        """Returns the bits that each site has now, the fewest where it occurs several times; None is exact.

        For an activation that is gone, because backward has run, they are the bits that it was stored with.
        """
        found: dict[Site, int | None] = {}
        for site, _, bits, reference in self._stored:
            stored = None if reference is None else reference()
            bits = bits if stored is None else stored.precision
            known = found.setdefault(site, bits)
            if bits is not None:
                found[site] = bits if known is None else min(known, bits)
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes that they hold now."""
        alive = [stored() for _, _, _, stored in self._stored if stored is not None]
        return sum(stored.held_bytes for stored in alive if stored is not None)


@dataclass(frozen=True)
class PassStatistics:
    """What is remembered of forward passes, for each site from the last one that it was in.

    These are the bits that it was stored with, None for exact, and its bytes at each precision. `known` says whether
    there was a pass.
    """

    precisions: Mapping[Site, int | None] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)
    known: bool = False

    def updated(self, precisions: Mapping[Site, int | None], sizes: Sizes) -> PassStatistics:
        """Returns what is remembered after another pass; a step may have several, of other modules each."""
        return PassStatistics({**self.precisions, **precisions}, {**self.sizes, **sizes}, known=True)

    def state(self) -> dict[str, Any]:
        """Returns it as JSON-able values."""
        return {"sites": [[*site, bits, *self.sizes[site]] for site, bits in self.precisions.items()]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PassStatistics:
        """Returns what `state` was made from; raises one of `DAMAGED` if that was something else."""
        sites = [Site.from_state(entry[:3]) for entry in state["sites"]]
        bits = [checked_bits(entry[3]) for entry in state["sites"]]
        sizes = [[count(size) for size in entry[4:]] for entry in state["sites"]]
        if any(len(site_sizes) != len(LEVELS) + 1 for site_sizes in sizes):
            raise ValueError("a site has a size for each precision")
        return cls(dict(zip(sites, bits, strict=True)), dict(zip(sites, sizes, strict=True)), known=bool(sites))


class KindsOfPasses:
    """What is remembered of forward passes of each kind of step, where a few of them take turns.

    What one kind has stored another may not store. `last` is what is remembered with the treatments of now.
    """

    def __init__(self, treatments: Treatments | None = None) -> None:
        self.treatments = treatments or Treatments()
        self.last = PassStatistics()
        self._others: list[tuple[Treatments, PassStatistics]] = []

    def turn_to(self, treatments: Treatments) -> None:
        """Goes on with passes of other treatments."""
        if treatments != self.treatments:
            known = [(self.treatments, self.last)] if self.last.sizes else []
            self._turn_to(treatments, [*known, *self._others])

    def state(self) -> dict[str, Any]:
        """Returns it as JSON-able values."""
        others = [{**last.state(), **treatments.state()} for treatments, last in self._others]
        return {**self.last.state(), **self.treatments.state(), "others": others}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; a state without treatments is taken to be of those now.

        Raises one of `DAMAGED` if it is something else.
        """
        kinds = [state, *state.get("others", ())]
        treatments = [_treatments_of(each) if "kept" in each else self.treatments for each in kinds]
        passes = [PassStatistics.from_state(each) for each in kinds]
        self._turn_to(self.treatments, list(zip(treatments, passes, strict=True)))

    def _turn_to(self, treatments: Treatments, known: Sequence[tuple[Treatments, PassStatistics]]) -> None:
        self.last = next((last for kind, last in known if kind == treatments), PassStatistics())
        self._others = [each for each in known if each[0] != treatments][:KINDS]
        self.treatments = treatments


def _treatments_of(state: Mapping[str, Any]) -> Treatments:
    names = [*state["kept"], *state["recomputed"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} are no names")
    return Treatments({name: flag(kept) for name, kept in state["kept"].items()}, frozenset(state["recomputed"]))


def checked_bits(value: Any) -> int | None:
    """Returns a precision that was saved, None for exact; anything else is a ValueError."""
    if value is not None and (type(value) is not int or value not in LEVELS):
        raise ValueError(f"{value!r} is no precision")
    return value
