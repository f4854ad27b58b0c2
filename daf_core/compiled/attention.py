"""Fused attention in a backward graph, run again on what its query, key and value decode to.

As outside of graphs, its backward then is the exact one of attention at those values, and its result is not stored.
The partitioner would do it too, if it did not take the operator for one that always draws random numbers.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from daf_core.autograd.torch_compile import NOT_IN_CUDA_GRAPHS, reached
from daf_core.compiled.readers import ATTENTIONS, is_view, name_of
from daf_core.readers.attention import Draws, drawing_from

_RESULTS = 2
"""What an attention computes of its inputs comes first: its result and the logarithm of the sums."""


def attend_again(forward: fx.Graph, backward: fx.Graph) -> frozenset[str]:
    """Has a backward graph work out the results of attentions that it is given the inputs of.

    Returns:
        The names of the saved tensors that it reads no more.
    """
    readers = {node.name: node for node in backward.find_nodes(op="placeholder")}
    found: set[str] = set()
    for node in reversed(forward.nodes):  # the last first: what makes its inputs again comes before it
        if name_of(node) not in ATTENTIONS:
            continue
        saved = [(place, readers[result.name]) for place, result in _results(node) if result.name in readers]
        drawn = _drawn(node) if _drops(node) else ()
        known = all(_is_known(each, readers) for each in node.all_input_nodes)
        if not saved or not known or drawn is None or not set(drawn) <= {place for place, _ in saved}:
            continue
        results = [(place, reader) for place, reader in saved if not drawn or place < _RESULTS]
        _insert(node, results, [dict(saved)[place] for place in drawn], readers, backward)
        found.update(reader.name for _, reader in results)
    return frozenset(found)


def _insert(
    node: fx.Node,
    results: list[tuple[int, fx.Node]],
    drawn: list[fx.Node],
    readers: dict[str, fx.Node],
    backward: fx.Graph,
) -> None:
    """Runs a forward node in the backward graph, right before the first that reads one of its results."""
    saved = {reader for _, reader in results}

    def source(given: fx.Node) -> fx.Node:
        return readers[given.name] if given.name in readers else backward.node_copy(given, source)

    first = next(each for each in backward.nodes if not saved.isdisjoint(each.all_input_nodes))
    with backward.inserting_before(first):
        again = backward.node_copy(node, source)
        if drawn:
            again.target, again.args = getattr(torch.ops.daf, name_of(node)).default, (drawn, *again.args)
            again.meta["val"] = again.meta["val"][:_RESULTS]
        for place, reader in results:
            result = backward.call_function(operator.getitem, (again, place))
            result.meta = copy.copy(reader.meta)
            reader.replace_all_uses_with(result)


def _is_known(node: fx.Node, readers: dict[str, fx.Node]) -> bool:
    """Says whether a backward graph is given what a forward node makes, or what that is a view of."""
    if node.name in readers:
        return True
    return is_view(node) and all(_is_known(each, readers) for each in node.all_input_nodes)


def _results(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yields the places and nodes of results, as they are and detached."""
    for taken in node.users:
        if taken.target is operator.getitem:
            place: Any = taken.args[1]
            same = reached([taken], lambda each: [user for user in each.users if name_of(user) in ("detach", "alias")])
            yield from ((place, each) for each in same)


def _drops(node: fx.Node) -> bool:
    """Says whether a fused attention draws random numbers."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(arguments.get("dropout_p", 0.0))


def _drawn(node: fx.Node) -> Sequence[int] | None:
    """Returns which results of an attention say what it has drawn; None where that is unknown."""
    target: Any = node.target
    names = [result.name for result in target._schema.returns]
    drawn = ATTENTIONS[name_of(node)].drawn
    return [names.index(name) for name in drawn] if drawn and set(drawn) <= set(names) else None


def _run_again(
    attention: Callable[..., Any], drawn: Sequence[Tensor], query: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    with drawing_from(query.device, Draws.of(drawn)):
        return _results_of(attention, drawn, query, *others, **named)


def _results_of(
    attention: Callable[..., Any], drawn: Sequence[Tensor], *arguments: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    return attention(*arguments, **named)[:_RESULTS]


# For each attention that may draw, an operator of the same name which draws the same again. It waits until the host
# knows what was drawn. All are there before anything is compiled: torch keeps graphs on disk.
_library = torch.library.Library("daf", "FRAGMENT")
for _name, _kernel in ATTENTIONS.items():
    if _kernel.drawn and hasattr(torch.ops.aten, _name):
        _attention = getattr(torch.ops.aten, _name).default
        _arguments = str(_attention._schema).partition("(")[2].rpartition(") -> ")[0]
        _library.define(f"{_name}(Tensor[] drawn, {_arguments}) -> (Tensor, Tensor)", tags=NOT_IN_CUDA_GRAPHS)
        _library.impl(_name, partial(_run_again, _attention), "CompositeExplicitAutograd")
        torch.library.register_fake(f"daf::{_name}", partial(_results_of, _attention), lib=_library)
