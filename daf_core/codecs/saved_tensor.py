"""A tensor that autograd saves, and all that can be known of it at that moment alone."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.sites import ModuleScopes, Site
from daf_core.autograd.torch_private import Node, is_being_saved, node_number, skip_nodes
from daf_core.readers.attention import KERNELS, can_attend_again
from daf_core.readers.patterns import PRODUCT
from daf_core.readers.places import LINEAR, Place, input_of, inputs_of_modules, runs
from daf_core.readers.table import Reading
from daf_core.readers.waiting import Sighting

VIEWS = frozenset(
    ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0", "AliasBackward0")
)
"""Nodes that keep the order of a dense tensor's elements, as long as their number is the same."""

CAST = "ToCopyBackward0"
"""The node that changes a tensor's type, and perhaps its device."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types of half precision, which autocast casts to."""

DROPOUTS = frozenset((PRODUCT, "NativeDropoutBackward0"))
"""Nodes of dropouts in training: that of CPUs is a product with a mask that it draws, that of GPUs saves bools."""

ACTIVATIONS = frozenset(("GeluBackward0", "HardswishBackward0", "MishBackward0", "SiluBackward0"))
"""Nodes of activation functions that save their argument, and whose slopes are at most 1.2."""

DERIVABLE = VIEWS | DROPOUTS | ACTIVATIONS | {"ReluBackward0", "NativeLayerNormBackward0", CAST}
"""Nodes whose results may follow from what is stored (`daf_core.saved_tensors.derive`)."""


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

    def has_unchanged(self, node: Node, shape: tuple[int, ...] | None = None) -> bool:
        """Says whether a node's result, of a shape if any, was there and unchanged when the tensor was saved."""
        found = [result for result in self.results if result.node is node]
        return any(not result.version and (shape is None or result.shape == shape) for result in found)


@dataclass(slots=True)
class Argument:
    """What the input of a linear layer was made of by casts, a dropout or both."""

    saved: SavedTensor  # it, as if the layer saved it: others may be made of it, too
    dtype: torch.dtype  # type in which the dropout takes it; that in which the last cast does where there is none
    dropout: Node  # None where there is none


def capture(
    tensor: Tensor, form: TensorKind, site: Site, sighting: Sighting, normalizes: bool, scopes: ModuleScopes,
    frame: FrameType | None = None,
) -> SavedTensor:  # fmt: skip
    """Returns what is to be known of a tensor that is being saved, where `frame` is the innermost function."""
    saved = capture_alone(tensor, form, site, sighting, normalizes, scopes, frame)
    find_argument(saved, tensor, scopes, frame)
    return saved


def capture_alone(
    tensor: Tensor, form: TensorKind, site: Site, sighting: Sighting, normalizes: bool, scopes: ModuleScopes,
    frame: FrameType | None = None,
) -> SavedTensor:  # fmt: skip
    """As `capture`, without what the tensor was made of."""
    node, results = tensor.grad_fn, list[LivingResult]()
    if form is TensorKind.LOSSY and site.op in DERIVABLE:
        living = scopes.normalized
        if tensor.dtype in LOW_PRECISION:
            living += _dropped_before(node, frame)
        results = [LivingResult(each.grad_fn, each._version, each.shape) for each in living]
    reference = weakref.ref(tensor)
    reading = sighting.reading
    attends = site.op in KERNELS and is_being_saved(node, "output") and can_attend_again(node, tensor.device)
    return SavedTensor(
        tensor.detach(), reference, tensor._version, node, form, site, sighting.place, reading, normalizes, attends,
        results,
    )  # fmt: skip


def find_argument(saved: SavedTensor, tensor: Tensor, scopes: ModuleScopes, frame: FrameType | None) -> bool:
    """Looks for what a tensor was made of, which `saved` then has; returns whether that was found."""
    origin = None if saved.form is not TensorKind.LOSSY or tensor._version else _origin_of(saved, scopes, frame)
    if origin is None or not _is_alike(origin[0], tensor):
        return False
    argument, dtype, dropout = origin
    sighting = Sighting(saved.place, 0, saved.reading, False)
    of_argument = capture_alone(argument, saved.form, saved.site, sighting, saved.normalizes, scopes)
    saved.argument = Argument(of_argument, dtype, dropout)
    return True


def _is_alike(argument: Tensor, tensor: Tensor) -> bool:
    """Says whether what has codes may be stored in place of a tensor: as many elements, there and in one order."""
    if argument.numel() != tensor.numel() or argument.device != tensor.device:
        return False
    if argument.dtype not in (torch.float32, *LOW_PRECISION) or argument.is_neg():
        return False
    return argument.is_contiguous() and tensor.is_contiguous()


def _origin_of(
    saved: SavedTensor, scopes: ModuleScopes, frame: FrameType | None
) -> tuple[Tensor, torch.dtype, Node] | None:
    """Returns what an unchanged tensor was made of, with the other fields of its `Argument`.

    None where no linear layer is running in `frame`, where it is gone, or where something in between was changed, or
    may have been.
    """
    made, latest = None if runs(LINEAR, frame) is None else skip_nodes(saved.node, VIEWS), scopes.dropout
    if made is None:
        return None
    before = skip_nodes(made.next_functions[0][0], VIEWS) if made.name() == CAST else made
    if latest is not None and before is not None and before.name() in DROPOUTS and node_number(before) == latest.number:
        if before is not made and not saved.has_unchanged(before):
            return None
        argument = latest.argument()
        return _origin(before, None if argument is None or argument._version else argument, latest.dtype, before, frame)
    given = _input_like(made, frame) if made.name() == CAST else None
    return None if given is None else _origin(made, given, given.dtype, None, frame)


def _origin(
    node: Node, given: Tensor | None, dtype: torch.dtype, dropout: Node, frame: FrameType | None
) -> tuple[Tensor, torch.dtype, Node] | None:
    """Returns what a tensor, of a type, that the operator of `node` was given was made of, or the tensor itself."""
    cast = skip_nodes(node.next_functions[0][0], VIEWS)
    source = _input_like(cast, frame) if cast is not None and cast.name() == CAST else None
    found = source if source is not None else given if given is not None else _input_like(node, frame)
    return None if found is None else (found, dtype, dropout)


def _input_like(node: Node, frame: FrameType | None) -> Tensor | None:
    """Returns the input of one of the innermost modules that is what the operator of a node was given, unchanged."""
    edges = list(_edges(node))
    for value in inputs_of_modules(frame):
        # Tensors of inference have no version, and sparse ones may be anything.
        if type(value) is not Tensor or not value.requires_grad or value.layout is not torch.strided:
            continue
        # What was changed is not asked for its node, which may be made anew then, in another order.
        if value._version or value.grad_fn is None:
            continue
        if (value.grad_fn, value.output_nr) in edges:
            return value
    return None


def _edges(node: Node) -> Iterator[tuple[Node, int]]:
    """Yields which result of which node an operator was given first, and of which this is a view."""
    edge = node.next_functions[0]
    yield edge
    while edge[0] is not None and edge[0].name() in VIEWS:
        edge = edge[0].next_functions[0]
        yield edge


def _dropped_before(node: Node, frame: FrameType | None) -> list[Tensor]:
    """Returns what a dropout has given to the cast that has made what `node` has, as autocast's in a linear layer.

    Nobody saves it, but the layer has it. To ask any other tensor for its node may make that anew, in another order.
    """
    made = skip_nodes(node, VIEWS)
    source: Node = made.next_functions[0][0] if made is not None and made.name() == CAST else None
    if source is None or source.name() not in DROPOUTS:
        return []
    value = input_of(LINEAR, frame)
    return [value] if type(value) is Tensor and value.grad_fn is source else []
