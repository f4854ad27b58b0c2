"""Exponentials that are read in a part of their elements alone, as the derivative of an ELU reads its."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from daf_core.compiled.readers import EXPONENTIALS, comparison_of, is_limited, multiple_of, name_of


def is_used_below_one(exponential: fx.Node) -> bool:
    """Says whether an exponential is read where its argument is not positive alone, as by the derivative of an ELU.

    In a graph of forward and backward together.
    """
    argument = exponential.all_input_nodes[0]
    products = [user for user in exponential.users if name_of(user) == "mul"]
    readers = [(product, reader) for product in products for reader in product.users]
    if not readers or len(products) != len(exponential.users):
        return False
    return all(_takes_where_negative(reader, product, argument) for product, reader in readers)


def _takes_where_negative(node: fx.Node, values: fx.Node, argument: fx.Node) -> bool:
    """Says whether a node takes values only where an argument is not positive."""
    if name_of(node) != "where" or len(node.args) != 3:
        return False
    condition, first, second = cast("tuple[fx.Node, Any, Any]", node.args)
    side = comparison_of(condition, argument)
    if side is None or side.bound != 0:
        return False
    (compared, factor), (source, other) = map(multiple_of, (condition.all_input_nodes[0], argument))
    if name_of(condition) in ("gt", "ge"):
        first, second = second, first
    return compared is source and factor * other > 0 and first is values and second is not values


def is_large_where_unread(last: fx.Node) -> bool:
    """Says whether a node is a multiple of an exponential without bound that is taken somewhere else alone."""
    exponential, _ = multiple_of(last)
    if name_of(exponential) not in (*EXPONENTIALS, "expm1") or is_limited(exponential.all_input_nodes[0]):
        return False
    return any(name_of(reader) == "where" for user in last.users for reader in (user, *user.users))
