"""Fused attention in a backward graph, run again on what its query, key and value decode to.

As outside of graphs, its backward then is the exact one of attention at those values, and its result is not stored.
The partitioner would do it too, if it did not take the operator for one that always draws random numbers.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch import fx

from daf_core.compiled.readers import ATTENTIONS, name_of


def attend_again(forward: fx.Graph, backward: fx.Graph) -> frozenset[str]:
    """Has a backward graph work out the results of attentions that it is given the inputs of.

    Returns:
        The names of the saved tensors that it reads no more.
    """
    readers = {node.name: node for node in backward.find_nodes(op="placeholder")}
    found: set[str] = set()
    for node in forward.nodes:
        if name_of(node) not in ATTENTIONS or _drops(node):
            continue
        results = [user for user in node.users if user.target is operator.getitem and user.name in readers]
        if results and all(each.name in readers for each in node.all_input_nodes):
            _insert(node, [(int(user.args[1]), readers[user.name]) for user in results], readers, backward)
            found.update(user.name for user in results)
    return frozenset(found)


def _insert(node: fx.Node, results: list[tuple[int, fx.Node]], readers: dict[str, fx.Node], backward: fx.Graph) -> None:
    """Runs a forward node in the backward graph, right before the first that reads one of its results."""
    saved = {reader for _, reader in results}
    first = next(each for each in backward.nodes if not saved.isdisjoint(each.all_input_nodes))
    with backward.inserting_before(first):
        again = backward.node_copy(node, lambda source: readers[source.name])
        for place, reader in results:
            result = backward.call_function(operator.getitem, (again, place))
            result.meta = copy.copy(reader.meta)
            reader.replace_all_uses_with(result)


def _drops(node: fx.Node) -> bool:
    """Says whether a fused attention draws random numbers, which are another's when it runs again."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(arguments.get("dropout_p", 0.0))
