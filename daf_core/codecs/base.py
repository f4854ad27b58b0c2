"""The contract of a codec.

A codec is a subclass of `StoredActivation` in the tuple `daf_core.codecs.registry.CODECS`. The first one there that
accepts a saved tensor and encodes it wins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import Lease, LeaseScope
from daf_core.memory.pager import Pager
from daf_core.readers.table import Bounds, Kind, Reading
from daf_kernels import Backend, DirectCodec, Seed, TwoValues

if TYPE_CHECKING:
    from daf_core.codecs.deferred_check import PendingChecks
    from daf_core.codecs.planes import LossyStore
    from daf_core.codecs.relu_signs import ReluSignsActivation


class StoredActivation(ABC):
    """The values of one activation, encoded. It holds its bytes as long as it lives."""

    name: ClassVar[str]  # name of the codec in statistics
    # Whether it gives its values to every operator. Others keep only what the backward of the operator makes of the
    # values that saved them.
    readable_by_any_op: bool = True
    # Whether it may decode to other bits than those that were stored. A lossy codec that accepts a tensor and declines
    # its values leaves them to exact codecs.
    lossy: bool = True
    values_gone: bool = False  # whether nothing is left to decode, since backward computes the values otherwise
    direct: DirectCodec | None = None  # decodes a dense tensor in one call, as `decode_to`; None where that takes more

    @property
    def suits_rows(self) -> bool:
        """Whether its error is as small beside each row as it can be stored; see `Grouping.suits_rows`."""
        return True

    @property
    def bounds(self) -> Bounds | None:
        """Of which bounds its values are on the side of those that were stored; None where codes may cross any."""
        return None

    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        """Says whether the codec is made for a tensor; called before anything looks at its values."""
        return False

    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation | None:
        """Encodes the values of a context; None where the codec cannot hold them.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        raise NotImplementedError  # of a codec that accepts nothing by itself, as `accepts` says here

    def serves(self, reading: Reading) -> bool:
        """Says whether an operator gets what it reads."""
        if not self.lossy or reading.kind is Kind.SHAPE:
            return True
        return self.readable_by_any_op and reading.takes_approximations and reading.bounds in (None, self.bounds)

    def decode_to(self, address: int) -> bool:
        """Writes the values of a dense tensor to an address; False where `decode_into` has to do it."""
        return False

    def sampled(self, step: int) -> Tensor | None:
        """Returns what each `step`-th element of a dense tensor may be, a row each; None where that is not at hand."""
        return None

    @abstractmethod
    def decode_into(self, out: Tensor) -> None:
        """Writes the values into a tensor of the shape and type that was encoded; may be called any number of times."""


class Sources(Protocol):
    """What earlier tensors of the pass tell about the result of a ReLU; see `Derivation`."""

    def signs_of(self, saved: SavedTensor) -> ReluSignsActivation | None:
        """Returns the signs that the ReLU has saved already."""
        ...

    def argument_of(self, saved: SavedTensor) -> StoredActivation | None:
        """Returns a recipe for the argument of the ReLU."""
        ...


@dataclass(slots=True)
class EncodeContext:
    """What a codec encodes, and what it encodes with."""

    values: Tensor  # the saved tensor in its compact form (`Geometry.compact`), on the device of the backend
    pager: Pager  # where pages come from
    backend: Backend
    groups: Grouping | None = None  # scaling groups of the values; None where the values cannot be grouped
    # Whether a lossy codec declines values with a NaN or an infinity. Otherwise the scaling groups that have one decode
    # to NaN.
    require_finite: bool = True
    precision: int = 8  # bits of a code at most: 8, 4, 2, 1, or 0 for the means of scaling groups alone
    seed: Seed | None = None  # random stream of stochastic rounding; None rounds to nearest
    # Squared error of the gradient at 0 bits and at each of `PRECISIONS`, in a unit that all activations share; None
    # estimates it from the range of the values, where there is a budget.
    errors: Sequence[float] | None = None
    # Keeps values while a device works out whether they are finite; None waits for the device.
    checks: PendingChecks | None = None
    lossy: LossyStore | None = None  # chooses the precision of codes
    sources: Sources | None = None  # earlier tensors of the pass
    codecs: tuple[type[StoredActivation], ...] = ()  # the registry


def encode_first(
    codecs: Sequence[type[StoredActivation]], saved: SavedTensor, ctx: EncodeContext, lossy: bool = True
) -> StoredActivation | None:
    """Returns a tensor in the form of the first codec that accepts and holds it; None keeps the tensor itself."""
    for codec in codecs:
        if (lossy or not codec.lossy) and codec.accepts(saved):
            stored = codec.encode(saved, ctx)
            if stored is not None:
                return stored
            lossy = lossy and not codec.lossy
    return None


class PagedActivation(StoredActivation):
    """An activation that lies on pages of the pool, or in the next tier."""

    # The pages. They are given back when the activation dies, also while it is being encoded.
    lease: Lease
    two: TwoValues = (0, 0)  # the two values of a mask

    def __init__(self, pager: Pager) -> None:
        self.pager = pager  # leases the pages

    def _new_pages(self, fixed: int, planes: Sequence[int] = (), importances: Sequence[float] = ()) -> LeaseScope:
        """Leases the activation's pages; the arguments and errors are those of `Pager.writing`."""
        writing = self.pager.writing_again(self.pager.kind(fixed, planes, importances), owner=self)
        self.lease = writing.lease
        return writing

    @override
    def decode_to(self, address: int) -> bool:
        return self.direct is not None and self.pager.read(self.lease, self.direct.decode, address, self.two)

    @override
    def decode_into(self, out: Tensor) -> None:
        if self.direct is not None:
            dense = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            if self.decode_to(dense.data_ptr()):
                if dense is not out:
                    out.copy_(dense)
                return
        with self.pager.reading(self.lease) as lease:
            self._decode(out, lease)

    @abstractmethod
    def _decode(self, out: Tensor, lease: Lease) -> None:
        """Writes the values, while the lease keeps its pages."""
