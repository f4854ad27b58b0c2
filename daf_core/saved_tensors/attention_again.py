"""What the backward of an attention unpacks, where the attention runs again."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from daf_core.autograd.torch_private import Node, packed_for, running_node
from daf_core.codecs.without_values import AttendedActivation
from daf_core.readers.attention import INPUTS, KERNELS, Draws, Kernel, attend_again, draws_of, kernel_of
from daf_core.readers.places import Place
from daf_core.readers.sharpness import score_deviation
from daf_core.readers.waiting import Unpack
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.pending import packed_of

LOOKS = 17
"""Backward passes of an attention after which it is looked at again."""


class AttentionAgain(threading.local):
    """Gives the backward that this thread is running a result and a logsumexp of what it gets as query, key and value.

    Backward unpacks all that it needs in one go, inputs first. What this keeps of it goes with the last result.
    `learn` is told now and then how sharp an attention is, with the place of its query, or of its key.
    """

    def __init__(self, learn: Callable[[Place, float], None]) -> None:
        self._learn = learn
        self._passes: Counter[Place] = Counter()
        self._of: weakref.ref[Handle] | None = None
        self._held: dict[str, Tensor] = {}
        self._saving: tuple[Node, AttendedActivation] | None = None

    def saves(self, node: Node, stored: AttendedActivation, unpack: Unpack) -> None:
        """Is told, in a forward pass, what was stored for the result of an attention, which may save more yet."""
        self.end_forward(unpack)
        self._saving = node, stored

    def end_forward(self, unpack: Unpack) -> None:
        """Is told that the last attention has saved all: what it has drawn is copied while forward goes on."""
        before, self._saving = self._saving, None
        if before is not None:
            node, stored = before
            drawn = KERNELS[node.name()].drawn
            if drawn and packed_for(node, drawn[0], unpack) is not None:  # a backward inside the scope releases it
                stored.draws = draws_of(node)

    def forget_forward(self) -> None:
        """Ends a forward pass, also one that failed."""
        self._saving = None

    def unpack(self, packed: object, unpack: Unpack, decode: Callable[[], Tensor]) -> Tensor:
        """Returns the tensor that a packed one stands for; `decode` decodes what no attention computes again."""
        node = running_node()
        kernel = None if node is None else kernel_of(node.name())
        result = None if kernel is None else _result(node, unpack)
        if kernel is None or result is None:
            return decode()
        assert isinstance(result.stored, AttendedActivation)
        if self._of is None or self._of() is not result:
            self._of, self._held = weakref.ref(result), {}
        try:
            return self._give(node, kernel, packed, unpack, decode, result.stored.draws)
        except BaseException:
            self._held.clear()
            raise

    def _give(
        self, node: Node, kernel: Kernel, packed: object, unpack: Unpack, decode: Callable[[], Tensor],
        draws: Draws | None,
    ) -> Tensor:  # fmt: skip
        name = next((name for name in kernel.tensors if packed_for(node, name, unpack) is packed), "")
        if name not in kernel.results:
            tensor = decode()
            if name:  # decoded once, it is the same for backward and here, whatever a budget gives up meanwhile
                self._held[name] = tensor
            return tensor
        if name not in self._held:
            inputs = [self._input(node, unpack, each) for each in kernel.inputs]
            self._look(node, unpack, *inputs[:2])
            self._held |= attend_again(node, *inputs, draws=draws)
        result = self._held.pop(name)
        if not self._held.keys() & set(kernel.results):
            self._held.clear()
        return result

    def _look(self, node: Node, unpack: Unpack, query: Tensor | None, key: Tensor | None) -> None:
        """Measures how sharp an attention is, each time that it has run `LOOKS` times: that changes while it trains."""
        packed: list[Any] = [packed_for(node, name, unpack) for name in INPUTS[:2]]
        places = [place for each in packed if (place := getattr(each, "place", None)) is not None]
        if not places or query is None or key is None:
            return
        self._passes[places[0]] += 1
        if self._passes[places[0]] % LOOKS == 0:
            deviation = score_deviation(node, query, key)
            for place in places:
                self._learn(place, deviation)

    def _input(self, node: Node, unpack: Unpack, name: str) -> Tensor | None:
        """Returns what backward got as an input; None where the node has saved none of that name."""
        packed = packed_for(node, name, unpack)
        return self._held.get(name) if packed is None or name in self._held else unpack(packed)


def _result(node: Node, unpack: Unpack) -> Handle | None:
    """Returns what was stored for an attention's result; None where it does not run again."""
    result = packed_of(node, "output", unpack)
    return result if isinstance(result, Handle) and isinstance(result.stored, AttendedActivation) else None
