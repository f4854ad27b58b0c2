"""How each tensor is stored that a compiled forward graph saves for its backward graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from daf_core.autograd.torch_compile import reached
from daf_core.compiled.attention import attend_again
from daf_core.compiled.codes import Bits, Code, Logarithms, Planes, Slopes
from daf_core.compiled.common_row import DEAREST, bits_of_means
from daf_core.compiled.dimensions import channels_of, normalized_in, probabilities_of, viewed
from daf_core.compiled.distances import compared_rows
from daf_core.compiled.groups import Shape, Together, shape_of
from daf_core.compiled.poles import before_poles, with_gradient
from daf_core.compiled.readers import (
    CASTS,
    EXPONENTIALS,
    RESHAPES,
    SIZES,
    Needs,
    compared_in,
    is_limited,
    is_pointwise,
    is_square,
    is_view,
    multiple_of,
    name_of,
    needs_of,
    sides_of,
    tensors_of,
)
from daf_core.compiled.rows import is_softmax
from daf_core.compiled.sizes import elements_of, is_known
from daf_core.errors import ActivationBudgetError
from daf_core.readers.sharpness import SHARP, bits_for

LEAST_ELEMENTS = 4096
"""Smaller tensors stay as they are."""

FEW_RESULTS = 16
"""A last layer gives so many times fewer numbers than it reads; see docs/concepts/numerics.md."""

ALIKE = 2e-3
"""How far the derivatives of torch's two GELUs, and of one in another type, may differ."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward"])


@dataclass(frozen=True)
class Decision:
    """How one saved tensor is stored."""

    code: Code | None  # its code; None keeps it as it is
    # Operators that the backward graph applied to the tensor alone, and that the forward graph applies now: their
    # result is what is stored, in the tensor's shape or theirs. Empty where it is the tensor itself.
    instead: tuple[fx.Node, ...] = ()
    unread: bool = False  # whether the backward graph reads nothing of it, and nothing is stored
    own_rows: bool = False  # whether rows are not to share scaling groups
    channels: int | None = None  # its dimension that numbers channels, where that is known
    together: Together = ()  # what of it a normalization takes together, where one reads it

    def shape(self, values: Tensor) -> Shape:
        """Returns how what is stored is cut into groups."""
        return shape_of(values, self.own_rows, self.channels, self.together)


KEPT = Decision(None)
UNREAD = Decision(None, unread=True)


class Decisions:
    """The decisions for a pair of graphs.

    What the backward graph works out of one saved tensor alone is taken out of it.

    Attributes:
        made: The nodes of the forward graph by name.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph, bits: int) -> None:
        self._bits = bits
        self.made = {node.name: node for node in forward.nodes}
        self._unread = attend_again(forward, backward)
        self._readers = {node.name: node for node in backward.find_nodes(op="placeholder")}
        self._from_gradients = made_of_gradients(backward)
        known = with_gradient(forward, backward)
        self._compared, self._compared_rows = compared_in(backward), compared_rows(forward, known)
        self._before_poles = before_poles(forward, known)

    def of(self, name: str) -> Decision:
        """Returns the decision for a saved tensor of a name."""
        if name in self._unread:
            return UNREAD
        made, reader = self.made[name], self._readers.get(name)
        if reader is None or not isinstance(reader.meta.get("val"), Tensor):
            return KEPT
        values: Tensor = reader.meta["val"]
        if elements_of(values) < LEAST_ELEMENTS:
            return KEPT
        if values.dtype is torch.bool:
            return KEPT if made.op == "placeholder" else Decision(Bits())
        if _is_result_beside(made):
            return KEPT
        if values.dtype not in _DTYPES or values.shape[-1] == 1:
            return KEPT
        decision = self._of_values(made, reader, values)
        return decision if _bytes_of(decision, values) < _bytes_of(KEPT, values) else KEPT

    def fit(self, names: Sequence[str], levels: Sequence[int], room: int, ways: Sequence[str] = ()) -> None:
        """Takes the most bits, of falling `levels`, for which saved tensors of these names fit in `room` bytes.

        Raises:
            ActivationBudgetError: They fit in none; `ways` are its ways out.
        """
        needed = 0
        for self._bits in levels:
            needed = math.ceil(sum(map(self._bytes_of, names)))
            if needed <= room:
                return
        raise ActivationBudgetError(needed, max(room, 0), ways)

    def _bytes_of(self, name: str) -> float:
        """Returns about how many bytes a saved tensor takes."""
        values = self.made[name].meta["val"]
        return _bytes_of(self.of(name), values) if isinstance(values, Tensor) else 0.0

    def _of_values(self, made: fx.Node, reader: fx.Node, values: Tensor) -> Decision:
        chain = function_of_alone(reader)
        found: Tensor = (chain[-1] if chain else reader).meta["val"]
        if found.dtype is torch.bool:
            return Decision(Bits(), chain)
        if viewed(made) in self._before_poles:
            return Decision(sides_of(reader))
        compared = viewed(made) in self._compared_rows
        if chain and found.dtype in _DTYPES:
            code = None if _is_large_where_unread(chain[-1]) else self._code(chain[-1], compared)
            return Decision(Slopes(code.bits) if isinstance(code, Planes) and is_gelu(chain) else code, chain)
        code = sides_of(reader) or self._code(reader, compared)
        if not isinstance(code, Planes):
            return Decision(code)
        if is_softmax(viewed(made)):
            return _of_probabilities(made, values, code)
        if _is_window(viewed(made)):
            return Decision(replace(code, bits=bits_for(code.bits, SHARP) or code.bits, roots=True))
        decision = Decision(code, together=normalized_in(made))
        if code.signs or self._is_of_convolution(made, reader):
            return decision
        decision = replace(decision, channels=channels_of(made))
        dear = bits_of_means(values.shape, decision.shape(values).across) > DEAREST * code.bits
        return replace(decision, code=replace(code, common=not dear))

    def _code(self, reader: fx.Node, compared: bool) -> Code | None:
        needs = needs_of(reader)
        if Needs.EXACT in needs:
            return None
        more = Needs.MORE_BITS in needs or compared or reader in self._compared or self._is_of_last_layer(reader)
        bits = bits_for(self._bits, math.inf) if more else self._bits
        if bits is None or (Needs.EXPONENTIAL in needs and Needs.SIGNS in needs):
            return None
        return Logarithms(bits) if Needs.EXPONENTIAL in needs else Planes(bits, signs=Needs.SIGNS in needs)

    def _is_of_last_layer(self, reader: fx.Node) -> bool:
        """Says whether a product of few results reads a tensor, with no other product between it and the loss.

        Or reads what backward makes of it, such as a dropout of it.
        """
        for user in self._behind_pointwise(reader):
            if name_of(user) not in ("mm", "bmm"):
                continue
            gradients = [each for each in user.all_input_nodes if each in self._from_gradients]
            for gradient in gradients:
                size = elements_of(gradient.meta["val"])
                if size * FEW_RESULTS <= elements_of(reader.meta["val"]) and not _follows_product(gradient):
                    return True
        return False

    def _is_of_convolution(self, made: fx.Node, reader: fx.Node) -> bool:
        """Says whether a convolution makes or reads a tensor, of which its sizes do not show where its channels are."""
        readers = map(name_of, self._behind_pointwise(reader))
        return name_of(viewed(made)) == "convolution" or "convolution_backward" in readers

    def _behind_pointwise(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields what reads a node, or what is made of it element by element without a gradient."""

        def passes(each: fx.Node) -> bool:
            return each is node or is_view(each) or (is_pointwise(each) and each not in self._from_gradients)

        return (each for each in reached([node], lambda each: each.users if passes(each) else ()) if not passes(each))


def _bytes_of(decision: Decision, values: Tensor) -> float:
    """Returns about how many bytes a tensor takes that is stored so."""
    code = decision.code
    if decision.unread:
        return 0.0
    if code is None:
        return elements_of(values) * values.element_size()
    shape = decision.shape(values)
    bits = getattr(code, "bits", 1) + code.header_bits / shape.group
    if isinstance(code, Planes):
        bits += int(code.signs) + (bits_of_means(values.shape, shape.across) if code.common else 0.0)
    return shape.elements(values.shape) * bits / 8


def function_of_alone(saved: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the operators of a backward graph that read nothing but one saved tensor, where only one result is used.

    The last of them makes that result, which has as many elements as the tensor: what a derivative is, of which the
    gradient is a multiple. Returns () where there is no such result. Views of the tensor before the first of them are
    none of them, as their sizes may be symbols, but where a later one moves values.
    """
    source = saved
    while len(users := [user for user in source.users if name_of(user) not in SIZES]) == 1:
        if not _shows_the_same(users[0], saved):
            break
        [source] = users
    chain = _alone(source)
    return _alone(saved) if any(map(is_view, chain)) else chain


def _alone(saved: fx.Node) -> tuple[fx.Node, ...]:
    inside: dict[fx.Node, None] = {saved: None}
    node = saved.next
    while node.op != "root":
        alone = (
            node.op == "call_function" and node.all_input_nodes and all(each in inside for each in node.all_input_nodes)
        )
        if alone and is_pointwise(node):
            inside[node] = None
        node = node.next

    def is_read(each: fx.Node) -> bool:
        read = [user for user in each.users if user not in inside]
        return any(each is not saved or name_of(user) not in SIZES for user in read)

    border = [each for each in inside if is_read(each)]
    if len(border) != 1 or border[0] is saved or all(is_view(each) for each in inside if each is not saved):
        return ()
    last = border[0]
    if last.meta["val"].numel() != saved.meta["val"].numel():
        return ()
    needed = set(reached([last], lambda node: [each for each in node.all_input_nodes if each is not saved]))
    return tuple(each for each in inside if each in needed)


def _shows_the_same(node: fx.Node, saved: fx.Node) -> bool:
    """Says whether a node is a view of all elements of a saved tensor, and of nothing else, as what they are."""
    value, values = node.meta.get("val"), saved.meta["val"]
    if name_of(node) not in RESHAPES or not isinstance(value, Tensor):
        return False
    return value.dtype is values.dtype and elements_of(value) == elements_of(values)


def read_by(chain: tuple[fx.Node, ...]) -> fx.Node:
    """Returns the only tensor that operators read together."""
    [read] = {each for node in chain for each in node.all_input_nodes} - {*chain}
    return read


def is_gelu(chain: tuple[fx.Node, ...]) -> bool:
    """Says whether operators work out the derivative of a GELU, whichever of torch's two it is: they are tried out.

    With numbers: while a graph is compiled, tensors have no values.
    """
    return all(
        (found := _tried(chain, step / 4)) is not None and abs(found - _gelu_derivative(step / 4)) < ALIKE
        for step in range(-24, 25)
    )


def _tried(chain: tuple[fx.Node, ...], number: float) -> float | None:
    """Returns what operators make of a number; None where one of them is not known here."""
    values = {read_by(chain): number}
    for node in chain:
        if is_view(node) or name_of(node) in CASTS:
            values[node] = values[node.all_input_nodes[0]]
            continue
        function = _ON_NUMBERS.get(name_of(node))
        arguments = [values[each] if isinstance(each, fx.Node) else each for each in node.args]
        if function is None or node.kwargs or len(arguments) > 2:
            return None
        values[node] = function(*arguments)
    return values[chain[-1]]


def _gelu_derivative(number: float) -> float:
    density = math.exp(-number * number / 2) / math.sqrt(2 * math.pi)
    return (1 + math.erf(number / math.sqrt(2))) / 2 + number * density


_ON_NUMBERS: dict[str, Callable[..., float]] = {
    **{name: getattr(operator, name) for name in ("mul", "add", "sub", "neg", "pow")},
    **{name: getattr(math, name) for name in ("erf", "exp", "tanh")},
}


def _of_probabilities(made: fx.Node, values: Tensor, code: Planes) -> Decision:
    """Returns the decision for a softmax's result: decoded, it sums to 1 as well.

    It does where a group is a row, or a piece of one, as groups keep their means.
    """
    decision, dim = Decision(code, own_rows=True), probabilities_of(made)
    shape = decision.shape(values)
    rows = values.shape[shape.order[-1]]
    if dim is None or (dim == shape.order[-1] and is_known(rows) and rows % shape.group == 0):
        return decision
    return replace(decision, code=replace(code, probabilities=dim))


def _is_window(node: fx.Node) -> bool:
    """Says whether a node is the exponential of a multiple of a square: its gradient is large where it is almost 0."""
    if name_of(node) not in EXPONENTIALS:
        return False
    [argument] = node.all_input_nodes
    while name_of(argument) in ("mul", "div", "neg", *CASTS, *RESHAPES):
        several = [each for each in tensors_of(argument) if elements_of(each.meta["val"]) > 1]
        if len(several) != 1:
            return name_of(argument) == "mul" and argument.args[0] is argument.args[1]
        [argument] = several
    return is_square(argument)


def _is_result_beside(node: fx.Node) -> bool:
    """Says whether a tensor is a later result of an operator, such as a normalization's statistics."""
    later = node.target is operator.getitem and bool(node.args[1] != 0)
    return later and not is_view(node.all_input_nodes[0])


def made_of_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of a graph that work with the gradients that it is given, these among them."""
    given = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    return set(reached(given, lambda node: node.users))


def _follows_product(node: fx.Node) -> bool:
    """Says whether a matrix product or the like is among what a gradient was made of."""
    return any(name_of(each) in _PRODUCTS for each in reached([node], lambda each: each.all_input_nodes))


def _is_large_where_unread(last: fx.Node) -> bool:
    """Says whether a node is a multiple of an exponential without bound that is taken somewhere else alone."""
    exponential, _ = multiple_of(last)
    if name_of(exponential) not in (*EXPONENTIALS, "expm1") or is_limited(exponential.all_input_nodes[0]):
        return False
    return any(name_of(reader) == "where" for user in last.users for reader in (user, *user.users))
