"""What the backward graph reads of a saved tensor: the readers' table, for operators of aten.

A compiled backward is not a chain of autograd's nodes, but of operators into which their formulas were cut. So each
operator between a saved tensor and the first sum over many of its values is looked at. What is not known reads exactly.
"""

from __future__ import annotations

import operator
from enum import Flag, auto
from typing import Any, cast

import torch
from torch import Tensor, fx

from daf_core.autograd.torch_compile import reached
from daf_core.compiled.codes import Sides
from daf_core.compiled.sizes import elements_of
from daf_core.readers.attention import KERNELS
from daf_core.readers.table import NARROW, Kind, is_natural, listed

aten = torch.ops.aten


class Needs(Flag):
    """What all readers of a tensor need of it, together."""

    NOTHING = 0  # but values in few bits
    MORE_BITS = auto()  # than others get
    EXACT = auto()
    EXPONENTIAL = auto()
    SIGNS = auto()


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _named(
    """
    view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select alias detach clone split
    split_with_sizes unbind flatten unflatten as_strided contiguous lift_fresh_copy narrow chunk cat stack
    constant_pad_nd flip rev roll
    """
)
"""Operators that move values, and change none."""

_SMOOTH = _named(
    """
    mul add sub neg rsub addcmul lerp tanh sigmoid erf sin cos atan asinh relu where _to_copy convert_element_type
    to abs square clamp clamp_min clamp_max minimum maximum silu gelu softplus mish hardswish elu celu glu
    leaky_relu hardtanh copy cumsum fma
    index _unsafe_index index_select gather take_along_dim repeat diagonal masked_fill scatter slice_scatter
    select_scatter diagonal_scatter as_strided_scatter
    """
)
"""Operators whose result is off by little where what they read is."""

_SUMS = _named(
    """
    mm bmm addmm baddbmm addbmm mv addmv dot vdot linear convolution sum mean var_mean var std std_mean
    index_put _unsafe_index_put _unsafe_masked_index_put_accumulate _grouped_mm scatter_add index_add
    embedding_dense_backward avg_pool2d_backward _adaptive_avg_pool2d_backward grouped_mm_fallback_backward
    """
)
"""Operators behind which the error of one value is one of many."""

EXPONENTIALS = ("exp", "exp2")
"""Operators whose result is off by the more, relative to itself, the more what they read is off."""

STEEPEST = 2.0
"""Largest multiple of a value in a sigmoid by hand that takes the bits of others: quick GELUs have 1.7. Of 8 times the
value the error at 4 bits was .57, and is .08."""

CASTS = ("convert_element_type", "_to_copy")
RESHAPES = ("view", "reshape", "permute", "alias", "unsqueeze", "squeeze", "t", "transpose")
"""Views of one tensor, of all its elements unless its type changes."""

_ONE_BY_ONE = (*CASTS, *RESHAPES)
"""What torch does not say of itself that each element of the result is made of one."""

SIZES = _named("sym_size sym_stride sym_numel sym_storage_offset")
"""Operators that read no value."""

_LIKE = _named("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
"""Operators that read a shape, a type and a device."""

_ATTENDED = ("", "query", "key", "value", "output")
_BACKWARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "convolution_backward": ("ConvolutionBackward0", ("", "input", "weight")),
    "native_layer_norm_backward": ("NativeLayerNormBackward0", ("", "input")),
    "native_group_norm_backward": ("NativeGroupNormBackward0", ("", "input")),
    "native_batch_norm_backward": ("NativeBatchNormBackward0", ("", "input")),
    "batch_norm_backward": ("BatchNormWithUpdateBackward0", ("", "input")),
    "_fused_rms_norm_backward": ("FusedRmsNormBackward0", ("", "input")),
    "gelu_backward": ("GeluBackward0", ("", "self")),
    "silu_backward": ("SiluBackward0", ("", "self")),
    "mish_backward": ("MishBackward0", ("", "self")),
    "softplus_backward": ("SoftplusBackward0", ("", "self")),
    "hardswish_backward": ("HardswishBackward0", ("", "self")),
    "glu_backward": ("GluBackward0", ("", "self")),
    "tanh_backward": ("TanhBackward0", ("", "result")),
    "sigmoid_backward": ("SigmoidBackward0", ("", "result")),
    "_softmax_backward_data": ("SoftmaxBackward0", ("", "result")),
    "_log_softmax_backward_data": ("LogSoftmaxBackward0", ("", "result")),
    "nll_loss_backward": ("NllLossBackward0", ("", "self")),
    "nll_loss2d_backward": ("NllLoss2DBackward0", ("", "self")),
    "max_pool2d_with_indices_backward": ("MaxPool2DWithIndicesBackward0", ("", "self")),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "ScaledDotProductFlashAttentionForCpuBackward0",
        _ATTENDED,
    ),
    "_scaled_dot_product_flash_attention_backward": ("ScaledDotProductFlashAttentionBackward0", _ATTENDED),
    "_scaled_dot_product_efficient_attention_backward": (
        "ScaledDotProductEfficientAttentionBackward0",
        ("", "query", "key", "value", "", "output"),
    ),
    "_scaled_dot_product_cudnn_attention_backward": ("ScaledDotProductCudnnAttentionBackward0", _ATTENDED),
}
"""Autograd's node, and its field for each argument, of operators that are a backward formula as a whole."""

_KINDS = {place: kind for kind, places in listed().items() for place in places}
_NEEDS = {
    **dict.fromkeys((Kind.APPROXIMATE, Kind.NORMALIZED, Kind.ATTENTION, Kind.SHAPE), Needs.NOTHING),
    Kind.LOGARITHMS: Needs.EXPONENTIAL,
}

ATTENTIONS = {kernel.operator: kernel for kernel in KERNELS.values() if f"{kernel.operator}_backward" in _BACKWARDS}
"""Fused attentions by the name of their operator."""


def name_of(node: fx.Node) -> str:
    """Returns the name of the operator of a node, without its overload; "" where it is none."""
    packet = getattr(node.target, "overloadpacket", None) or getattr(node.target, "_overloadpacket", None)
    return "" if packet is None else packet.__name__


def is_view(node: fx.Node) -> bool:
    """Says whether a node moves values, and changes none."""
    return node.target is operator.getitem or name_of(node) in _VIEWS


def is_pointwise(node: fx.Node) -> bool:
    """Says whether each element of a node's result is made of one of each tensor that it reads."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in _ONE_BY_ONE


_NUMBERS = (torch.SymInt, torch.SymFloat)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors that a node reads, and operators with several results, but not the sizes that it reads."""
    return [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), _NUMBERS)]


def needs_of(saved: fx.Node) -> Needs:
    """Returns what the backward needs of a saved tensor, given its placeholder in the backward graph."""
    found, seen, pending = Needs.NOTHING, {saved}, [saved]
    same = set(reached([saved], lambda node: filter(is_view, node.users)))
    moved = set(reached([saved], lambda node: [each for each in node.users if _moves(each, node)]))
    while pending:
        source = pending.pop()
        for user in source.users:
            needs, goes_on = _reading(user, source)
            if needs is Needs.SIGNS and source not in same:  # codes keep signs, but not those of what is made of them
                needs = Needs.EXACT
            if needs is Needs.EXPONENTIAL:
                bounded = is_limited(source) or any(map(is_bounded, user.users))
                if (bounded and abs(multiple_of(source)[1]) <= STEEPEST) or _is_minus_square(source):
                    needs, goes_on = Needs.NOTHING, True
                elif source not in moved:  # codes of logarithms are close at their largest
                    needs, goes_on = Needs.MORE_BITS, True
            found |= needs
            if goes_on and user not in seen:
                seen.add(user)
                pending.append(user)
    return found


def _moves(node: fx.Node, source: fx.Node) -> bool:
    """Says whether the largest of a tensor's values are the largest of a node's, too, as in logarithms and scores."""
    name, arguments = name_of(node), node.args
    if name in ("mul", "div") and arguments[0] is source:
        factor = arguments[1]
        if isinstance(factor, fx.Node):  # a temperature that is learned
            return isinstance(factor.meta.get("val"), Tensor) and elements_of(factor.meta["val"]) == 1
        return isinstance(factor, int | float) and factor > 0
    return is_view(node) or name in (*CASTS, "add", "where", "tanh") or (name == "sub" and arguments[0] is source)


def is_square(node: fx.Node) -> bool:
    """Says whether a node squares what it reads, by an operator for that."""
    return name_of(node) == "square" or (name_of(node) == "pow" and bool(node.args[1] == 2))


def squares(node: fx.Node) -> bool:
    """Says whether a node squares what it reads, as a power or as a product with itself."""
    return is_square(node) or (name_of(node) == "mul" and node.args[0] is node.args[1])


def _is_minus_square(node: fx.Node) -> bool:
    """Says whether a node is a negative multiple of a square, whose exponential is a density: GELU's derivative."""
    square, factor = multiple_of(node)
    arguments = square.args
    if is_square(square):
        return factor < 0
    if name_of(square) != "mul" or not all(isinstance(each, fx.Node) for each in arguments):
        return False
    (one, here), (other, there) = (multiple_of(cast("fx.Node", each)) for each in arguments)
    return one is other and factor * here * there < 0


def multiple_of(node: fx.Node) -> tuple[fx.Node, float]:
    """Returns of what a node is a multiple, wherever it is not limited, and by which factor."""
    factor = 1.0
    while (step := _factor_of(node)) is not None:
        factor *= step
        [node] = node.all_input_nodes
    return node, factor


def _factor_of(node: fx.Node) -> float | None:
    """Returns by what a node multiplies the only tensor that it reads; None where it does something else."""
    numbers, name = [each for each in node.args if isinstance(each, int | float)], name_of(node)
    if len(node.all_input_nodes) != 1:
        return None
    if name == "neg":
        return -1.0
    if is_limited(node):
        return 1.0
    if len(numbers) != 1 or node.kwargs or name not in ("mul", "div"):  # a quotient that is rounded has a keyword
        return None
    if name == "mul":
        return numbers[0]
    return 1 / numbers[0] if numbers[0] and isinstance(node.args[0], fx.Node) else None


def is_above_one(node: fx.Node) -> bool:
    """Says whether a node is one and an exponential, by which a sigmoid by hand divides."""
    numbers = [each for each in node.args if isinstance(each, int | float)]
    others = node.all_input_nodes
    return name_of(node) == "add" and numbers == [1] and len(others) == 1 and name_of(others[0]) in EXPONENTIALS


def is_bounded(node: fx.Node) -> bool:
    """Says whether what a node makes of an exponential, and of its argument, has a slope of 1 or less: softplus."""
    return is_above_one(node) or (name_of(node) == "log1p" and name_of(node.all_input_nodes[0]) in EXPONENTIALS)


def compared_in(backward: fx.Graph) -> set[fx.Node]:
    """Returns what a backward graph compares: the probabilities of a log-softmax, and targets that it was given.

    And whatever both are made of element by element. Their difference is the gradient, and has the errors of both:
    where a teacher's targets are close to the probabilities, it was off by .6 at 4 bits.
    """
    found: set[fx.Node] = set()
    for node in backward.nodes:
        if name_of(node) != "sub" or len(node.all_input_nodes) != 2:
            continue
        gradient, product = node.all_input_nodes  # of which log-softmax's is: gradient - exp(result) * sum(gradient)
        if name_of(product) != "mul" or not any(_is_sum_of(each, gradient) for each in product.all_input_nodes):
            continue
        targets = _made_one_by_one_of(gradient)
        if any(_may_be_target(each, gradient) for each in targets):
            found |= targets | _made_one_by_one_of(product)
    return found


def _is_sum_of(node: fx.Node, values: fx.Node) -> bool:
    return name_of(node) == "sum" and node.args[0] is values


def _made_one_by_one_of(node: fx.Node) -> set[fx.Node]:
    """Returns a node, and what it is made of element by element."""
    return set(reached([node], lambda each: tensors_of(each) if is_pointwise(each) or is_view(each) else ()))


def _may_be_target(node: fx.Node, gradient: fx.Node) -> bool:
    """Says whether a node is a saved tensor of floating-point numbers, one for each of a gradient's."""
    values = node.meta.get("val")
    if node.op != "placeholder" or node.name.startswith("tangents") or not isinstance(values, Tensor):
        return False
    return values.is_floating_point() and elements_of(values) == elements_of(gradient.meta["val"])


def sides_of(saved: fx.Node) -> Sides | None:
    """Returns the only bound that a backward compares a saved tensor with, where it does nothing else with it."""
    behind = reached([saved], lambda node: node.users if node is saved or is_view(node) else ())
    readers = (node for node in behind if node is not saved and not (is_view(node) and node.users))
    found = {comparison_of(reader, saved) for reader in readers}
    return found.pop() if len(found) == 1 else None


def is_limited(argument: fx.Node) -> bool:
    """Says whether an exponential's argument is nowhere above 0."""
    return name_of(argument) == "clamp_max" and bool(argument.args[1] == 0)


def comparison_of(node: fx.Node, source: fx.Node) -> Sides | None:
    """Returns the bound of a node that compares what it reads with a number; None for other nodes."""
    name, arguments = name_of(node), node.args
    if name == "threshold_backward" and len(arguments) == 3 and arguments[0] is not source:
        return Sides(float(arguments[2]), closed=False) if isinstance(arguments[2], int | float) else None
    if name in ("le", "gt", "lt", "ge") and len(arguments) == 2 and isinstance(arguments[1], int | float):
        return Sides(float(arguments[1]), closed=name in ("lt", "ge"))
    return None


def is_side(node: fx.Node) -> bool:
    """Says whether a node works out on which side of a number values lie, or is a ReLU, whose result says that too."""
    read = node.all_input_nodes
    if len(read) != 1 or not (name_of(node) == "relu" or comparison_of(node, read[0]) is not None):
        return False
    values = read[0].meta.get("val")
    return name_of(read[0]) != "relu" and isinstance(values, Tensor) and values.is_floating_point()


def _reading(user: fx.Node, source: fx.Node) -> tuple[Needs, bool]:
    """Returns what a node needs of what it reads, and whether its result is to be followed."""
    name = name_of(user)
    if user.op == "output" or name in _SUMS or name in SIZES or name in _LIKE:
        return Needs.NOTHING, False
    if name in ATTENTIONS:  # whose mask may have infinities
        return Needs.NOTHING if source in _heads(user) else Needs.EXACT, False
    if name in CASTS and not user.meta["val"].is_floating_point():  # to what may number places
        return Needs.EXACT, False
    if is_view(user) or name in _SMOOTH:
        return Needs.NOTHING, True
    if name in _BACKWARDS:
        return _needs_of_argument(user, source), False
    if name in EXPONENTIALS:
        return Needs.EXPONENTIAL, False
    if name in ("div", "reciprocal"):  # by what is exact, or of it
        divides = name == "reciprocal" or source in user.args[1:]
        return (Needs.EXACT, False) if divides and not is_above_one(source) else (Needs.NOTHING, True)
    if name == "log1p":
        return (Needs.NOTHING, True) if is_bounded(user) else (Needs.EXACT, False)
    if name == "pow":
        return (Needs.NOTHING, True) if is_natural(user.args[1]) else (Needs.EXACT, False)
    comparison = comparison_of(user, source)
    if comparison is not None and comparison.bound == 0 and not comparison.closed:
        return Needs.SIGNS, False
    return Needs.EXACT, False


def _is_of_what_it_reads(backward: fx.Node) -> bool:
    """Says whether an attention's backward reads sums of the query, key and value that it is given.

    With those of others, probabilities do not sum to 1: all are exact then. True of what is no attention.
    """
    if name_of(backward).removesuffix("_backward") not in ATTENTIONS:
        return True
    schema: Any = backward.target
    names = [argument.name for argument in schema._schema.arguments]
    query, sums = (cast("fx.Node", backward.args[names.index(name)]) for name in ("query", "logsumexp"))
    again = sums.target is operator.getitem and name_of(sums.all_input_nodes[0]) in ATTENTIONS
    return again and query.meta["val"].shape[-1] >= NARROW


def _heads(attention: fx.Node) -> tuple[Any, ...]:
    """Returns query, key and value of an attention, or of one that draws again, which is told what first."""
    begin = int(isinstance(attention.args[0], list | tuple))
    return attention.args[begin : begin + 3]


def _needs_of_argument(user: fx.Node, source: fx.Node) -> Needs:
    if not _is_of_what_it_reads(user) or source in user.kwargs.values():  # such as a mask, which may have infinities
        return Needs.EXACT
    found, (node, fields) = Needs.NOTHING, _BACKWARDS[name_of(user)]
    for place, argument in enumerate(user.args):
        if argument is source and place:  # the first is the gradient, or what is multiplied by it
            field = fields[place] if place < len(fields) else ""
            found |= _NEEDS.get(_KINDS.get((node, field), Kind.EXACT), Needs.EXACT)
    return found
