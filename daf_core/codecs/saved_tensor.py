"""A tensor that autograd saves, and all that can be known of it at that moment alone."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.nodes import DERIVABLE, LOW_PRECISION
from daf_core.autograd.sites import ModuleScopes, Site
from daf_core.autograd.torch_private import Node, is_being_saved
from daf_core.readers.arguments import dropped_before, origin_of
from daf_core.readers.attention import KERNELS, can_attend_again
from daf_core.readers.places import Place
from daf_core.readers.table import Reading
from daf_core.readers.waiting import Sighting


class TensorKind(enum.Enum):
    """The form a saved tensor may take."""

    PARAMETER = "no activation: passed through and not counted"
    RAW = "exact, as it is"
    INTEGER = "exact, narrowed"
    MASK = "exact, as one bit where two-valued"
    LOSSY = "exact where two-valued, otherwise compressible"


class LivingResult(NamedTuple):
    """The result of an operator that still exists."""

    node: Node  # the autograd node that its tensor has now
    version: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class SavedTensor:
    """What is to be packed, now or a little later."""

    # The saved tensor, detached: the tensor itself would tie an operator's output to the graph that saves it, and a
    # graph that never runs backward would leak.
    tensor: Tensor
    reference: weakref.ref[Tensor]  # the saved tensor itself, while it is there
    version: int
    node: Node  # the autograd node that made it; None for a leaf
    form: TensorKind  # the form that it may take
    site: Site  # where it is saved
    place: Place | None  # where, as its reader is known by; None where that is of no use
    reading: Reading | None  # what its reader reads of it; None where that is not known yet
    normalizes: bool  # whether a normalization is saving it
    attends: bool  # whether an attention is saving its result, and can compute it again
    # Where it may be derived, the latest results of normalizations, the newest first, and that of a dropout, of which
    # it is a cast.
    results: list[LivingResult]
    # Inside what it returns, the device does what this thread gives it after it has made the tensor.
    ordered: Callable[[], AbstractContextManager[None]] = nullcontext
    # Copies values of the tensor to where they are encoded, until the next call; None where that is in place.
    fetch: Callable[[Tensor], Tensor] | None = None
    # Name of the codec that a calibration has chosen for its site; None where it has chosen none.
    codec: str | None = None
    argument: Argument | None = None  # what it was made of; None where that is gone, or of no use

    @property
    def takes_approximations(self) -> bool:
        """Whether it may be stored in few bits, as far as is known of its reader."""
        return self.form is TensorKind.LOSSY and (self.reading is None or self.reading.takes_approximations)


@dataclass(slots=True)
class Argument:
    """What the input of a linear layer was made of; see `Origin`."""

    saved: SavedTensor  # it, as if the layer saved it
    dtype: torch.dtype
    dropout: Node


def capture(
    tensor: Tensor, form: TensorKind, site: Site, sighting: Sighting, normalizes: bool, scopes: ModuleScopes,
    frame: FrameType | None = None,
) -> SavedTensor:  # fmt: skip
    """Returns what is to be known of a tensor that is being saved, where `frame` is the innermost function."""
    node, results = tensor.grad_fn, list[LivingResult]()
    if form is TensorKind.LOSSY and site.op in DERIVABLE:
        living = scopes.normalized
        if tensor.dtype in LOW_PRECISION:
            living += dropped_before(node, frame)
        results = [LivingResult(each.grad_fn, each._version, each.shape) for each in living]
    reference = weakref.ref(tensor)
    reading = sighting.reading
    attends = site.op in KERNELS and is_being_saved(node, "output") and can_attend_again(node, tensor.device)
    saved = SavedTensor(
        tensor.detach(), reference, tensor._version, node, form, site, sighting.place, reading, normalizes, attends,
        results,
    )  # fmt: skip
    origin = None if form is not TensorKind.LOSSY or tensor._version else origin_of(node, scopes, frame)
    if origin is not None:
        known = capture(origin.tensor, form, site, sighting, normalizes, scopes)
        saved.argument = Argument(known, origin.dtype, origin.dropout)
    return saved
