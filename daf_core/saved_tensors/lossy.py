"""How activations are stored that may lose precision: in training, and in a probe."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.deferred_check import PendingChecks
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.probed import ProbedActivation, Variant
from daf_core.codecs.raw import KeptStorage, RawActivation
from daf_core.codecs.registry import calibrated_codecs
from daf_core.config import DAFConfig
from daf_core.precision.policy import PrecisionPolicy
from daf_core.precision.site_stats import SiteStatistics
from daf_core.readers.table import Reading
from daf_kernels import Seed


class RandomStreams:
    """The random numbers of stochastic rounding: the same in every run with the same seed."""

    def __init__(self, config: DAFConfig) -> None:
        self._seed = None if config.rounding == "nearest" else config.seed
        self.round_to_nearest = self._seed is None  # without random numbers
        self.passes = 0  # forward passes so far; each has streams of its own

    def seed(self, site: Site) -> Seed | None:
        """Returns the stream of a site in this pass; None rounds to nearest."""
        if self._seed is None:
            return None
        return self._seed & 0xFFFFFFFF, self._seed >> 32, site.number, self.passes & 0xFFFFFFFF


class TrainingStore(threading.local):
    """Stores activations at the present precision of their site; a `LossyStore`."""

    def __init__(self, policy: PrecisionPolicy, streams: RandomStreams, doubts: PendingChecks) -> None:
        self._policy = policy
        self._streams = streams
        self.checks = doubts
        self.census = SiteStatistics()  # what was stored in this thread since `begin_pass`

    def begin_pass(self) -> None:
        """Begins to count another pass."""
        self.census = SiteStatistics()
        self.checks.settle_known()

    def codec(self, site: Site) -> str | None:
        """See `LossyStore`."""
        return self._policy.codec(site)

    @property
    def token(self) -> object:
        """See `LossyStore`."""
        return self._policy.token if self._streams.round_to_nearest else None

    def store(
        self, codec: type[PlanesActivation], site: Site, reading: Reading | None, ctx: EncodeContext
    ) -> PlanesActivation | None:
        """See `LossyStore`."""
        stored, precision = None, self._policy.precision(site, 0.0 if reading is None else reading.deviation)
        if precision is not None:
            ctx.precision, ctx.seed, ctx.checks = precision, self._streams.seed(site), self.checks
            ctx.errors = None if ctx.pager.budget is None else self._policy.errors(site)
            stored = codec.write(ctx)
        self.census.add(site, codec.sizes(ctx), stored)
        return stored

    def count(self, site: Site, sizes: Sequence[int], stored: PlanesActivation) -> None:
        """See `LossyStore`."""
        self.census.add(site, sizes, stored)

    def sharpens(self, site: Site, deviation: float) -> bool:
        """See `LossyStore`."""
        return self._policy.precision(site, deviation) != self._policy.precision(site)

    def withdraw(self, site: Site, stored: StoredActivation | None) -> None:
        """See `LossyStore`."""
        self.census.withdraw(site)


class RehearsalStore:
    """Keeps activations as they are, and how they would be stored; a `LossyStore`."""

    checks = None  # it keeps all values

    def __init__(self, policy: PrecisionPolicy, streams: RandomStreams) -> None:
        self._policy = policy
        self._streams = streams
        self.activations: list[tuple[Site, ProbedActivation]] = []  # what was stored, with its sites
        self.reads: list[ProbedActivation] = []  # gets each of them when it is read
        self.census = SiteStatistics()  # bytes that they would take

    @property
    def token(self) -> object:
        """See `LossyStore`: a probe replays nothing."""
        return None

    def codec(self, site: Site) -> str | None:
        """See `LossyStore`: the calibration may change the codec, so the tensor is kept for the usual one."""
        return None

    def store(
        self, codec: type[PlanesActivation], site: Site, reading: Reading | None, ctx: EncodeContext
    ) -> StoredActivation:
        """See `LossyStore`."""
        # Neither the saved tensor nor its context may be kept: they know the graph.
        plain = EncodeContext(ctx.values, ctx.pager, ctx.backend, ctx.groups, seed=self._streams.seed(site))

        def encode(values: Tensor, precision: int, variant: Variant) -> PlanesActivation | None:
            return (variant or codec).write(replace(plain, values=values, precision=precision))

        kept = RawActivation(ctx.values, KeptStorage(ctx.pager, ctx.values.nbytes))
        activation = ProbedActivation(kept, encode, self.reads)
        chosen = self._policy.codec(site)
        activation.variant = next((variant for variant in calibrated_codecs() if variant.name == chosen), None)
        self.activations.append((site, activation))
        self.census.add(site, codec.sizes(ctx))
        return activation

    def count(self, site: Site, sizes: Sequence[int], stored: PlanesActivation) -> None:
        """See `LossyStore`."""
        raise NotImplementedError  # only what is replayed is counted so, and a probe replays nothing

    def sharpens(self, site: Site, deviation: float) -> bool:
        """See `LossyStore`: a probe measures the bits that it is told to, of what is no recipe in training either."""
        return math.isinf(deviation)

    def withdraw(self, site: Site, stored: StoredActivation | None) -> None:
        """See `LossyStore`."""
        for place in reversed(range(len(self.activations))):
            if self.activations[place] == (site, stored):
                del self.activations[place]
                self.census.withdraw(site)
                return
