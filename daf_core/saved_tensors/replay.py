"""Replays what was decided for the tensors of earlier forward passes.

The tensors of step 1000 are those of step 3, but for their values. A pass walks down the tree of those before it: where
autograd saves what the tree expects, all that is left is to look at the values. Anything else takes the full way
(`Packer`), which decides everything that is replayed, and becomes a branch.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from torch import Tensor, nn

from daf_core.autograd.torch_private import in_backward, skip_dynamo
from daf_core.codecs import RawActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.saved_tensors.classify import LOW_PRECISION
from daf_core.saved_tensors.recording import Decision, Look, Recordings, Save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from daf_core.autograd.sites import ModuleFollower
    from daf_core.model.treatments import Treatments
    from daf_core.saved_tensors.hooks import Packed, Packer
    from daf_core.saved_tensors.store import ActivationStore


class Replays:
    """The pack hooks of a model, one for each thread; all of them replay what any of them has recorded.

    Args:
        packer: Takes the full way.
        follower: Knows which module is running, where that has to be known.
    """

    def __init__(self, packer: Packer, follower: ModuleFollower) -> None:
        self._arguments = packer, Recordings(), follower
        self._own = threading.local()

    @property
    def own(self) -> Replay:
        """That of this thread."""
        found = getattr(self._own, "replay", None)
        if found is None:
            found = self._own.replay = Replay(*self._arguments)
        return found


class Replay:
    """The pack hook of the forward passes of one thread.

    Args:
        packer: Takes the full way.
        recordings: The trees.
        follower: Knows which module is running, where that has to be known.
    """

    def __init__(self, packer: Packer, recordings: Recordings, follower: ModuleFollower) -> None:
        self._packer = packer
        self._recordings = recordings
        self._follower = follower
        self._readers = packer.readers
        self._store: ActivationStore | None = None
        self._waiting: Mapping[int, object] = {}
        self._at: Save | None = None
        self._replays = False
        self._taken: list[tuple[Save, int]] = []
        self._largest: dict[int, int] = {}

    def begin(self, treatments: Treatments | None) -> None:
        """Begins a pass with these treatments; None neither replays nor records it."""
        self.end()
        store = self._packer.replayed_by
        if treatments is None or store is None:
            self._follower.begin()
            return
        store.begin_replay(self._packer.eligibility.storages)
        root = self._recordings.root(treatments)
        self._at, self._store, self._replays = root, store, bool(root.following)
        self._waiting = self._readers.unresolved
        if self._replays:
            self._follower.rest()
        else:
            self._follower.begin()

    def end(self) -> None:
        """Ends a pass; may be called again."""
        self._at = None
        self._taken.clear()
        self._largest.clear()
        self._follower.end()

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor; see `Packer.pack` for the errors."""
        at, frame = self._at, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if at is None:
            return self._packer.pack_at(tensor, frame)
        # A backward inside the scope recomputes checkpointed blocks, whose activations are used at once.
        if in_backward():
            return RawActivation(tensor, None)
        if not self._replays:
            return self._record(at, tensor, frame)
        started = time.perf_counter()
        # Asking `isinstance` of a parameter's class runs Python code, and a tensor's type says it at once.
        parameter = type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter
        node = tensor.grad_fn
        for save in at.following:
            look = save.look
            if look is None:
                if parameter or self._packer.eligibility.form(tensor, 0) is TensorKind.PARAMETER:
                    self._at = save
                    return RawActivation(tensor, None)
            elif (
                not parameter
                and type(node) is save.made_by
                and tensor.dtype is save.dtype
                and save.small is (tensor.numel() < self._packer.eligibility.least_elements)
                and (save.op is None or (node is not None and node.name() == save.op))
                and save.is_at(frame)
            ):
                packed = self._replay(save, tensor, frame)
                if packed is None:
                    break
                elements, call = tensor.numel(), save.call
                if elements > self._largest.get(call, 0):
                    self._largest[call] = elements
                self._at = save
                self._taken.append((save, elements))
                self._packer.recorder.pack_seconds += time.perf_counter() - started
                return packed
        return self._leave(at, tensor, frame)

    def _replay(self, save: Save, tensor: Tensor, frame: FrameType) -> Packed | None:
        """Stores a tensor that the tree expects; None where it is something else after all."""
        decision, softmax, looks = save.decisions.get(tensor.shape), save.softmax, self._readers.looks
        packed = None
        if decision is not None and (softmax is None or not looks.will_be_due(*softmax)):
            packed = self._as_decided(decision, save, tensor)
        if packed is None:
            return self._look_again(save, tensor, frame)
        if softmax is not None:
            looks.count(*softmax)
        return packed

    def _as_decided(self, decision: Decision, save: Save, tensor: Tensor) -> Packed | None:
        """Stores a tensor as the last one was stored; None where that is not what the full way would do."""
        packer, readers, look, store = self._packer, self._readers, save.look, self._store
        assert look is not None
        assert store is not None
        if save.checked != readers.changes:
            place = look.sighting.place
            if place is not None and not readers.still_reads(place, look.reading):
                return None
            save.checked = readers.changes
        # A mask of one bit an element is what it is, whatever else it might have been.
        unsure = decision.kind is not BitmaskActivation and (decision.beside or tensor.dtype in LOW_PRECISION)
        if unsure and self._form(save, tensor) is not decision.form:
            return None
        if not self._waiting and (packed := store.store_directly(decision, look, tensor)) is not None:
            return packed
        if tensor.stride() != decision.geometry.strides or tensor.device != decision.device:
            return None
        if type(tensor) is not Tensor or tensor.is_neg() or tensor._is_zerotensor():
            return None
        if packer.eligibility.is_of_parameter(tensor):
            return None
        readers.show(tensor.grad_fn)
        return packer.store_as(decision, look, tensor)

    def _look_again(self, save: Save, tensor: Tensor, frame: FrameType) -> Packed | None:
        """Takes the full way at a known site; None where the tensor does not belong there."""
        packer, known = self._packer, save.look
        assert known is not None
        form = self._form(save, tensor)
        if form is TensorKind.PARAMETER or (form is TensorKind.LOSSY) is not (save.codes is not None):
            return None
        look = packer.look_at(tensor, form, known, frame)
        return self._take(save, tensor, look)

    def _take(self, save: Save, tensor: Tensor, look: Look) -> Packed:
        counts = self._packer.recorder.stored_as
        before = counts["shared"]
        packed = self._packer.store(tensor, look)
        save.learn(tensor, look, packed, counts["shared"] > before)
        return packed

    def _form(self, save: Save, tensor: Tensor) -> TensorKind:
        """Returns the form that a tensor may take, as the full way finds it."""
        form = self._packer.eligibility.form(tensor, self._largest.get(save.call, 0))
        return TensorKind.RAW if save.kept and form is not TensorKind.PARAMETER else form

    def _leave(self, at: Save, tensor: Tensor, frame: FrameType) -> Packed:
        """Goes the full way from now on, and records a branch."""
        self._replays = False
        self._follower.begin()
        self._packer.scopes.catch_up(self._follower.followed)
        for call, (number, name) in zip(self._packer.scopes.calls, at.calls, strict=False):
            if call.name != name:
                break
            for save, elements in self._taken:
                if save.call == number and save.look is not None:
                    call.count(elements)
                    if (place := save.look.sighting.place) is not None:
                        call.saved_at[place.codes, place.instructions] = place.save
        return self._record(at, tensor, frame)

    def _record(self, at: Save, tensor: Tensor, frame: FrameType) -> Packed:
        packer = self._packer
        started = time.perf_counter()
        look = packer.look(tensor, frame)
        calls = packer.scopes.calls
        if look is None:
            self._at = self._recordings.add(at, Save(calls))
            return RawActivation(tensor, None)
        save = Save(calls, tensor, look, tensor.numel() < packer.eligibility.least_elements, frame)
        unknown = look.sighting.fresh and look.reading is None  # the next pass is watched, and begins here again
        self._at = None if unknown else self._recordings.add(at, save)
        packed = self._take(save, tensor, look)
        packer.recorder.pack_seconds += time.perf_counter() - started
        return packed


skip_dynamo(Replay.pack)
