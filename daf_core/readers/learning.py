"""Learns who reads what is saved: at once where a node saves its result, else from the graph that is built on it.

A pack hook is not told which operator saves. The autograd node that does has a number, and it is found where the
operator returns its result, or where another tensor is saved whose graph leads to it. Until then the values wait beside
what they were stored as, so that they can be stored as their reader needs them. From the next forward pass on the place
is known.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import FrameType

import torch
from torch import Tensor, nn

from daf_core.autograd.sites import ModuleCall, Site
from daf_core.autograd.torch_compile import has_compiled_parts
from daf_core.autograd.torch_private import (
    Node,
    field_of,
    fields_of,
    is_being_saved,
    is_leaf_node,
    node_number,
    packed_for,
)
from daf_core.errors import ActivationBudgetError
from daf_core.readers.losses import weighed_errors
from daf_core.readers.patterns import has_pole, is_done, is_large, led_by, narrow_products, nodes_since, poles
from daf_core.readers.places import Place, Places, more_exact, reading_of_frame
from daf_core.readers.sharpness import (
    Looks,
    of_argument,
    of_new_values,
    of_result,
    score_deviation,
    takes_same_bits,
    told_by,
)
from daf_core.readers.table import Kind, Reading, reading_of
from daf_core.readers.waiting import (
    EXACT_MODE,
    NEWEST,
    PATIENCE,
    WAITING_BYTES,
    Saved,
    Sighting,
    StoreAgain,
    ThreadState,
    Unpack,
    Waiting,
    saver_of,
)
from daf_core.readers.watch import Watch

MOST_PLACES = 1 << 16
"""Places that are remembered at most: a program that writes its own code anew has new ones in every pass."""

MOST_SMALL = 64
"""Saves within a call of a module of which small ones have the next pass watched: a loop may grow in each step."""

UNREAD_PASSES = 3
"""Forward passes after which a tensor that no backward has asked for stays exact, without being looked for."""

BARREN_PASSES = 3
"""Forward passes in a row that save nothing in few bits, as where all blocks are recomputed, after which passes are not
watched any more: a step of six checkpointed blocks of hidden size 64 takes 1.07 of plain's, with the watch 1.27."""


class Readers:
    """Knows what the operators of a model read of what they save.

    Where a part of the model is compiled nothing is watched: a graph would be compiled again without the watch.
    Nothing is known where nothing is `wanted`, as all is exact.
    """

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self.changes = 0  # how often something was learned: as long as it is the same, so is what is known
        self._model = model
        self._wanted = wanted
        self._doubts = False  # whether what is known is to be looked at again, in the next pass of any thread
        self._places = Places()
        self._readings: dict[Place, Reading] = {}
        self._unread: dict[Place, int] = {}
        self._small: set[Site] = set()
        self.looks = Looks()  # says when softmaxes are looked at again
        self._own = ThreadState()

    @property
    def learning(self) -> bool:
        """Whether the next forward pass of this thread will be watched."""
        barren = self._own.barren >= BARREN_PASSES
        return self._wanted and (self._own.unknown or self._doubts or (barren if self._readings else not barren))

    @contextmanager
    def watching(self, always: bool = False) -> Generator[None]:
        """Watches what runs in a forward pass inside, where there is something to learn or `always`."""
        own, unknown = self._own, self.learning or (self._wanted and always)
        if self._readings and own.barren >= BARREN_PASSES:  # the pass that has found them was not watched
            own.barren = 0
            self.look_again()
        if self._doubts:
            for place, reading in self._readings.items():
                if reading.kind is not Kind.EXACT:  # which serves all readers
                    self._set(place, replace(reading, varies=True))
        own.unknown = self._doubts = False
        watched = unknown and not has_compiled_parts(self._model)
        with Watch(self._show_result, self._cancelling) if watched else nullcontext():
            yield
        if watched and own.newest:  # without a gradient nothing is saved
            own.barren = 0 if self._readings else own.barren + 1

    def expect_others(self) -> None:
        """Begins to count `BARREN_PASSES` again: the next passes of this thread may save something else."""
        self._own.barren = 0

    def meet_small(self, site: Site) -> None:
        """Has this thread's next pass watched if a tensor is new that is too small for codes: a pole may read it."""
        if self._wanted and site.save < MOST_SMALL and site not in self._small:
            self._small.add(site)
            self._own.unknown = True

    def look_again(self) -> None:
        """Has the next forward pass look at each place as at one whose reader may be another; what is known stays."""
        self._doubts = True

    @contextmanager
    def _cancelling(self) -> Generator[None]:
        self._own.cancelling = True
        try:
            yield
        finally:
            self._own.cancelling = False

    def see(
        self, tensor: Tensor, call: ModuleCall, site: Site, frame: FrameType | None, unpack: Unpack,
        place: Place | None = None,
    ) -> Sighting:  # fmt: skip
        """Returns what is known of a tensor that is being saved.

        `frame` is the innermost Python function but for DAF's; `place` is where it is saved, if that has a name.
        """
        if (sighting := self.recall(tensor, call, site, frame, place)) is EXACT_MODE:
            return sighting
        (place, number, reading, _), node, self._own.unpack = sighting, tensor.grad_fn, unpack
        if place is None:
            return sighting
        if self._own.cancelling:
            return Sighting(place, number, self.learn(place, Reading(Kind.EXACT, "terms that cancel")), False)
        if reading is not None and reading.kind is not Kind.LOGARITHMS and not self.looks.are_due(place, reading):
            return sighting
        known = reading is not None and not reading.varies
        if reading is not None and (found := of_new_values(reading, tensor)) is not reading:
            reading = self.learn(place, found)
        if node is not None and not is_leaf_node(node) and node_number(node) == number:
            field = next((name for name in fields_of(node) if is_being_saved(node, name)), "")
            if field:
                reading = self.learn(place, of_result(reading_of(node, field), node, tensor, unpack))
                if has_pole(node, partial(is_large, node, unpack)):
                    self._lead(node, unpack)
        return Sighting(place, number, reading, not known)

    def recall(
        self, tensor: Tensor, call: ModuleCall, site: Site, frame: FrameType | None, place: Place | None = None
    ) -> Sighting:
        """As `see`, of what is known already: no value is looked at, and nothing is learned."""
        if not self._wanted:
            return EXACT_MODE
        number = saver_of(tensor, site.op)
        if (given := reading_of_frame(frame, self._model)) is not None:
            return Sighting(None, number, given, False)
        place = place or self._places.name(frame, call, site.op)
        reading = self._readings.get(place)
        return Sighting(place, number, reading, reading is None or reading.varies)

    @property
    def unresolved(self) -> Mapping[int, object]:
        """What waits in this thread's pass for its reader to be found, also in passes to come."""
        return self._own.unresolved

    def still_reads(self, place: Place, reading: Reading | None) -> bool:
        """Says whether nothing else was learned of a place since it was known for a reading."""
        return self._readings.get(place) is reading

    def show(self, node: Node) -> None:
        """Looks through a graph for nodes that have saved what waits."""
        own, unresolved = self._own, self._own.unresolved
        if not unresolved or node is None or own.showing:
            return
        own.showing = True
        try:
            self._look_through(node, unresolved)
        finally:
            own.showing = False

    def _show_result(self, result: Tensor) -> None:
        """Takes a result that one of torch's functions has returned."""
        # Without gradients no node is made, and torch refuses that of a view that is changed there.
        node = result.grad_fn if torch.is_grad_enabled() else None
        if node is None:
            return
        own, oldest = self._own, self._own.looked
        own.newest.append(weakref.ref(result))
        self._change_behind(nodes_since(node, oldest + 1))
        own.looked = max(oldest, node_number(node))
        self.show(node)  # lets go of values
        if (unpack := own.unpack) is not None:
            for pole in poles(node, oldest, unpack):
                self._lead(pole, unpack)

    def _change_behind(self, nodes: Iterable[Node]) -> None:
        """Learns what new nodes tell of those before them."""
        if (unpack := self._own.unpack) is not None:
            for node in nodes:
                for saver, field, reading in told_by(node, unpack):
                    self._change(saver, field, reading, unpack)
                for product in weighed_errors(node, unpack):
                    self._lead(product, unpack, itself=True)

    def _change(self, node: Node, field: str, reading: Reading, unpack: Unpack) -> None:
        """Learns what a node reads of a field, now that more of the graph is known, at once if the field waits."""
        if (packed := packed_for(node, field, unpack)) is None:
            return
        if (place := getattr(packed, "place", None)) is not None:
            self.learn(place, reading)
        for waiting in [*self._own.waiting]:
            if waiting.packed() is packed and (place := waiting.sighting.place) is not None:
                waiting.settle(self.learn(place, reading))

    def _look_through(self, node: Node, unresolved: dict[int, list[Waiting]]) -> None:
        for each in nodes_since(node, min(unresolved)):
            if (number := node_number(each)) > self._own.looked:  # in a pass that is not watched
                self._change_behind([each])
            if number in unresolved:
                self._resolve(each, unresolved.pop(number))
            if not unresolved:
                return

    def wait(
        self, saved: Saved, sighting: Sighting, packed: object, unpack: Unpack, again: StoreAgain, room: int
    ) -> None:
        """Has a tensor wait that was stored at a place that was not known."""
        own = self._own
        own.unknown |= sighting.reading is None or not sighting.reading.varies
        waiting = Waiting(saved, sighting, packed, unpack, again)
        own.waiting.append(waiting)
        if not waiting.resolved:
            own.unresolved.setdefault(sighting.number, []).append(waiting)
        while len(own.waiting) > NEWEST and own.waiting[0].resolved:
            own.waiting.popleft()
        while len(own.waiting) > PATIENCE:
            self._spare(own.waiting.popleft())
        self._make_room(min(room, WAITING_BYTES))

    def end_pass(self) -> None:
        """Ends a forward pass: what nothing that was saved leads to stays exact in this one."""
        own = self._own
        results = [result for reference in reversed(own.newest) if (result := reference()) is not None]
        if results and results[0].grad_fn is not None:
            self._sharpen_last(results[0].grad_fn)
        if len(self._readings) + len(self._small) > MOST_PLACES:
            self._places, self._readings, self._unread, self.looks = Places(), {}, {}, Looks()
            self._small.clear()
            self.changes += 1
        try:
            for waiting in [each for each in own.waiting if not each.resolved]:
                self._spare(waiting)
        finally:
            self.forget_pass()

    def forget_pass(self) -> None:
        """Lets go of what waits."""
        self._own.waiting.clear()
        self._own.unresolved.clear()
        self._own.newest.clear()
        self._own.unpack = None

    def read(self, packed: object, place: Place | None, node: Node, unpack: Unpack) -> Reading | None:
        """Takes that a node's backward asks for something; returns what it reads of it, None where that is not its own.

        Where it was saved at no `place`, nothing is learned.
        """
        field = field_of(node, packed, unpack)
        if field is None:
            return None
        large = partial(is_large, node, unpack)
        reading = reading_of(node, field, large)
        if place is not None:
            known = self._readings.get(place)
            if known is not None and known.kind is Kind.SIDES and known.bounds != reading.bounds:
                self._set(place, Reading(Kind.EXACT, reading.reader))  # no graph has shown that in the forward pass
            else:
                self.learn(place, reading)
            if has_pole(node, large):
                self._lead(node, unpack)
        return reading

    def _resolve(self, node: Node, found: list[Waiting]) -> None:
        unpack = found[0].unpack
        large = partial(is_large, node, unpack)
        fields = [field_of(node, packed, unpack) if (packed := each.packed()) is not None else None for each in found]
        values = {field: each.saved.tensor for field, each in zip(fields, found, strict=True) if each.saved is not None}
        deviation = score_deviation(node, values["query"], values["key"]) if {"query", "key"} <= values.keys() else 0.0
        for field, waiting in zip(fields, found, strict=True):
            reading = reading_of(node, field or "", large)
            if field in ("query", "key") and reading.kind is Kind.ATTENTION:
                reading = replace(reading, deviation=deviation)
            elif reading.kind is Kind.APPROXIMATE and field in values:
                reading = of_argument(reading, node, values[field])
            assert waiting.sighting.place is not None
            waiting.settle(self.learn(waiting.sighting.place, reading))
            if waiting.sighting.reading is not None or is_done(node, unpack):
                waiting.let_go()
        if has_pole(node, large):
            self._lead(node, unpack)

    def sharpen(self, place: Place, deviation: float) -> None:
        """Takes the deviation of the scores of an attention whose query or key is saved at a place."""
        known = self._readings.get(place)
        if known is not None and known.kind is Kind.ATTENTION and not takes_same_bits(known.deviation, deviation):
            self._set(place, replace(known, deviation=deviation))

    def _sharpen_last(self, newest: Node) -> None:
        """Has the inputs of the last layers of few results take more bits.

        The gradient of a loss by a classifier's logits sums to almost zero over the classes and the rows of a batch. So
        what the rows have in common cancels in the gradient of the weight, and the errors of the rows do not.
        """
        if (unpack := self._own.unpack) is None:
            return
        for node, field in narrow_products(newest, unpack):
            self._change(node, field, Reading(Kind.APPROXIMATE, node.name(), deviation=math.inf), unpack)

    def _set(self, place: Place, reading: Reading) -> None:
        if self._readings.get(place) != reading:  # the same object as long as nothing is learned: see `still_reads`
            self._readings[place] = reading
            self.changes += 1

    def learn(self, place: Place, reading: Reading) -> Reading:
        """Remembers what reads at a place; where that is not always the same, it is the most exact."""
        known = self._readings.get(place)
        self._set(place, reading if known is None else more_exact(known, reading))
        return self._readings[place]

    def _lead(self, node: Node, unpack: Unpack, itself: bool = False) -> None:
        """Keeps exact what the last operators before a node have saved, and the node `itself`.

        A softmax before a logarithm, say, gets a large gradient where its probabilities are small: these have to fit.
        """
        waiting = {id(each.packed()): each for each in self._own.waiting}
        for packed in led_by(node, unpack, itself):
            found, place = waiting.get(id(packed)), getattr(packed, "place", None)
            if found is not None and place is None:  # too small for codes this time
                place = found.sighting.place
            if place is not None:
                if (known := self._readings.get(place)) is not None and known.kind in (Kind.SIDES, Kind.SHAPE):
                    continue
                self._set(place, Reading(Kind.EXACT, node.name()))
            if found is not None:
                found.settle(None)

    def _spare(self, waiting: Waiting) -> None:
        """Has a tensor stay exact whose reader is not known, and what leads to it: it may have a pole."""
        node, unpack = None if waiting.saved is None else waiting.saved.node, waiting.unpack
        self._own.unresolved.pop(waiting.sighting.number, None)
        place = waiting.sighting.place
        if waiting.resolved or place is None or waiting.sighting.reading is not None:
            return
        self._unread[place] = self._unread.get(place, 0) + 1
        if self._unread[place] >= UNREAD_PASSES:
            self._set(place, self._readings.get(place, Reading(Kind.EXACT, "nothing")))
        others = {id(each.packed()): each for each in self._own.waiting}
        if node is not None:
            for packed in led_by(node, unpack, beginning=True):
                if (found := others.get(id(packed))) is not None and found.resolved:
                    found.settle(None)
        with suppress(ActivationBudgetError):  # its codes stay, and whoever reads them is looked at in backward
            waiting.settle(None)

    def _make_room(self, room: int) -> None:
        """Lets go of values whose reader is known, the oldest first.

        Those whose reader is not known are those of the operator that is running, which keeps them alive as well.
        """
        known = [each for each in self._own.waiting if each.resolved]
        total = sum(each.size for each in known)
        for waiting in known:
            if total <= room:
                return
            total -= waiting.size
            self._own.waiting.remove(waiting)
