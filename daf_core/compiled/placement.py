"""The order in which Inductor runs loops: what can be made of little at any time is made right before it is read.

Of several orders Inductor takes the one with the lowest peak. Each of them begins with the loops that need nothing: the
random numbers of all dropouts, and in backward what is decoded. Without codes this is not the peak of a step.
"""

# pyright: reportGeneralTypeIssues=false, reportUntypedBaseClass=false
# The class that torch's cache asks for is not there in every version of torch.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch, which keeps no graph in its cache for which the order was changed
    CustomSchedulerPass = object


BEFORE_LAST = 3
"""Steps between one whose result only the caller reads and the first made for it alone: ranges, moments, codes."""


class Late(CustomSchedulerPass):
    """Puts loops that need nothing, or only what such loops have made, right before the first that reads from them."""

    def __init__(self, version: str) -> None:
        self._version = version

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the loops in another order."""
        made = {name: place for place, node in enumerate(nodes) for name in node.get_buffer_names()}
        sources = [
            sorted({made[each.name] for each in node.unmet_dependencies if each.name in made} - {place})
            for place, node in enumerate(nodes)
        ]
        return [nodes[place] for place in late(sources)]

    def uuid(self) -> str:
        """Returns the version."""
        return f"daf-late-{self._version}"


def late(sources: Sequence[Sequence[int]]) -> list[int]:
    """Returns an order of steps in which memory is taken late and given back early.

    Steps that need nothing, or only such steps, come right before the first that needs them. Steps whose results none
    of the others needs come as soon as they can, with what is made for them alone: they encode what is saved, or end
    with the gradient of a weight.
    `sources` are for each step those before it that it needs.
    """
    steps = range(len(sources))
    users: list[list[int]] = [[] for _ in steps]
    for step in steps:
        for source in sources[step]:
            users[source].append(step)
    free = [not each for each in sources]
    moved = [bool(users[step]) and all(free[source] for source in sources[step]) for step in steps]
    last = [not users[step] for step in steps]
    for _ in range(BEFORE_LAST):
        last = [all(last[user] for user in users[step]) for step in steps]
    order: list[int] = []
    done: set[int] = set()

    def run(step: int) -> None:
        pending = [step]
        while pending:
            step = pending.pop()
            if step in done:
                continue
            missing = [source for source in sources[step] if source not in done]
            if missing:
                pending += [step, *reversed(missing)]
                continue
            done.add(step)
            order.append(step)
            ready = (user for user in users[step] if last[user] and not moved[user])
            pending += [user for user in ready if all(moved[each] or each in done for each in sources[user])]

    for step in steps:
        if not moved[step]:
            run(step)
    return order
