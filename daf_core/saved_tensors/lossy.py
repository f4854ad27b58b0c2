"""How activations are stored that may lose precision: in training, and in a rehearsal."""

from __future__ import annotations

import threading

from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.codecs import (
    GeluDerivativeActivation,
    LogarithmsActivation,
    PlanesActivation,
    ProbedActivation,
    RawActivation,
)
from daf_core.codecs.deferred_check import PendingChecks
from daf_core.codecs.gelu_derivative import UNGROUPED
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.scaling_groups import Grouping
from daf_core.config import DAFConfig
from daf_core.memory.pager import Pager
from daf_core.precision.policy import PrecisionPolicy
from daf_core.precision.site_stats import SiteStatistics
from daf_kernels import Backend, Seed


class RandomStreams:
    """The random numbers of stochastic rounding: the same in every run with the same seed.

    Attributes:
        passes: Forward passes so far; each has streams of its own.
    """

    def __init__(self, config: DAFConfig) -> None:
        self._seed = None if config.rounding == "nearest" else config.seed
        self.passes = 0

    def seed(self, site: Site) -> Seed | None:
        """Returns the stream of a site in this pass; None rounds to nearest."""
        if self._seed is None:
            return None
        return self._seed & 0xFFFFFFFF, self._seed >> 32, site.number, self.passes & 0xFFFFFFFF


class TrainingStore(threading.local):
    """Stores activations at the precision that their site has now.

    Args:
        policy: Knows that precision.
        streams: Random numbers.
        doubts: Keeps what may not be finite.

    Attributes:
        census: What was stored in this thread since `begin_pass`.
    """

    def __init__(self, policy: PrecisionPolicy, streams: RandomStreams, doubts: PendingChecks) -> None:
        self._policy = policy
        self._streams = streams
        self._doubts = doubts
        self.census = SiteStatistics()

    def begin_pass(self) -> None:
        """Starts counting anew."""
        self.census = SiteStatistics()
        self._doubts.settle_known()

    def __call__(
        self,
        values: Tensor,
        grouping: Grouping,
        site: Site,
        pager: Pager,
        backend: Backend,
        finite: bool,
        deviation: float = 0.0,
    ) -> PlanesActivation | None:
        """See `LossyStore`."""
        precision = self._policy.precision(site, deviation)
        # Slopes would hide what is not finite.
        codec, grouping = _codec(grouping, slopes=finite and self._policy.takes_slopes(site))
        stored = None
        if precision is not None:
            errors = None if pager.budget is None else self._policy.errors(site)
            seed = self._streams.seed(site)
            stored = codec.encode(values, grouping, precision, pager, backend, seed, finite, errors, self._doubts)
        self.census.add(site, _sizes(values, grouping, pager), stored)
        return stored

    def sharpens(self, site: Site, deviation: float) -> bool:
        """See `LossyStore`."""
        return self._policy.precision(site, deviation) != self._policy.precision(site)

    def withdraw(self, site: Site) -> None:
        """See `LossyStore`."""
        self.census.withdraw(site)


class RehearsalStore:
    """Keeps activations as they are, and how they would be stored.

    Args:
        policy: Knows which sites take codes of GELU's derivative.
        streams: Random numbers.

    Attributes:
        activations: What was stored, with its sites.
        reads: Gets each of them when it is read.
        census: What they would take.
    """

    def __init__(self, policy: PrecisionPolicy, streams: RandomStreams) -> None:
        self._policy = policy
        self._streams = streams
        self.activations: list[tuple[Site, ProbedActivation]] = []
        self.reads: list[ProbedActivation] = []
        self.census = SiteStatistics()

    def __call__(
        self,
        values: Tensor,
        grouping: Grouping,
        site: Site,
        pager: Pager,
        backend: Backend,
        finite: bool,
        deviation: float = 0.0,
    ) -> ProbedActivation:
        """See `LossyStore`."""
        seed = self._streams.seed(site)

        def encode(values: Tensor, precision: int, slopes: bool) -> PlanesActivation | None:
            codec, groups = _codec(grouping, slopes)
            return codec.encode(values, groups, precision, pager, backend, seed)

        kept = RawActivation(values, KeptStorage(pager, values.nbytes))
        activation = ProbedActivation(kept, encode, self.reads)
        activation.slopes = self._policy.takes_slopes(site)
        self.activations.append((site, activation))
        self.census.add(site, _sizes(values, grouping, pager))
        return activation

    def sharpens(self, site: Site, deviation: float) -> bool:
        """See `LossyStore`: it measures the bits that it is told to."""
        return False

    def withdraw(self, site: Site) -> None:
        """See `LossyStore`."""
        for place in reversed(range(len(self.activations))):
            if self.activations[place][0] == site:
                del self.activations[place]
                self.census.withdraw(site)
                return


def _codec(grouping: Grouping, slopes: bool) -> tuple[type[PlanesActivation], Grouping]:
    """Returns the codec of values, or of GELU's derivative at them, and the grouping that it takes."""
    if grouping.logarithms is not None:
        return LogarithmsActivation, grouping
    return (GeluDerivativeActivation, UNGROUPED) if slopes else (PlanesActivation, grouping)


def _sizes(values: Tensor, grouping: Grouping, pager: Pager) -> list[int]:
    sizes = PlanesActivation.sizes(values.numel(), grouping.row, values.element_size(), pager.pool.page_bytes)
    if grouping.logarithms is None:
        return sizes
    beside = LogarithmsActivation.beside(grouping.logarithms, values.element_size())
    return [*(min(size + beside, sizes[-1]) for size in sizes[:-1]), sizes[-1]]
