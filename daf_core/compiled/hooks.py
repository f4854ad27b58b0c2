"""The pair of hooks that AOTAutograd inlines into the forward and backward graphs that it compiles."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.graph import PythonCode
from torch.utils import _pytree as pytree
from typing_extensions import override

from daf_core.autograd.torch_compile import graph_hook_context, is_looked_at, skip_dynamo
from daf_core.compiled import account
from daf_core.compiled.codes import Code, Like, Shape, is_dense
from daf_core.compiled.decide import Decision, Decisions, read_by
from daf_core.compiled.sizes import elements_of
from daf_core.compiled.support import digest
from daf_kernels.layout import PRECISIONS

Anew = Callable[[], fx.GraphModule]
"""Has torch trace a call of a hook."""


class _Tracing(threading.local):
    """What this thread compiles."""

    # The forward graph whose saved tensors are being packed, with its decisions.
    graphs: tuple[fx.Graph, _Pair] | None = None
    last: tuple[Code, Like] | None = None  # how the tensor that was packed last is unpacked


class _Pair:
    """A forward and a backward graph, while hooks are inlined into them."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, decisions: Decisions) -> None:
        self._decisions, self._backward = decisions, backward
        self._found: dict[str, tuple[Decision, Callable[[Tensor], Tensor] | None]] = {}
        self._saved = account.Saved()
        self._encoded: dict[tuple[Any, ...], Sequence[Tensor]] = {}
        self._traced: dict[tuple[Any, ...], fx.GraphModule] = {}
        read = {node.name for node in backward.find_nodes(op="placeholder")}
        self._names = [name for name in _saved_names(forward) if name in read]
        self._counts_at = _counting_place(self._names, decisions)
        self._counted: set[str] = set()

    def stored(self, name: str, values: Tensor) -> tuple[Tensor, Decision]:
        """Returns what is stored of a saved tensor, perhaps a function of it, and how."""
        if name not in self._found:
            decision = self._decisions.of(name)
            self._found[name] = decision, self._moved(decision)
        decision, function = self._found[name]
        return (values if function is None else function(values)), decision

    def stores_alike(self, name: str) -> Decision | None:
        """Returns how a saved tensor that `stored` was asked for is stored; None where others like it are not."""
        decision, function = self._found[name]
        return None if function is not None or name == self._counts_at or decision.code is None else decision

    def traced(self, kind: tuple[Any, ...], arguments: tuple[Any, ...], anew: Anew) -> fx.GraphModule:
        """Returns the graph of a hook's call, which is traced once for a kind of arguments: their sizes are the same.

        To trace one takes torch 20 to 200 ms, and a block saves a dozen tensors that its neighbours save as well.
        """
        if kind not in self._traced:
            self._traced[kind] = anew()
        else:
            _Renewed(self._traced[kind]).renew(arguments)
        return self._traced[kind]

    def encoded(self, code: Code, values: Tensor, shape: Shape) -> Sequence[Tensor]:
        """Returns what stores a tensor; where torch only looks at it, before it traces, the same for equal shapes."""
        if not is_looked_at(values):
            return code.encode(values, shape)
        kind = code, shape, *_like(values)
        if kind not in self._encoded:
            self._encoded[kind] = code.encode(values, shape)
        return self._encoded[kind]

    def count(self, name: str, raw: Tensor, decision: Decision, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """Counts a saved tensor; one of a graph brings the operator that counts them all at run time."""
        self._note(name, raw, decision, stored)
        if name != self._counts_at:
            return stored
        for other in [each for each in self._names if each not in self._counted]:  # those to come have no code
            values, kept = self._decisions.made[other].meta["val"], self._decisions.of(other)
            self._note(other, values, kept, () if kept.unread else (values,))
        sizes = account.symbols_in(raw)
        return *stored[:-1], torch.ops.daf.count(stored[-1], self._saved.text(sizes), sizes)

    def _note(self, name: str, raw: Tensor, decision: Decision, stored: Sequence[Tensor]) -> None:
        if name not in self._counted:
            self._counted.add(name)
            account.remember_hints(raw)
            self._saved.raw += account.bytes_of(raw)
            self._saved.held += sum(map(account.bytes_of, stored))
            self._saved.stored_as[_name_of(decision)] += 1

    def _moved(self, decision: Decision) -> Callable[[Tensor], Tensor] | None:
        """Takes operators out of the backward graph that are to run in the forward graph; None where there are none."""
        if not decision.instead:
            return None
        own, read = fx.Graph(), read_by(decision.instead)
        nodes = {read: own.placeholder("values")}
        for node in decision.instead:
            nodes[node] = own.node_copy(node, nodes.__getitem__)
        own.output(nodes[decision.instead[-1]])
        decision.instead[-1].replace_all_uses_with(read)
        for node in reversed(decision.instead):
            self._backward.erase_node(node)
        return fx.GraphModule(nn.Module(), own)


class _Renewed(fx.Interpreter):
    """Works out anew what a traced graph's nodes stand for: who shares memory is told from that.

    The graph is copied by whoever gets it, and may be used again.
    """

    @override
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if "val" in n.meta:
            n.meta["val"] = value
        return value

    def renew(self, arguments: tuple[Any, ...]) -> None:
        """Takes other arguments; whoever calls the graph with them gets what was worked out."""
        given = pytree.tree_leaves(arguments)
        mode = detect_fake_mode(given)
        assert mode is not None
        with mode:
            results = self.run(*given, enable_io_processing=False)
        self.module.forward = lambda *_: results


def _different(sizes: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the sizes that differ, and which of them each is: a hook that returns a symbol twice is no graph."""
    different = {str(size): size for size in sizes}
    places = list(different)
    return tuple(different.values()), tuple(places.index(str(size)) for size in sizes)


def _like(values: Tensor) -> tuple[Any, ...]:
    """Returns what tensors have in common of which the same graphs are traced."""
    return values.dtype, values.device, *map(str, (*values.shape, *values.stride()))


class GraphHooks:
    """A pair of hooks that stores what graphs save in codes, and gives everything else to another pair.

    Torch compares the two modules by identity: other bits need another pair, and have everything compiled again.

    Args:
        bits: Code bits of approximate values: 8, 4, 2 or 1.
        least: The fewest that they may have in a graph that does not fit in the budget otherwise.
        pack: Packs what is saved outside of graphs, where a function is running.
        unpack: Unpacks it.
        graphs: Knows the budget.
    """

    def __init__(
        self,
        bits: int,
        least: int,
        pack: Callable[[Tensor, FrameType], Any],
        unpack: Callable[[Any], Tensor],
        graphs: account.GraphAccount,
    ) -> None:
        levels = [level for level in reversed(PRECISIONS) if level == bits or least <= level < bits]
        # It does not refer to the hooks: there is no cycle, and the memory of a closed engine is free at once.
        self._calls = _Calls(levels, pack, unpack, graphs)
        name = f"{digest()}-{levels}-{graphs.room}"
        self.pack: fx.GraphModule = _Hook(self._calls.pack, self._calls.traced_pack, name, pack)
        self.unpack: fx.GraphModule = _Hook(self._calls.unpack, self._calls.traced_unpack, name, unpack)

    def forget_graphs(self) -> None:
        """Lets go of the graphs that were compiled last."""
        self._calls.tracing.graphs = self._calls.tracing.last = None


class _Calls:
    """What the two hooks do."""

    def __init__(
        self,
        levels: list[int],
        pack: Callable[[Tensor, FrameType], Any],
        unpack: Callable[[Any], Tensor],
        graphs: account.GraphAccount,
    ) -> None:
        self._levels, self._account = levels, graphs
        self._pack, self._unpack = pack, unpack
        self.tracing = _Tracing()

    def pack(self, tensor: Tensor) -> Any:
        context = graph_hook_context()
        if context is None:
            return self._pack(tensor, sys._getframe(2))  # pyright: ignore[reportPrivateUsage]  # beside __call__
        name = context["_node"].name
        pair = self._pair(context["_fw_graph"], context["_bw_graph"])
        values, decision = pair.stored(name, tensor)
        self.tracing.last, stored = None, () if decision.unread else (values,)
        if decision.code is not None:
            values = values if is_dense(values) else values.contiguous()
            like = Like(values.shape, values.dtype, decision.shape(values))
            stored = pair.encoded(decision.code, values, like.shape)
            self.tracing.last = decision.code, like
        return pair.count(name, tensor, decision, stored), *_different(values.shape)

    def unpack(self, packed: Any) -> Tensor:
        if graph_hook_context() is None:
            return self._unpack(packed)
        (stored, different, places), last = packed, self.tracing.last
        if last is None:
            return stored[0] if stored else torch.empty(0, device="cpu")
        code, like = last
        return code.decode(stored, Like([different[place] for place in places], like.dtype, like.shape))

    def traced_pack(self, arguments: tuple[Tensor], anew: Anew) -> fx.GraphModule:
        """Returns the graph of `pack`, which torch has just called with the same tensor."""
        context, [values] = graph_hook_context(), arguments
        assert context is not None
        pair = self._pair(context["_fw_graph"], context["_bw_graph"])
        decision = pair.stores_alike(context["_node"].name)
        return anew() if decision is None else pair.traced((decision, *_like(values)), arguments, anew)

    def traced_unpack(self, arguments: tuple[Any], anew: Anew) -> fx.GraphModule:
        """Returns the graph of `unpack`, of what `pack` has given last."""
        last, graphs, [(stored, *sizes)] = self.tracing.last, self.tracing.graphs, arguments
        if last is None or graphs is None:
            return anew()
        code, like = last
        kinds = [each for values in stored for each in _like(values)]
        return graphs[1].traced((code, like.dtype, like.shape, str(sizes), *kinds), arguments, anew)

    def _pair(self, forward: fx.Graph, backward: fx.Graph) -> _Pair:
        if self.tracing.graphs is None or self.tracing.graphs[0] is not forward:
            decisions = Decisions(forward, backward, self._levels[0])
            if (room := self._account.room) is not None:
                decisions.fit(_saved_names(forward), self._levels, room, self._account.ways)
            self.tracing.graphs = forward, _Pair(forward, backward, decisions)
        return self.tracing.graphs[1]


class _Hook(fx.GraphModule):
    """A graph module whose call is a function that runs while graphs are traced, and what else autograd saves.

    Its graph is what torch's cache of compiled graphs takes the hook for: an unknown function with a hash, which stands
    for what the hook does.

    Args:
        function: What a call does.
        traced: Returns the graph of a call, given its arguments and what traces it: see `graphs_made_with_hooks`.
        name: What changes with it.
        outside: What it gives everything to that no graph saves.

    Attributes:
        outside_of_graphs: That: who looks for what one of the engine's hooks has packed asks by the engine's hook.
    """

    _function: Callable[[Any], Any]
    daf_traced: Callable[[Any, Anew], fx.GraphModule]
    outside_of_graphs: Callable[..., Any]

    def __init__(
        self,
        function: Callable[[Any], Any],
        traced: Callable[[Any, Anew], fx.GraphModule],
        name: str,
        outside: Callable[..., Any],
    ) -> None:
        graph = fx.Graph()
        node = graph.call_function(_policy, (graph.placeholder("values"),))
        node.meta.update(is_wrapped=True, user_cache_hash=f"daf-{name}")
        graph.output(node)
        super().__init__(nn.Module(), graph)
        self.graph.owning_module = None  # it would keep the hook alive until Python collects, and the engine with it
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "daf_traced", traced)
        object.__setattr__(self, "outside_of_graphs", outside)

    @override
    def recompile(self) -> PythonCode:
        """Makes no function of the graph, which never runs.

        Torch's would take the place of `__call__`, and hide who is saving. Making it leaves frames that refer to the
        hook, and to each other, until Python collects.
        """
        code = self.graph.python_code(root_module="self")
        self._code = code.src
        return code

    def __call__(self, values: Any) -> Any:
        """Packs or unpacks."""
        return self._function(values)


skip_dynamo(_Hook.__call__)


def _counting_place(names: Sequence[str], decisions: Decisions) -> str | None:
    """Returns the saved tensor that the operator which counts copies a part of: the last code, or what is smallest."""
    coded = [name for name in names if decisions.of(name).code is not None]
    if coded:
        return coded[-1]
    return min(names, key=lambda name: elements_of(decisions.made[name].meta["val"]), default=None)


def _name_of(decision: Decision) -> str:
    if decision.unread:
        return "attended"
    return "raw" if decision.code is None else decision.code.name


def _saved_names(forward: fx.Graph) -> list[str]:
    """Returns the names of what a forward graph works out and gives on, its results among them."""
    given: Any = forward.output_node().args[0]
    nodes = [node for node in given if isinstance(node, fx.Node)]
    return [node.name for node in nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]


def _policy(values: Any) -> Any:
    """Stands in a hook's graph for what the hook does, and never runs."""
    return values
