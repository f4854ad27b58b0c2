"""What an operator's backward may read of each tensor that the operator has saved: one table, for all of DAF.

An autograd node and a field of it name a saved tensor, by the names of torch's derivatives.yaml: `MulBackward0` saves
`self` and `other`. Most derivatives multiply by what they read, and an error of it is as large in the gradient. What is
not listed here is read exactly: by operators that compare a value with their result (`amax`), divide by it (`log`),
have an edge of their domain (`acos`) or subtract values that are almost equal (losses), and by what DAF does not know.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from daf_core.autograd.torch_private import Node, is_leaf_node

STATISTIC_SHARE = 16
"""A float tensor without gradient, or a later result of an operator, is a statistic where it is this many times smaller
than the largest tensor saved in the same module call, such as attention's logsumexp (1/64 of the queries). It stays
exact."""


class Kind(enum.Enum):
    """What a backward reads of a saved tensor."""

    EXACT = "the values as they are"
    APPROXIMATE = "values that may be approximate"
    NORMALIZED = "approximate values; a row beside others that spread far more stays exact"
    ATTENTION = "approximate query, key and value, of which the result is computed again"
    LOGARITHMS = "logarithms of probabilities, normalized or not, which keep the gradient's relative error"
    PROBABILITIES = "probabilities that are compared with others, which keep the relative error of the difference"
    SIDES = "on which side of a bound each value lies, as one bit"
    SHAPE = "the shape alone"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the derivative of an operator is another one than elsewhere."""

    low: float  # the lower bound, or minus infinity
    high: float  # the upper bound, or infinity
    closed: bool = False  # whether a value on a bound is inside

    def inside(self, values: Tensor) -> Tensor:
        """Returns True for each value inside."""
        if self.closed:
            return (values >= self.low) & (values <= self.high)
        return (values > self.low) & (values < self.high)

    def are_rounded(self, dtype: torch.dtype) -> bool:
        """Says whether a type does not hold them: operators differ in whether they round them before they compare."""
        finite = [bound for bound in (self.low, self.high) if math.isfinite(bound)]
        return torch.tensor(finite, dtype=torch.float64, device="cpu").to(dtype).tolist() != finite

    def examples(self) -> tuple[float, float]:
        """Returns a value inside and one outside, which any floating-point type tells from the bounds."""
        low, high = self.low, self.high
        beyond = math.inf if math.isfinite(high) else -math.inf
        if math.isfinite(low) and math.isfinite(high):
            return low / 2 + high / 2, beyond
        within = low + max(1.0, abs(low)) if math.isfinite(low) else high - max(1.0, abs(high))
        return within if abs(within) <= torch.finfo(torch.float16).max else -beyond, beyond


@dataclass(frozen=True, slots=True)
class Reading:
    """What one operator reads of one tensor that it has saved."""

    kind: Kind  # what it reads
    reader: str  # name of its autograd node
    # Of `Kind.SIDES`; and of `Kind.APPROXIMATE` where the derivative jumps: values are then to stay on their side.
    bounds: Bounds | None = None
    # Of `Kind.LOGARITHMS`, `Kind.PROBABILITIES` and a softmax's result: the dimension along which the probabilities are
    # summed, counted from the end. Of a GLU's argument: that which is cut into halves. Of `Kind.NORMALIZED`: that which
    # is normalized, 0 where it is none, or several.
    dim: int = 0
    pieces: int = 1  # of `Kind.NORMALIZED`: equal parts of that dimension that are normalized each for itself
    # Of a query or a key: the deviation of the scores of one query, where that is known. Of the argument of a sine or
    # the like: its own. Of an exponential's result: 0, or what gives it twice the bits. Infinity of what takes twice
    # the bits in any case, or stays exact at 8, but within a budget: the input of a last layer of few results, vectors
    # that are compared, and what is recomputed where slopes jump.
    deviation: float = 0.0
    varies: bool = False  # whether the same operator reads otherwise where it has other arguments

    @property
    def takes_approximations(self) -> bool:
        """Whether values of few bits will do."""
        return self.kind in (Kind.APPROXIMATE, Kind.NORMALIZED, Kind.ATTENTION, Kind.PROBABILITIES)

    @property
    def jumps(self) -> bool:
        """Whether the derivative jumps at bounds of what may be approximate elsewhere."""
        return self.kind is Kind.APPROXIMATE and self.bounds is not None

    @property
    def takes_any_codes(self) -> bool:
        """Whether codes will do that were made for nobody in particular."""
        return self.kind in (Kind.APPROXIMATE, Kind.ATTENTION) and not self.deviation and self.bounds is None

    def is_certain_for(self, reader: str | None) -> bool:
        """Says whether a node of a name takes approximations, whatever its arguments."""
        return self.reader == reader and self.takes_approximations and not self.varies


def fields_named(listed: str) -> dict[tuple[str, str], None]:
    """Reads lines of node names, without their "Backward", and their fields: ``Mul0 Addcmul0: self other``."""
    lines = [line.partition(":") for line in listed.strip().splitlines()]
    return {
        (_full(node), field): None for nodes, _, fields in lines for node in nodes.split() for field in fields.split()
    }


def _full(short: str) -> str:
    return f"{short[:-1]}Backward{short[-1]}"


# The gradient of each is linear in what is read, or a smooth function of it with a bounded derivative; see `_JUMPS`.
# Those of two "Backward" are of the gradients that such operators make, for a gradient of the gradient.
_APPROXIMATE = fields_named("""
    Mul0 Matmul0 LinalgCross0: self other
    Mm0 Bmm0 GroupedMm0: self mat2
    Addmm0: mat1 mat2
    Addbmm0 Baddbmm0: batch1 batch2
    Addmv0: mat vec
    Addr0: vec1 vec2
    Mv0: self vec
    Dot0: self tensor
    Vdot0: self other
    Addcmul0: tensor1 tensor2
    Lerp1: self end weight
    Trilinear0: i1 i2 i3
    Linear0 Convolution0 Convolution1 ConvolutionOverrideable0 NnpackSpatialConvolution0: input weight
    ConvDepthwise2D0 ConvDepthwise3D0 ConvTbc0 CudnnConvolution0 CudnnConvolutionTranspose0 SlowConv2D0: self weight
    SlowConv3D0 SlowConvDilated2D0 SlowConvDilated3D0 SlowConvTranspose2D0 SlowConvTranspose3D0: self weight
    MiopenConvolution0 MiopenConvolutionTranspose0 MiopenDepthwiseConvolution0: self weight
    MpsConvolution0 MpsConvolutionTranspose0: self weight
    Gelu0 Silu0 Mish0 Softplus0 Elu0 Celu0 Glu0 Hardswish0 PreluKernel0 Sin0 Cos0 Atan0 Asinh0: self
    Sigmoid0 Tanh0 Softmax0 SafeSoftmax0 MaskedSoftmax0 Elu1 Celu1 Exp0 Exp20 Expm10: result
    LogSigmoid0: self buffer
    Var0 VarMean0 Std0 StdMean0: self
    GridSampler2D0 GridSampler3D0 GridSampler2DCpuFallback0: input
    CudnnGridSampler0: self
    EmbeddingBag0: per_sample_weights
    MkldnnRnnLayer0 CudnnRnn0 MiopenRnn0: input result0
    ConvolutionBackward0: grad_output input weight
    LinearBackward0: grad_output self weight
    GeluBackward0: grad_output self
    SigmoidBackward0 TanhBackward0 SoftmaxBackwardData0: grad_output output
    NativeLayerNormBackward0: grad_out
""")

SOFTMAXES = (_full("Softmax0"), _full("SafeSoftmax0"))
"""Nodes whose result is probabilities: `sharpness` says which of them stay exact."""

GLU = _full("Glu0")

LOGSUMEXP = _full("Logsumexp0")
"""The node that reads logits: logarithms of probabilities that do not sum to 1."""

MOST_MOVES = 16
"""Nodes between a layer and a logsumexp of its logits, at most."""

MOVES = (
    *("View", "UnsafeView", "ReshapeAlias", "Expand", "Alias", "Slice", "Select", "Unbind", "Split", "Transpose"),
    *("TBackward", "Permute", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "IndexBackward", "IndexSelect", "MaskedFill"),
)
"""What begins the names of nodes that move values."""

_SCALES = (*MOVES, "NegBackward", "AddBackward", "SubBackward", "MulBackward", "DivBackward", "TanhBackward")
LAYERS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Convolution")

NARROW = 8
"""Width of heads below which attention stays exact: with 2 and 3 the gradient's error was up to 1.8 at 4 bits, where
what the queries read is almost equal."""

_NORMALIZED = fields_named("""
    NativeLayerNorm0 NativeGroupNorm0 FusedRmsNorm0 NativeBatchNorm0 CudnnBatchNorm0 MiopenBatchNorm0: input
    NativeBatchNormLegit0 NativeBatchNormLegit1 NativeBatchNormLegitNoTraining0 BatchNormWithUpdate0: input
    BatchNormNoUpdate0: input
""")

_ATTENTION = fields_named("""
    ScaledDotProductFlashAttentionForCpu0 ScaledDotProductFlashAttention0: query key value output
    ScaledDotProductEfficientAttention0 ScaledDotProductCudnnAttention0: query key value output
    ScaledDotProductFusedAttentionOverrideable0: query key value output
    FlashAttention0 EfficientAttention0 CudnnAttention0: query key value output
""")

_LOGARITHMS = fields_named("LogSoftmax0: result\nLogsumexp0: self")

# Backward asks these for their size, or for where the gradient goes, which their indices say.
_SHAPE = fields_named("""
    NllLoss0 NllLoss2D0 Gather0 Take0 MaskedSelect0 MaxPool2DWithIndices0 MaxPool3DWithIndices0: self
    AdaptiveMaxPool2D0 AdaptiveMaxPool3D0 FractionalMaxPool2D0 FractionalMaxPool3D0 AvgPool2D0 AvgPool3D0: self
    AdaptiveAvgPool2D0 AdaptiveAvgPool3D0: self
    ReflectionPad1D0 ReflectionPad2D0 ReflectionPad3D0: self
    ReplicationPad1D0 ReplicationPad2D0 ReplicationPad3D0: self
""")

_POSITIVE = Bounds(0.0, math.inf)


def _between(low: str, high: str, closed: bool = False) -> Callable[[Node], Bounds]:
    """Returns what reads the bounds of a node from its attributes; one without a name, or that is None, is infinite."""

    def read(node: Node) -> Bounds:
        least, most = (getattr(node, f"_saved_{name}", None) for name in (low, high))
        return Bounds(-math.inf if least is None else least, math.inf if most is None else most, closed)

    return read


_CLAMP_CLOSED = torch.__version__ < "2.14"  # compared as versions are
"""Whether the gradient passes where a value is the bound itself."""

_SIDES: dict[tuple[str, str], Bounds | Callable[[Node], Bounds]] = {
    **dict.fromkeys(fields_named("Relu0 LeakyRelu1 RreluWithNoise1: result"), _POSITIVE),
    **dict.fromkeys(fields_named("LeakyRelu0 RreluWithNoise0: self"), _POSITIVE),
    (_full("Threshold0"), "self"): _between("threshold", ""),
    (_full("Threshold1"), "self"): _between("threshold", ""),
    (_full("Hardtanh0"), "self"): _between("min_val", "max_val"),
    (_full("Hardsigmoid0"), "self"): Bounds(-3.0, 3.0),
    (_full("Clamp1"), "self"): _between("min", "max", closed=_CLAMP_CLOSED),
    (_full("ClampMin0"), "self"): _between("min", "", closed=_CLAMP_CLOSED),
    (_full("ClampMax0"), "self"): _between("", "max", closed=_CLAMP_CLOSED),
    (_full("Hardshrink0"), "self"): lambda node: Bounds(-node._saved_lambd, node._saved_lambd, closed=True),
    (_full("Softshrink0"), "self"): lambda node: Bounds(-node._saved_lambd, node._saved_lambd, closed=True),
}
"""Nodes that ask on which side of bounds a value lies: of the same ones, or of those that they are given each time."""


def _jump_of_elu(node: Node) -> Bounds | None:
    """Returns where the slope of an ELU jumps: it comes to `scale` from above, and to as many times it from below."""
    return None if node._saved_alpha * node._saved_input_scale == 1 else _POSITIVE


_JUMPS: dict[tuple[str, str], Callable[[Node], Bounds | None]] = {
    (_full("Hardswish0"), "self"): lambda _: Bounds(-3.0, 3.0),
    (_full("PreluKernel0"), "self"): lambda _: _POSITIVE,
    (_full("Elu0"), "self"): _jump_of_elu,
    (_full("Elu1"), "result"): _jump_of_elu,
}
"""Those of `Kind.APPROXIMATE` whose gradient jumps, and between which bounds it does not. Close to a bound, codes alone
have it jump at random: at 8 bits the error of LCNet's gradient was .087 in place of .011."""

_KINDS: dict[tuple[str, str], Kind] = {
    **dict.fromkeys(_APPROXIMATE, Kind.APPROXIMATE),
    **dict.fromkeys(_NORMALIZED, Kind.NORMALIZED),
    **dict.fromkeys(_ATTENTION, Kind.ATTENTION),
    **dict.fromkeys(_LOGARITHMS, Kind.LOGARITHMS),
    **dict.fromkeys(_SIDES, Kind.SIDES),
    **dict.fromkeys(_SHAPE, Kind.SHAPE),
}


def listed() -> Mapping[Kind, Sequence[tuple[str, str]]]:
    """Returns the autograd nodes and fields of each kind, without those that depend on a node's arguments."""
    return {kind: [place for place, found in _KINDS.items() if found is kind] for kind in Kind}


_FUNCTIONS: dict[str, Kind] = {
    # A part of the model is computed again from what a checkpoint has saved, and so is its gradient.
    "torch.utils.checkpoint.CheckpointFunction": Kind.APPROXIMATE,
    "torch.utils.checkpoint._NoopSaveInputs": Kind.APPROXIMATE,
    "daf_core.rewrites.gated._GatedProduct": Kind.APPROXIMATE,
    "daf_core.rewrites.attention._DroppedAttention": Kind.APPROXIMATE,
    "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3": Kind.APPROXIMATE,
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": Kind.APPROXIMATE,
    "liger_kernel.ops.geglu.LigerGELUMulFunction": Kind.APPROXIMATE,
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction": Kind.NORMALIZED,
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": Kind.NORMALIZED,
    # The weight is frozen, whose gradient alone would read the input.
    "hqq.core.quantize.HQQMatmulNoCacheDeq": Kind.SHAPE,
    "hqq.core.quantize.HQQMatmulNoCacheMul": Kind.SHAPE,
}
"""What functions of Python read of all that they save, but for parameters, statistics and small tensors: they stay
exact."""


def reading_of(node: Node, field: str, is_large: Callable[[str], bool] = lambda _field: True) -> Reading:
    """Returns what a node reads of a field.

    Args:
        node: An autograd node that has its saved values.
        field: The name under which it has saved the tensor; "" where that is unknown.
        is_large: Says whether what it saved of a name is so large that it may be stored in few bits.
    """
    function = getattr(type(node), "_forward_cls", None)
    if function is not None:
        return reading_of_function(function)
    name = node.name()
    kind = _KINDS.get((name, field), Kind.EXACT)
    if kind is Kind.SIDES:
        known = _SIDES[name, field]
        bounds = known if isinstance(known, Bounds) else known(node)
        told = not math.isnan(bounds.low + bounds.high) and (math.isfinite(bounds.low) or math.isfinite(bounds.high))
        return Reading(kind, name, bounds, varies=bounds is not known) if told else Reading(Kind.EXACT, name)
    if kind is Kind.LOGARITHMS:
        dim = dim_from_end(node)
        known = name != LOGSUMEXP or (dim and reads_logits(node))
        return Reading(kind if known else Kind.EXACT, name, dim=dim)
    if kind is Kind.ATTENTION and node._input_metadata[0].shape[-1] < NARROW:
        kind = Kind.EXACT
    if kind is Kind.EXACT and _multiplies(node, name, field, is_large):
        kind = Kind.APPROXIMATE
    if name in (*SOFTMAXES, GLU):
        return Reading(kind, name, dim=dim_from_end(node))
    if kind is Kind.NORMALIZED and len(getattr(node, "_saved_normalized_shape", ())) == 1:
        return Reading(kind, name, dim=-1)
    if name == _full("NativeGroupNorm0") and node._saved_HxW == 1:
        return Reading(kind, name, dim=1 - len(node._input_metadata[0].shape), pieces=node._saved_group)
    jump = _JUMPS.get((name, field))
    if kind is Kind.APPROXIMATE and jump is not None:
        return Reading(kind, name, jump(node), varies=jump is _jump_of_elu)
    return Reading(kind, name, varies=name in (*DIVISIONS, *POWERS, *NORMS))


def reading_of_function(function: type) -> Reading:
    """Returns what a ``torch.autograd.Function`` reads of what it has saved."""
    kind = _FUNCTIONS.get(f"{function.__module__}.{function.__qualname__}", Kind.EXACT)
    return Reading(kind, f"{function.__name__}Backward", dim=-1 if kind is Kind.NORMALIZED else 0)


CHECKPOINT = Reading(Kind.APPROXIMATE, "checkpoint")
"""What is recomputed from the inputs of a checkpoint belongs to them as they are decoded, as does its gradient."""


DIVISIONS = (_full("Div0"), _full("Div2"), _full("Addcdiv0"))
POWERS = (_full("Pow0"), _full("Pow1"), _full("Pow2"))
NORMS = (_full("LinalgVectorNorm0"), _full("Norm0"), _full("Norm1"), _full("Norm2"), _full("Norm3"))


def _multiplies(node: Node, name: str, field: str, is_large: Callable[[str], bool]) -> bool:
    """Says whether a node multiplies by a field for the arguments that it has: it depends on more than its name."""
    if name in DIVISIONS:  # the dividend, of a divisor that is exact since it is small
        return field == "self" and name != _full("Addcdiv0") and not is_large("other")
    if name == _full("Pow0"):
        return has_natural_exponent(node)
    if name in NORMS:  # values over their root of squares
        return field == "self" and getattr(node, "_saved_ord", getattr(node, "_saved_p", 2)) in (2, None)
    return False


def reads_logits(node: Node) -> bool:
    """Says whether a logsumexp reads what a layer has made, or a parameter, moved, scaled, capped or masked at most.

    Other terms, as of a mixture's components or a dynamic program, may cancel in the gradient.
    """
    pending = [each for each, _ in node.next_functions]
    for node in pending:
        if node is None or is_leaf_node(node) or node.name().startswith(LAYERS):
            continue
        before = [each for each, _ in node.next_functions if each is not None and not is_leaf_node(each)]
        grows = any((results_of(each) or 0) < (results_of(node) or 0) for each in before)
        if grows or not node.name().startswith(_SCALES) or len(pending) > MOST_MOVES:
            return False
        pending += before
    return True


def results_of(node: Node) -> int | None:
    """Returns the elements of what a node has made; None where it is a nested tensor, of no shape or one of symbols."""
    made = node._input_metadata
    return None if not made or made[0].is_nested_tensor else math.prod(made[0].shape)


def has_natural_exponent(node: Node) -> bool:
    """Says whether an exponent is a natural number: the derivative then has no pole."""
    return node.name() == _full("Pow0") and is_natural(node._saved_exponent)


def is_natural(exponent: object) -> bool:
    """Says whether an exponent is a natural number."""
    return isinstance(exponent, int | float) and exponent >= 1 and float(exponent).is_integer()


def dim_from_end(node: Node) -> int:
    """Returns a node's dimension, counted from the end: torch shows one below zero as an unsigned number.

    It is 0 where a sum goes over several.
    """
    dim, dims = node._saved_dim, len(node._input_metadata[0].shape)
    if isinstance(dim, tuple):
        if len(dim) != 1:
            return 0
        dim, dims = dim[0], dims + (not node._saved_keepdim)
    return dim - (1 << 64) if dim >= 1 << 63 else dim - dims
