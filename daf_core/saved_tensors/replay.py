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

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_compile import has_compiled_anything, skip_dynamo
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.readers.attention import KERNELS
from daf_core.readers.places import DROPOUT, input_of, is_written_late
from daf_core.saved_tensors.recording import Decision, Look, Recordings, Save, made_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from daf_core.autograd.sites import ModuleFollower
    from daf_core.model.treatments import Treatments
    from daf_core.saved_tensors.hooks import Packed, Packer
    from daf_core.saved_tensors.store import ActivationStore


class Replays:
    """The pack hooks of a model, one for each thread; all of them replay what any of them has recorded."""

    def __init__(self, packer: Packer, follower: ModuleFollower) -> None:
        self.follower = follower
        self._arguments = packer, Recordings(), follower
        self._own = threading.local()

    @property
    def own(self) -> Replay:
        """That of this thread."""
        found = getattr(self._own, "replay", None)
        if found is None:
            found = self._own.replay = Replay(*self._arguments)
        return found

    def pack_at(self, tensor: Tensor, frame: FrameType) -> Packed:
        """As `Replay.pack` of this thread, which the function of `frame` has called."""
        return self.own.pack_at(tensor, frame)


class Replay:
    """The pack hook of the forward passes of one thread.

    Attributes:
        in_scope: Whether the thread is inside `ActivationEngine.compress`.
    """

    in_scope = False

    def __init__(self, packer: Packer, recordings: Recordings, follower: ModuleFollower) -> None:
        self._packer = packer
        self._recordings = recordings
        self._follower = follower
        self._readers = packer.readers
        self._store: ActivationStore  # of a pass that is replayed or recorded
        self._waiting: Mapping[int, object] = {}
        self._at: Save | None = None
        self._replays = False
        self._epoch = 0  # of the store
        self._taken: list[Save] = []
        self._largest: dict[int, int] = {}  # elements of the largest of them, by the call that saved it
        self._begun: list[str] = []  # the modules that have begun since the last of them, of those that stay

    def begin(self, treatments: Treatments | None) -> None:
        """Begins a pass with these treatments; None neither replays nor records it."""
        self.end()
        store = self._packer.replayed_by
        if treatments is None or store is None:
            self._follower.begin()
            return
        store.begin_replay(self._packer.eligibility.storages)
        root = self._recordings.root(treatments, (self._packer.eligibility.shapes, len(self._follower.staying)))
        self._at, self._store, self._replays, self._epoch = root, store, bool(root.following), store.epoch
        self._begun = self._packer.scopes.begun
        # In exact mode all is stored alike, but for what some modules keep as it is.
        self._asks_modules = bool(treatments.kept) or not store.is_exact
        self._waiting = self._readers.unresolved
        # Torch.compile guards on the hooks of modules: to switch them has everything compiled again.
        if self._replays and not has_compiled_anything():
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
        return self.pack_at(tensor, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def pack_at(self, tensor: Tensor, frame: FrameType) -> Packed:
        """As `pack`, which the function of `frame` has called."""
        at = self._at
        if at is None or not self._replays or self._packer.scopes.in_backward:
            return self._pack_anew(at, tensor, frame)
        # Asking `isinstance` of a parameter's class runs Python code, and a tensor's type says it at once. Nested
        # tensors of the older layout have no shape.
        begun = self._begun
        if type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter or tensor.is_nested:
            for save in at.following:
                if save.look is None and save.begun == begun:
                    return self._pass(save, tensor)
            return self._leave(at, tensor, frame)
        started = time.perf_counter()
        node, shape = tensor.grad_fn, tensor.shape
        for save in at.following:
            if (look := save.look) is None:
                if save.begun == begun and self._packer.eligibility.form(tensor, 0) is TensorKind.PARAMETER:
                    return self._pass(save, tensor)
            elif (
                type(node) is save.made_by
                and tensor.dtype is save.dtype
                and save.begun == begun
                and (save.op is None or (node is not None and node.name() == save.op))
                and save.is_at(frame, self._follower.followed)
                and (save.late is None or save.late is is_written_late(tensor, frame))
            ):
                if frame.f_code is DROPOUT:
                    self._packer.scopes.drops(input_of(DROPOUT, frame))
                decision, packed = save.decisions.get(shape), None
                if decision is None:
                    if save.small is not (tensor.numel() < self._packer.eligibility.least_elements):
                        continue
                    decision = self._decide_alike(save, look, tensor)
                if decision is not None:
                    packed = self._as_decided(decision, save, look, tensor, frame)
                if packed is None and (packed := self._look_again(save, look, tensor, frame)) is None:
                    break
                self._at = save
                begun.clear()
                self._taken.append(save)
                elements = tensor.numel()
                if elements > self._largest.get(save.call, 0):
                    self._largest[save.call] = elements
                self._packer.recorder.pack_seconds += time.perf_counter() - started
                return packed
        return self._leave(at, tensor, frame)

    def _pass(self, save: Save, parameter: Tensor) -> Packed:
        self._at = save
        self._begun.clear()
        return RawActivation(parameter, None)

    def _pack_anew(self, at: Save | None, tensor: Tensor, frame: FrameType) -> Packed:
        """Packs a tensor of a pass that is not replayed, or of a backward."""
        if at is None:
            return self._packer.pack_at(tensor, frame)
        return RawActivation(tensor, None) if self._packer.scopes.in_backward else self._record(at, tensor, frame)

    def _decide_alike(self, save: Save, look: Look, tensor: Tensor) -> Decision | None:
        """Decides for a shape that is new at a save what was decided for others; None where its form is another."""
        latest = next(reversed(save.decisions.values()), None)
        # What a fresh sighting says of its reader, it says of that tensor alone. What a fused attention saves of its
        # result depends on whether its query and key are large enough for codes.
        if latest is None or not look.sighting.is_expected or look.site.op in KERNELS:
            return None
        if self._form(save, tensor) is not look.form or not self._is_grouped_alike(save, look, latest, tensor):
            return None
        decision = self._store.decide_alike(latest, look, tensor)
        if decision is not None:
            save.keep(tensor.shape, decision)
        return decision

    def _is_grouped_alike(self, save: Save, look: Look, decision: Decision, tensor: Tensor) -> bool:
        """Says whether decisions at a save hold, as far as rows share something; otherwise forgets them."""
        if save.epoch == self._epoch or decision.groups is None:
            return True
        save.epoch = self._epoch
        return save.regroup(self._store.shares_rows(decision.groups, look, tensor))

    def _as_decided(
        self, decision: Decision, save: Save, look: Look, tensor: Tensor, frame: FrameType
    ) -> Packed | None:
        """Stores a tensor as the last one was stored; None where that is not what the full way would do."""
        packer, readers, changing = self._packer, self._readers, save.changing
        if self._waiting:  # what the graph shows may be a pole, and change what is known here
            readers.show(tensor.grad_fn)
        if save.checked != readers.changes:
            place = look.sighting.place
            if place is not None and not readers.still_reads(place, look.reading):
                return None
            save.checked = readers.changes
        if changing is not None and readers.looks.will_be_due(*changing):
            return None
        # A mask of one bit an element is what it is, whatever else it might have been.
        beside = not save.small and (decision.beside or not tensor.requires_grad or tensor.output_nr > 0)
        unsure = decision.kind is not BitmaskActivation and (beside or packer.eligibility.may_be_cast(tensor))
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or (unsure and self._form(save, tensor) is not decision.form):
            return None
        if not self._is_grouped_alike(save, look, decision, tensor):
            return None
        if decision.behind and made_of(tensor) != decision.behind:
            return None
        packed = None
        if decision.direct is not None and not self._waiting:
            packed = decision.direct.store(self._store.shelf, decision, look, tensor, frame, packer.derive)
        if packed is None:
            if tensor.stride() != decision.geometry.strides or tensor.device != decision.device:
                return None
            if tensor.is_neg() or tensor._is_zerotensor() or packer.eligibility.is_of_parameter(tensor):
                return None
            packed = packer.store_as(decision, look, tensor, frame)
        if packed is not None and changing is not None:
            readers.looks.count(*changing)
        if packed is not None and look.sighting.fresh and look.takes is TensorKind.LOSSY:
            packer.wait_for_reader(look, tensor, packed)
        return packed

    def _look_again(self, save: Save, known: Look, tensor: Tensor, frame: FrameType) -> Packed | None:
        """Takes the full way at a known site; None where the tensor does not belong there."""
        packer, form = self._packer, self._form(save, tensor)
        if form is TensorKind.PARAMETER or (form is TensorKind.LOSSY) is not (save.codes is not None):
            return None
        look = packer.look_at(tensor, form, known, frame)
        return self._take(save, tensor, look, frame)

    def _take(self, save: Save, tensor: Tensor, look: Look, frame: FrameType) -> Packed:
        counts = self._packer.recorder.stored_as
        before = counts["shared"]
        packed = self._packer.store(tensor, look, frame)
        known = save.decisions.get(tensor.shape)
        save.learn(tensor, look, packed, counts["shared"] > before)
        if not save.had_codes and packed.stored.lossy:
            save.had_codes = True
            if known is not None and known.kind is BitmaskActivation:
                # What was a mask may weigh what codes spoil now, as a teacher's probabilities do after hard targets.
                self._readers.look_again()
        return packed

    def _form(self, save: Save, tensor: Tensor) -> TensorKind:
        """Returns the form that a tensor may take, as the full way finds it."""
        form = self._packer.eligibility.form(tensor, self._largest.get(save.call, 0))
        return TensorKind.RAW if save.kept and form is not TensorKind.PARAMETER else form

    def _leave(self, at: Save, tensor: Tensor, frame: FrameType) -> Packed:
        """Goes the full way from now on, and records a branch.

        Where a module that is running may have begun anew since the last save, nobody can say whose save this is: the
        next time it can.
        """
        self._replays = False
        self._packer.scopes.catch_up(self._follower.followed, self._follower.begin())
        begun, running = set(self._begun), []
        for depth, (call, (number, name)) in enumerate(zip(self._packer.scopes.calls, at.calls, strict=False)):
            if call.name != name or (depth and name in begun):  # the outermost is the pass itself
                break
            running.append(name)
            call.number = number  # the branch goes on in the calls of the saves above it
            for save in self._taken:
                if save.call == number and save.look is not None:
                    call.count(self._largest.get(number, 0))
                    if (place := save.look.sighting.place) is not None:
                        call.saved_at[place.codes, place.instructions] = place.save
        if self._follower.stay(running):
            self._at = None
            return self._packer.pack_at(tensor, frame)
        return self._record(at, tensor, frame)

    def _record(self, at: Save, tensor: Tensor, frame: FrameType) -> Packed:
        packer = self._packer
        started = time.perf_counter()
        look = packer.look(tensor, frame)
        calls, begun = packer.scopes.calls, self._begun
        if look is None:
            self._at = self._recordings.add(at, Save(calls, begun=begun))
            begun.clear()
            self._follow_repeated(at)
            return RawActivation(tensor, None)
        small = tensor.numel() < packer.eligibility.least_elements
        save = Save(calls, tensor, look, small, frame, self._follower.followed if self._asks_modules else None, begun)
        begun.clear()
        self._follow_repeated(at)
        unknown = look.sighting.fresh and look.reading is None  # the next pass is watched, and begins here again
        self._at = None if unknown else self._recordings.add(at, save)
        packed = self._take(save, tensor, look, frame)
        packer.recorder.pack_seconds += time.perf_counter() - started
        return packed

    def _follow_repeated(self, at: Save) -> None:
        """Follows a module in each pass that has begun anew right after a save of its own: nothing else would tell."""
        for call, (number, name) in zip(self._packer.scopes.calls, at.calls, strict=False):
            if call.name != name:
                break
            if call.number != number:
                self._follower.stay([name])
                break


skip_dynamo(Replay.pack)
