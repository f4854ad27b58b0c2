"""The precision of each site: from the configuration, and from what calibrations have found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from daf_core.autograd.sites import Site
from daf_core.codecs.plane_importance import LEVELS, SiteErrors
from daf_core.codecs.registry import calibrated_codecs
from daf_core.config import DAFConfig
from daf_core.knapsack.choose import Knapsack, Point
from daf_core.precision.calibration import Calibration
from daf_core.precision.site_stats import Sizes, checked_bits
from daf_core.readers.sharpness import bits_for
from daf_core.state_checks import amount, as_a_whole, count, flag

UNIFORM = 4  # bits where the configuration leaves the choice and nothing is known yet

MOST = LEVELS[-1]

ALL_LEVELS = (*LEVELS, None)  # what may be planned for a site; None keeps its activations as they are
NEWEST = 0.5  # weight of a calibration against all before it: importances change while a model learns
RECENT = 10  # passes whose smallest the plan for a budget is made for
ALIKE = 0.1  # relative difference in bytes between passes for which one plan serves


class Pass(NamedTuple):
    """A forward pass: bytes of its lossy activations as they are, bytes that they may take, and bytes of each site."""

    raw: int
    room: int
    sizes: Sizes

    def is_like(self, other: Pass) -> bool:
        """Whether a plan for one serves the other."""
        pairs = ((self.raw, other.raw), (self.room, other.room))
        return self.sizes.keys() <= other.sizes.keys() and all(math.isclose(*each, rel_tol=ALIKE) for each in pairs)


class PrecisionPolicy:
    """Says in how many bits activations are stored, and what their planes are worth.

    Of modules that are `recomputed` only the input is stored, see `Treatments`.
    """

    def __init__(self, config: DAFConfig) -> None:
        self._config = config
        self._errors: SiteErrors = {}
        self._codecs: Mapping[Site, str] = {}
        self.plan: Mapping[Site, int | None] = {}  # the planned precision of each site; empty without a plan
        self._recent: deque[Pass] = deque(maxlen=RECENT)
        self._planned: Pass | None = None
        self.recomputed: frozenset[str] = frozenset()
        self._fixed: tuple[object, ...] = ()

    @property
    def token(self) -> object:
        """The same object as long as every site has the same precision and codec."""
        # Compared by value: a step that is run again puts back what these dictionaries contain.
        now = (self.plan, self._codecs, self.recomputed, self._errors.keys())
        if now != self._fixed:
            self._fixed = dict(self.plan), dict(self._codecs), self.recomputed, dict.fromkeys(self._errors).keys()
        return self._fixed

    @property
    def calibrated(self) -> bool:
        """Whether anything is known of any site."""
        return bool(self._errors)

    def precision(self, site: Site, deviation: float = 0.0) -> int | None:
        """Returns the code bits for a site; None leaves its activations as they are.

        `deviation` is that of the `Reading` of what is saved there, as of a query's scores; a plan has measured what it
        does.
        """
        if site.module in self.recomputed:
            return MOST
        fixed = self._config.precision
        if fixed != "auto":
            assert fixed != "exact"
            return bits_for(fixed, deviation)
        if site in self.plan:
            return self.plan[site]
        if self.plan and site not in self._errors:
            return MOST
        unbounded = self._config.memory_budget is None and self._config.max_gradient_error is None
        return bits_for(max(UNIFORM, self._config.min_precision or 0) if unbounded else MOST, deviation)

    def codec(self, site: Site) -> str | None:
        """Returns the name of the codec that a calibration has chosen for a site; None where it has chosen none."""
        return self._codecs.get(site) if self._config.precision == "auto" else None

    def errors(self, site: Site) -> Sequence[float] | None:
        """Returns the squared gradient error of a site at each of `LEVELS`; None where no site is calibrated.

        A site that was never seen counts as the worst of those that were.
        """
        if not self._errors:
            return None
        return self._errors.get(site) or [max(errors) for errors in zip(*self._errors.values(), strict=True)]

    def learn(self, found: Calibration, replace: bool = False) -> None:
        """Takes a calibration in, averaged with those before or instead of them; other sites keep what is known."""
        kept = {site: name for site, name in self._codecs.items() if site not in found.errors}
        self._codecs = {**kept, **found.codecs}
        for site, errors in _filled(found.errors).items():
            known = errors if replace else self._errors.get(site, errors)
            self._errors[site] = [(1 - NEWEST) * old + NEWEST * new for old, new in zip(known, errors, strict=True)]
        self._planned = None

    def forget(self) -> None:
        """Forgets all calibrations, and the plan."""
        self._errors, self._codecs, self.plan, self._planned = {}, {}, {}, None

    def predict(self, precisions: Mapping[Site, int | None]) -> float:
        """Returns the squared gradient error that these precisions are expected to give."""
        total = 0.0
        for site, bits in precisions.items():
            errors = self.errors(site)
            total += 0.0 if bits is None or errors is None else errors[LEVELS.index(bits)]
        return total

    def keep_error(self, sizes: Sizes, squared_error: float, least: int = 0) -> None:
        """Plans the fewest bytes for a squared gradient error, with `least` bits or more or exactly."""
        self._choose(sizes, ALL_LEVELS, least, squared_error, swapped=True)

    def fill(self, sizes: Sizes, room: int) -> None:
        """Plans the least error in `room` bytes."""
        self._choose(sizes, LEVELS, 0, room)

    def follow(self, sizes: Sizes, room: int | None) -> None:
        """Plans anew where it is worth it, after a pass that took `sizes` and could have had `room` bytes for them.

        The plan is made for the smallest of the last `RECENT` passes: larger ones lose their least important planes to
        the budget, while planes that were never stored cannot be had back. Without a budget the room is what `UNIFORM`
        bits everywhere would take.
        """
        if self._config.precision != "auto" or self._config.max_gradient_error is not None or not self.calibrated:
            return
        if room is None:
            room = sum(site_sizes[LEVELS.index(UNIFORM)] for site_sizes in sizes.values())
        self._recent.append(Pass(sum(site_sizes[-1] for site_sizes in sizes.values()), room, sizes))
        smallest = min(self._recent, key=lambda recent: recent.raw / max(recent.room, 1))
        if self._planned is None or not smallest.is_like(self._planned):
            self._planned = smallest
            self.fill(smallest.sizes, smallest.room)

    def state(self) -> dict[str, Any]:
        """Returns what is known, as JSON-able values."""
        codecs = {
            codec.name: [[*site] for site in sorted(self._codecs) if self._codecs[site] == codec.name]
            for codec in calibrated_codecs()
        }
        return {
            "errors": [[*site, *errors] for site, errors in self._errors.items()],
            **codecs,
            "plan": [[*site, bits] for site, bits in self.plan.items()],
            "planned": self._planned is not None,
            **_state_of([*([] if self._planned is None else [self._planned]), *self._recent]),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            StateError: It is something else.
        """
        with as_a_whole(self, vars(self), "DAF's precision"):
            self._errors = {Site.from_state(entry[:3]): _errors(entry[3:]) for entry in state["errors"]}
            names = [codec.name for codec in calibrated_codecs()]
            self._codecs = {Site.from_state(entry): name for name in names for entry in state[name]}
            self.plan = {Site.from_state(entry[:3]): checked_bits(entry[3]) for entry in state["plan"]}
            recent = _passes_of(state)
            self._planned = recent.pop(0) if flag(state.get("planned", False)) else None
            self._recent = deque(recent, maxlen=RECENT)

    def _choose(
        self, sizes: Sizes, levels: Sequence[int | None], least: int, budget: float, swapped: bool = False
    ) -> None:
        """Plans the least error in a budget of bytes, or, `swapped`, the fewest bytes in a budget of squared error."""
        least = max(least, self._config.min_precision or 0)
        kept = [index for index, bits in enumerate(levels) if bits is None or bits >= least]
        items: list[tuple[Point, ...]] = []
        for site, site_sizes in sizes.items():
            errors = [*(self.errors(site) or ()), 0.0]
            points = ((site_sizes[index], errors[index]) for index in kept)
            items.append(tuple((error, size) if swapped else (size, error) for size, error in points))
        chosen = Knapsack(items).picked(budget)
        planned = {site: levels[kept[choice]] for site, choice in zip(sizes, chosen, strict=True)}
        self.plan = {**self.plan, **planned}


def _filled(found: SiteErrors) -> SiteErrors:
    """Replaces errors of 0 by those that are usual.

    LoRA starts with B at zero: the gradient of A is zero then, and what A reads seems to be worth nothing; one step
    later it is. Optimizers that divide by the gradient's size would make the most of its noise.
    """
    known = [errors for errors in found.values() if any(errors)]
    if not known:
        return {}
    usual = [float(np.median(errors)) for errors in zip(*known, strict=True)]
    return {site: errors if any(errors) else usual for site, errors in found.items()}


def _state_of(passes: Sequence[Pass]) -> dict[str, Any]:
    sizes: list[Sizes] = []
    for each in passes:
        if each.sizes not in sizes:
            sizes.append(each.sizes)
    return {
        "passes": [[each.raw, each.room, sizes.index(each.sizes)] for each in passes],
        "sizes": [[[*site, *bytes_] for site, bytes_ in each.items()] for each in sizes],
    }


def _passes_of(state: Mapping[str, Any]) -> list[Pass]:
    """Returns what `_state_of` was given; nothing for states that have no passes."""
    sizes = [{Site.from_state(site[:3]): [*map(count, site[3:])] for site in each} for each in state.get("sizes", ())]
    return [Pass(count(raw), count(room), sizes[count(place)]) for raw, room, place in state.get("passes", ())]


def _errors(values: Sequence[Any]) -> list[float]:
    errors = [amount(value) for value in values]
    if len(errors) != len(LEVELS):
        raise ValueError(f"a site has {len(LEVELS)} errors, got {values!r}")
    return errors
