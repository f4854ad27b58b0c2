"""Which saved tensors follow from others that are stored already."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from daf_core.autograd.torch_private import Node, all_packed, leaf_of, skip_nodes
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.raw import RawActivation, each_nth
from daf_core.codecs.recomputed import (
    CastActivation,
    ElementwiseActivation,
    Normalization,
    NormalizedActivation,
    ProductActivation,
    ScaledActivation,
    SumActivation,
)
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import RELU, ReluSignsActivation
from daf_core.codecs.saved_tensor import (
    ACTIVATIONS,
    CAST,
    DERIVABLE,
    DROPOUTS,
    LOW_PRECISION,
    VIEWS,
    SavedTensor,
)
from daf_core.codecs.without_values import AttendedActivation
from daf_core.readers.attention import INPUTS, kernel_of
from daf_core.readers.patterns import PRODUCT
from daf_core.readers.waiting import Unpack
from daf_core.saved_tensors.dedup import serves_reader
from daf_core.saved_tensors.elementwise import COMPARABLE, agrees, elementwise
from daf_core.saved_tensors.handle import Handle, Packed
from daf_core.saved_tensors.pending import packed_now, packed_of
from daf_kernels import is_capturing

_BATCH_NORMS = {"NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"}

_SAME = VIEWS | {"PermuteBackward0", "TransposeBackward0"}
"""Nodes that give the elements that they get."""

SAMPLES = 64
"""Elements of a product that are compared with its factors, where these are there to be looked at."""

LONGEST_BLOCK = 16
"""Operators of a residual block, along its main branch, that are looked at."""

LONGEST_SUM = 2
"""Residual connections that are added up at most when one result is decoded: each adds the decoding of a tensor."""


class Derivation:
    """Recognizes tensors that follow from others, among those whose unpack hook is `unpack`."""

    def __init__(self, unpack: Unpack) -> None:
        self._unpack = unpack

    def derive(self, saved: SavedTensor, exact: bool, compare: bool = True) -> StoredActivation | None:
        """Returns a recipe for a tensor that is about to be saved, or None.

        It knows the result of a dropout on something that saves its result (a softmax) or its input (a layer
        normalization), the result of a layer normalization itself, what autocast makes of these and of results that
        their operators save, and that of a ReLU on a normalization of the batch, with or without a residual connection.
        Backward needs the sources anyway, and usually later. Where `exact` the recipe gives the same bits, of which the
        caller makes sure himself if not `compare`.
        """
        if saved.site.op not in DERIVABLE:
            return None
        if saved.node is not None and saved.node.name() == RELU:
            return None if exact else self._rectified(saved)
        node = skip_nodes(saved.node, VIEWS)
        if node is None or not saved.tensor.is_contiguous():
            return None
        if saved.version:  # its node made it in place, or it was changed after that: a comparison tells
            recipe = elementwise(node, saved, exact, self._unpack) if exact else None
        else:  # a result that its own node saves is the same storage, and shared
            recipe = self._recipe(node, saved, exact)
        return recipe if recipe is not None and (not compare or _agree(saved.tensor, recipe)) else None

    def _recipe(self, node: Node, saved: SavedTensor, exact: bool) -> StoredActivation | None:
        """Returns the recipe for the result of a node."""
        dtype = saved.tensor.dtype
        if node.name() == CAST:
            return self._cast(node, saved, exact)
        if node.name() in ACTIVATIONS:
            return elementwise(node, saved, exact, self._unpack)
        if node.name() in DROPOUTS:
            product = self._product(node, saved, dtype, exact) or elementwise(node, saved, exact, self._unpack)
            return product if product is not None or exact else self._scaled(node, saved, dtype)
        return None if exact else self._layer_normalized(node, saved, dtype)

    def of_argument(self, saved: SavedTensor, stored: StoredActivation) -> StoredActivation | None:
        """Returns the recipe for a tensor of whose `argument` something is stored.

        Of an exact one all elements are compared, so None where the host would wait for the device.
        """
        argument = saved.argument
        assert argument is not None
        recipe = _in_type(stored, argument.saved.tensor.dtype, argument.dtype)
        if argument.dropout is not None:
            masked = self._masked(argument.dropout, recipe, saved.tensor, argument.dtype)
            if masked is None:
                return None
            recipe = masked
        recipe = _in_type(recipe, argument.dtype, saved.tensor.dtype)
        compared = recipe.lossy or (saved.tensor.device.type in COMPARABLE and agrees(recipe, saved.tensor))
        return recipe if compared else None

    def is_result(self, argument: SavedTensor, kept: StoredActivation) -> bool:
        """Says whether the operator that has made a tensor has kept it as its result, and reads it in any backward."""
        node = skip_nodes(argument.node, _SAME)
        return node is not None and any(packed_now(each) is kept for each in all_packed(node, self._unpack))

    def attended(self, saved: SavedTensor) -> AttendedActivation | None:
        """Returns what stands for the result of an attention that is saving it, and lets go of its logsumexp.

        None where all inputs are exact: so is the result then. Its error would not be that of a value with codes of its
        own, and of sharp scores, whose query and key stay exact, the gradient is mostly what the two do not share.
        """
        kernel = kernel_of(saved.site.op)
        if kernel is None:
            return None
        query, key, value = (packed_of(saved.node, name, self._unpack) for name in INPUTS)
        if query is None or key is None or value is None:
            return None
        inputs = [packed.stored for packed in (query, key, value)]
        if not any(each.lossy for each in inputs) or not all(each.readable_by_any_op for each in inputs):
            return None
        logsumexp = packed_of(saved.node, kernel.logsumexp, self._unpack)
        if isinstance(logsumexp, RawActivation):  # some save it later; it then stays, and is not asked for
            logsumexp.let_go()
        return AttendedActivation()

    def signs_of(self, saved: SavedTensor) -> ReluSignsActivation | None:
        """Returns the signs that a ReLU has saved of its result, or of that of which this is a view, if unchanged."""
        node = skip_nodes(saved.node, VIEWS)
        if node is None or node.name() != RELU:
            return None
        packed = packed_of(node, "result", self._unpack)
        if packed is None or (node is not saved.node and not packed.is_dense(saved.tensor, saved.tensor.dtype)):
            return None
        signs = packed.stored
        return signs if isinstance(signs, ReluSignsActivation) and signs.version == saved.version else None

    def argument_of(self, saved: SavedTensor) -> StoredActivation | None:
        """Returns a recipe for what a ReLU was taken of, while it saves its result."""
        following = None if saved.node is None else saved.node.next_functions[0][0]
        if following is None:
            return None
        if following.name() in _BATCH_NORMS and _saw_just(saved, following, 0):
            return self._batch_normalized(following, saved.tensor)
        if following.name() == "AddBackward0" and _saw_just(saved, following, 1):
            return self._residual(following, saved)
        return None

    def _rectified(self, saved: SavedTensor) -> ReluOutputActivation | None:
        signs = self.signs_of(saved)
        if signs is None or signs.argument is None:
            return None
        return ReluOutputActivation(signs, signs.argument)

    def _residual(self, node: Node, saved: SavedTensor) -> SumActivation | None:
        """Returns the recipe for the sum of a normalization's result and of what the block began with."""
        (first, _), start = node.next_functions
        second = start[0]
        if first is None or second is None or node._saved_alpha != 1:
            return None
        known = self._batch_normalized(first, saved.tensor)
        added: StoredActivation | None = None
        if second.name() not in _BATCH_NORMS:
            added = self._block_input(first, start, saved.tensor)
        elif saved.has_unchanged(second, saved.tensor.shape):
            added = self._batch_normalized(second, saved.tensor)
        if known is None or added is None or _sums(added) >= LONGEST_SUM:
            return None
        return SumActivation(known, added, 1 + _sums(added))

    def _block_input(self, node: Node, start: tuple[Node, int], tensor: Tensor) -> StoredActivation | None:
        """Returns what the first operator of a block has saved of its input.

        `node` is the last operator of the block; `start` is what made its input, and which of its results that is.
        """
        for _ in range(LONGEST_BLOCK):
            following = node.next_functions[0] if node.next_functions else (None, 0)
            if following == start:
                packed = packed_of(node, "input", self._unpack)  # perhaps gone, or changed since
                return self._source(node, "input", tensor) if packed is not None and packed.is_unchanged else None
            if following[0] is None:
                return None
            node = following[0]
        return None

    def _cast(self, node: Node, saved: SavedTensor, exact: bool) -> CastActivation | None:
        """Returns the recipe for a cast to half precision, or from there.

        What is cast may have been changed unseen where nobody has saved it, but in a module that normalizes, and for a
        dropout's result in a linear layer. In exact mode the latter is stored, as a write through ``.data`` is unseen.
        """
        (source, place), dtype = node.next_functions[0], saved.tensor.dtype
        source = skip_nodes(source, VIEWS)
        if source is None or place:
            return None
        for before in (torch.float32,) if dtype in LOW_PRECISION else LOW_PRECISION:
            values = self._result(source, saved, before, exact)
            if values is None and not exact and source.name() in DROPOUTS and saved.has_unchanged(source):
                values = self._product(source, saved, before, exact)
            if values is None and not exact and saved.normalizes:
                values = self._scaled(source, saved, before)
            if values is not None and serves_reader(values, saved):
                return CastActivation(values, before, dtype)
        return None

    def _product(self, node: Node, saved: SavedTensor, dtype: torch.dtype, exact: bool) -> ProductActivation | None:
        """Returns the recipe for the result of a dropout: a product with a mask, which `node` has saved."""
        source = skip_nodes(node.next_functions[0][0], VIEWS)
        factor = None if source is None else self._result(source, saved, dtype, exact)
        return None if factor is None else self._masked(node, factor, saved.tensor, dtype)

    def _masked(
        self, node: Node, factor: StoredActivation, like: Tensor, dtype: torch.dtype
    ) -> ProductActivation | None:
        """Returns the recipe for the product of an activation of a type, as long as `like`, and a dropout's mask."""
        name, scale = "other", None
        if node.name() != PRODUCT:
            name, scale = "result1", _dropout_scale(node._saved_p, like.device, dtype)
        elif node.next_functions[1][0] is not None:
            return None
        mask = self._source(node, name, like, dtype if scale is None else torch.bool)
        return ProductActivation(factor, mask, scale) if isinstance(mask, BitmaskActivation | RawActivation) else None

    def _scaled(self, node: Node, saved: SavedTensor, dtype: torch.dtype) -> ScaledActivation | None:
        """Returns the recipe for the product of a tensor and its reciprocal root, of which the product has saved both.

        Not for that with a weight: where values are far larger in some channels, and the weight makes up for it, the
        errors of the others would be as large as they are beside those.
        """
        if node.name() != PRODUCT:
            return None
        shape = saved.tensor.shape
        for name, other, place in (("self", "other", 1), ("other", "self", 0)):
            root = node.next_functions[place][0]
            if root is None or root.name() != "RsqrtBackward0":
                continue
            values, factor = packed_of(node, name, self._unpack), packed_of(node, other, self._unpack)
            if values is None or factor is None or factor.stored.lossy or factor.dtype is not dtype:
                continue
            if factor.shape != (*values.shape[:-1], 1) or values.shape[-1] != shape[-1]:
                continue
            source = _usable(values, saved.tensor, dtype)
            if source is not None and serves_reader(source, saved):
                return ScaledActivation(source, factor.unpack, shape[-1])
        return None

    def _result(self, node: Node, saved: SavedTensor, dtype: torch.dtype, exact: bool) -> StoredActivation | None:
        """Returns what a node has saved of its result of a type, or the recipe for that of a layer normalization."""
        packed = packed_of(node, "result", self._unpack)
        # What follows from it may follow from what it is now. Codes of a tensor that is gone are taken as they are.
        changed = type(packed) is Handle and packed.is_changed
        stored = None if changed else _usable(packed, saved.tensor, dtype)
        return self._layer_normalized(node, saved, dtype) if stored is None and not exact else stored

    def _layer_normalized(self, node: Node, saved: SavedTensor, dtype: torch.dtype) -> NormalizedActivation | None:
        if node.name() != "NativeLayerNormBackward0" or not saved.has_unchanged(node):
            return None
        source = self._source(node, "input", saved.tensor, dtype)
        mean, scale, weight, bias = (self._small(node, name) for name in ("result1", "result2", "weight", "bias"))
        if source is None or mean is None or scale is None or weight is None or bias is None:
            return None
        width = math.prod(node._saved_normalized_shape)
        return NormalizedActivation(source, Normalization((-1, width), (-1, 1), (width,), mean, scale, weight, bias))

    def _batch_normalized(self, node: Node, tensor: Tensor) -> NormalizedActivation | None:
        if node.name() not in _BATCH_NORMS or not node._saved_training:
            return None
        source = self._source(node, "input", tensor)
        mean, scale, weight = (self._small(node, name) for name in ("result1", "result2", "weight"))
        bias = leaf_of(node.next_functions[2][0]) if node.next_functions[2][0] is not None else None
        if source is None or mean is None or scale is None or weight is None or bias is None:
            return None
        channels, bias_now = tensor.shape[1], RawActivation(bias, None)
        shape, parts = (tensor.shape[0], channels, -1), (channels, 1)
        if not tensor.is_contiguous():
            if tensor.stride(1) != 1:
                return None
            shape, parts = (-1, channels), (channels,)
        return NormalizedActivation(source, Normalization(shape, parts, parts, mean, scale, weight, bias_now.unpack))

    def _small(self, node: Node, name: str) -> Callable[[], Tensor] | None:
        packed = packed_of(node, name, self._unpack)
        return None if packed is None else packed.unpack

    def _source(self, node: Node, name: str, like: Tensor, dtype: torch.dtype | None = None) -> StoredActivation | None:
        """Returns what is stored for a node's saved tensor, if dense, as long as `like`, and of its type or `dtype`."""
        return _usable(packed_of(node, name, self._unpack), like, dtype or like.dtype)


def _usable(packed: Packed | None, like: Tensor, dtype: torch.dtype) -> StoredActivation | None:
    if packed is None or not packed.is_dense(like, dtype):
        return None
    if isinstance(packed, RawActivation) and not packed.is_unchanged:
        return None
    return packed.stored if packed.stored.readable_by_any_op else None


def _saw_just(saved: SavedTensor, node: Node, in_place: int) -> bool:
    """Says whether a ReLU saw just what a node before it made.

    `in_place` operators in place stand in the graph between a normalization and the result of the node.
    """
    for result in saved.results:
        if result.node is node:
            return result.version == in_place and not saved.version
        if result.node is saved.node:  # the ReLU was in place too
            return result.version == in_place + 1
    return False


def _in_type(stored: StoredActivation, before: torch.dtype, dtype: torch.dtype) -> StoredActivation:
    """Returns what stands for an activation of a type in another one."""
    return stored if before is dtype else CastActivation(stored, before, dtype)


def _sums(stored: StoredActivation) -> int:
    """Returns how many sums are computed to decode an activation."""
    values = stored.values if isinstance(stored, ReluOutputActivation) else stored
    return values.sums if isinstance(values, SumActivation) else 0


def _dropout_scale(p: float, device: torch.device, dtype: torch.dtype) -> float:
    """Returns what a dropout with probability `p` multiplied with what it kept, rounded as torch does on the device."""
    kept = 1.0 - p
    if not kept:
        return 0.0
    if device.type == "cpu":
        return float(torch.tensor(1.0 / kept, dtype=dtype, device="cpu"))
    return float(np.float32(1.0) / np.float32(kept))


def _agree(tensor: Tensor, recipe: StoredActivation) -> bool:
    """Compares some elements of a tensor with its recipe, where that follows from raw tensors alone, bit by bit.

    This finds what was changed behind autograd's back, as through ``tensor.data``. All elements are compared where an
    operator computes them again, as its kernel may round a few in another way. A CUDA graph has nothing to compare.
    """
    if is_capturing():
        return recipe.lossy
    if type(recipe) is ElementwiseActivation:
        return recipe.lossy or agrees(recipe, tensor)
    # Few operators: with cold caches each takes 4 us, and this is done for each dropout of a softmax.
    step = max(tensor.numel() // SAMPLES, 1)
    possible = recipe.sampled(step)
    return possible is None or bool((each_nth(tensor, step) == possible).any(1).all())
