"""The pair of saved-tensor hooks: packs what autograd saves, and unpacks it again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from logging import getLogger
from types import FrameType

import torch
from torch import Tensor

from daf_core.autograd.sites import ModuleScopes
from daf_core.autograd.torch_compile import skip_dynamo
from daf_core.autograd.torch_private import Node, is_transforming, running_node
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.gelu_derivative import GELU, GeluDerivativeActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.saved_tensor import SavedTensor, capture, capture_alone, find_argument
from daf_core.codecs.without_values import AttendedActivation
from daf_core.errors import ReaderError
from daf_core.memory.devices import DevicePagers
from daf_core.readers.attention import KERNELS
from daf_core.readers.learning import Readers
from daf_core.readers.places import DROPOUT, input_of, is_written_late
from daf_core.readers.table import Kind, Reading
from daf_core.readers.waiting import EXACT_MODE, Sighting, saver_of
from daf_core.readers.watch import nodes_of
from daf_core.saved_tensors.attention_again import AttentionAgain
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.classify import Eligibility, TensorKind, is_plain
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.itemize import ItemizingStore, Items
from daf_core.saved_tensors.pending import PendingActivation, packed_now
from daf_core.saved_tensors.recording import Decision, Look
from daf_core.saved_tensors.store import ActivationStore, LossyStore
from daf_core.telemetry import StepRecorder

Packed = Handle | RawActivation | PendingActivation

OF_ATTENTION = (
    "something other than its own backward asks for what a fused attention has saved of its results: they are not "
    "stored, but computed in backward from what its query, key and value decode to. Set precision to 'exact', which "
    "keeps them"
)

OF_GRADIENTS = "a gradient is taken with create_graph=True, as for forces, penalties or residuals of equations"
FROM_NOW_ON = "In this step it is that of values in few bits; from the next one on what it reads is kept as it is"
IN_A_BUDGET = "It is that of values in few bits: without memory_budget what it reads would be kept as it is"

log = getLogger("daf")


class _Own(threading.local):
    """The forward pass of this thread."""

    background: BackgroundPacker | None = None


class Packer:
    """A pair of saved-tensor hooks."""

    def __init__(
        self,
        eligibility: Eligibility,
        scopes: ModuleScopes,
        store: ActivationStore,
        recorder: StepRecorder,
        readers: Readers,
    ) -> None:
        self.readers = readers
        self.eligibility = eligibility
        self.scopes = scopes
        self._store: ActivationStore | ItemizingStore = store
        self.common_rows = store.common_rows  # what was measured of rows
        self.recorder = recorder
        self._own = _Own()
        self._attention = AttentionAgain(readers.sharpen)
        self._differentiates = False  # whether a gradient was taken to be differentiated itself

    @property
    def replayed_by(self) -> ActivationStore | None:
        """What stores activations where a pass may be replayed; None where what is stored is looked at."""
        return self._store if isinstance(self._store, ActivationStore) else None

    def beside(self, pagers: DevicePagers, lossy: LossyStore) -> Packer:
        """Returns a pair of hooks for other memory; see `ActivationStore.beside`."""
        assert isinstance(self._store, ActivationStore)
        store = self._store.beside(pagers, lossy)
        return Packer(self.eligibility, self.scopes, store, self.recorder, self.readers)

    def pack_in_background(self, prepare: Callable[[], None], pagers: DevicePagers) -> None:
        """Has activations packed in the background until this thread's forward pass ends.

        The thread that packs calls `prepare` first.
        """
        store = partial(self._store.store, derivation=Derivation(self.unpack))
        self._own.background = BackgroundPacker(store, prepare, pagers)

    @contextmanager
    def itemized(self, pagers: DevicePagers) -> Generator[Items]:
        """Lists what is packed inside."""
        store, items = self._store, Items(self.unpack)
        assert isinstance(store, ActivationStore)
        self._store = ItemizingStore(store, pagers, self.recorder, items)
        try:
            yield items
        finally:
            self._store = store

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Takes what a forward pass is given; see `StorageTable.lend`."""
        if (store := self.replayed_by) is not None and not is_transforming():  # a mapped batch has no storage
            store.shelf.sharing.lend(tensors)

    def show(self, result: object) -> None:
        """Takes what a forward pass gives: its graph shows who reads what was saved last."""
        for node in nodes_of(result) if self.readers.unresolved else ():
            self.readers.show(node)

    def pass_by(self, tensor: Tensor) -> None:
        """Counts a tensor that a block does not save, as it is recomputed."""
        store = self.replayed_by
        if store is None or self.scopes.in_backward or not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        if not store.shelf.knows(storage) and self.eligibility.form(tensor, 0) is not TensorKind.PARAMETER:
            store.shelf.pass_by(storage)

    def drain(self) -> None:
        """Returns when nothing of this thread is being packed in the background; errors are kept."""
        if self._own.background is not None:
            self._own.background.drain()

    def finish(self) -> None:
        """Returns when everything is packed.

        Raises:
            ActivationBudgetError: What stays as it is, since nobody is known to read it, does not fit in the budget.
            Exception: Packing in the background failed.
        """
        self.readers.end_pass()
        self._attention.end_forward(self.unpack)
        if self._own.background is not None:
            started = time.perf_counter()
            self._own.background.finish()
            self.recorder.pack_seconds += time.perf_counter() - started

    def end_pass(self) -> None:
        """Ends a forward pass, also one that failed; a second call completes the first if an interrupt cut it off."""
        self.readers.forget_pass()
        self._attention.forget_forward()
        if (background := self._own.background) is not None:
            background.close()
            self.recorder.worker_seconds += background.seconds
            self._own.background = None
        self._store.finish_pass()

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor.

        Raises:
            ActivationBudgetError: It, or one before it, does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        return self.pack_at(tensor, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def pack_at(self, tensor: Tensor, frame: FrameType | None) -> Packed:
        """As `pack`, which the function of `frame` has called."""
        started = time.perf_counter()
        look = self.look(tensor, frame)
        if look is None:
            return RawActivation(tensor, None)
        packed = self.store(tensor, look, frame)
        self.recorder.pack_seconds += time.perf_counter() - started
        return packed

    def look(self, tensor: Tensor, frame: FrameType | None, recalls: bool = False) -> Look | None:
        """Returns where and how a tensor is being saved, where `frame` is running; None where it is not counted.

        With `recalls` nothing is learned of its reader.
        """
        call = self.scopes.current
        form = self.eligibility.form(tensor, call.largest)
        if form is TensorKind.PARAMETER or self.scopes.in_backward:
            return None
        if (argument := input_of(DROPOUT, frame)) is not None:
            self.scopes.drops(argument)
        self.readers.show(tensor.grad_fn)
        kept = call.kept or is_written_late(tensor, frame)
        site, form = call.next_site(tensor), TensorKind.RAW if kept else form
        sighting = EXACT_MODE
        if form is TensorKind.LOSSY and recalls:
            sighting = self.readers.recall(tensor, call, site, frame)
        elif form is TensorKind.LOSSY:
            sighting = self.readers.see(tensor, call, site, frame, self.unpack)
        elif tensor.grad_fn is not None and not recalls:
            self.readers.meet_small(site)
        return Look(form, site, sighting, call.normalizes, kept)

    def look_at(self, tensor: Tensor, form: TensorKind, known: Look, frame: FrameType | None) -> Look:
        """Returns where and how a tensor is being saved whose form is known, at a site that was looked at before."""
        self.readers.show(tensor.grad_fn)
        sighting = EXACT_MODE
        if form is TensorKind.LOSSY:
            call, place = self.scopes.current, known.sighting.place
            sighting = self.readers.see(tensor, call, known.site, frame, self.unpack, place)
        return Look(form, known.site, sighting, known.normalizes, known.kept)

    def store_as(self, decision: Decision, look: Look, tensor: Tensor, frame: FrameType) -> Packed | None:
        """Stores a tensor that `frame` saves as another one was stored; None where its values do not allow that."""
        store = self._store
        assert isinstance(store, ActivationStore)
        packed = store.store_as(decision, look, tensor, frame, self.derive)
        self._note_attention(tensor.grad_fn, packed)
        return packed

    def derive(self, look: Look, tensor: Tensor, frame: FrameType) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored, as `frame` saves it; None otherwise."""
        assert isinstance(self._store, ActivationStore)
        saved = capture_alone(tensor, look.takes, look.site, look.sighting, look.reads_rows, self.scopes, frame)
        derivation = Derivation(self.unpack)
        recipe = self._store.derive(saved, derivation)
        if recipe is None and find_argument(saved, tensor, self.scopes, frame):
            recipe = self._store.derive(saved, derivation)
        return recipe

    def store(self, tensor: Tensor, look: Look, frame: FrameType | None) -> Packed:
        """Stores a tensor that was looked at, where `frame` is running.

        Raises:
            ActivationBudgetError: It, or one before it, does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        background, form, sighting = self._own.background, look.takes, look.sighting
        if background is None and look.form is TensorKind.RAW:  # whoever reads it
            return self._store.keep(tensor, look.site)
        saved = capture(tensor, form, look.site, sighting, look.reads_rows, self.scopes, frame)
        waiting = replace(saved, argument=None) if sighting.fresh and form is TensorKind.LOSSY else None
        if background is not None and background.admits(saved):
            packed = background.send(saved)
        else:
            packed = self._store.store(saved, Derivation(self.unpack))
        self._note_attention(saved.node, packed)
        if waiting is not None:
            self._wait(waiting, sighting, packed)
        return packed

    def _note_attention(self, node: Node | None, packed: Packed | None) -> None:
        if node is not None and type(packed) is Handle and type(packed.stored) is AttendedActivation:
            self._attention.saves(node, packed.stored, self.unpack)

    def wait_for_reader(self, look: Look, tensor: Tensor, packed: Packed) -> None:
        """Keeps the values of a tensor that was stored as another one until its reader is seen to read the same."""
        sighting = look.sighting._replace(number=saver_of(tensor, look.site.op))
        saved = capture(tensor, look.takes, look.site, sighting, look.reads_rows, self.scopes)
        self._wait(saved, sighting, packed)

    def keep_after_all(self, tensor: Tensor, look: Look, packed: Packed) -> None:
        """Keeps a tensor as it is that was stored."""
        self._store_again(capture(tensor, look.takes, look.site, look.sighting, False, self.scopes), packed, None)

    def _wait(self, saved: SavedTensor, sighting: Sighting, packed: Packed) -> None:
        """Keeps the values of a tensor until it is known who reads them."""
        room = self._store.room(saved.tensor.device)
        self.readers.wait(saved, sighting, packed, self.unpack, self._store_again, room)

    def _store_again(self, saved: SavedTensor, packed: Packed, reading: Reading | None) -> None:
        """Stores a tensor as its reader needs it; None keeps it as it is."""
        as_it_is = reading is not None and reading.takes_any_codes
        if not as_it_is:
            self.drain()
        handle = packed_now(packed)
        if not isinstance(handle, Handle):
            return
        handle.reading = reading
        if not as_it_is:
            self._store.store_again(saved, handle, reading)

    def unpack(self, packed: Packed) -> Tensor:
        """Returns the tensor.

        Raises:
            ModifiedInPlaceError: It was changed, though it was kept as it was or packed in the background.
            SpillError: The next tier cannot be read.
            ReaderError: The derivative of GELU was kept of it, and something else asks for it.
        """
        self.recorder.unpacked = True
        if self._own.background is not None:
            self.drain()  # a backward inside the scope lets go of nodes that packing looks at
        if torch.is_grad_enabled():
            self._keep_exact(packed)
        # `isinstance` runs Python code for an abstract class, as that of all codecs is: 0.5 us a tensor each time.
        if type(packed) is RawActivation and not packed.values_gone:
            return packed.unpack()
        if type(packed) is Handle and (tensor := self._unpack_known(packed)) is not None:
            return tensor
        return self._attention.unpack(packed, self.unpack, partial(self._decode, packed))

    def _keep_exact(self, packed: Packed) -> None:
        """Has what a gradient is made of that is differentiated itself stay exact: it may be a part of a loss.

        A budget may have no room for that.
        """
        handle, node = packed_now(packed), running_node()
        if not isinstance(handle, Handle) or handle.place is None or not handle.stored.lossy or node is None:
            return
        limited = self._store.room(handle.device) < sys.maxsize
        if not self._differentiates:
            self._differentiates = True
            log.warning(f"{OF_GRADIENTS}. {IN_A_BUDGET if limited else FROM_NOW_ON}")
        if not limited:
            self.readers.learn(handle.place, Reading(Kind.EXACT, node.name()))

    def _unpack_known(self, handle: Handle) -> Tensor | None:
        """Returns the tensor, where whoever asks is known to take what was stored of it; None elsewhere."""
        node, stored, reading = running_node(), handle.stored, handle.reading
        name = None if node is None else node.name()
        if name in KERNELS or stored.values_gone:
            return None
        certain = stored.readable_by_any_op and reading is not None and reading.is_certain_for(name)
        if not certain and (stored.lossy or handle.place is not None):
            return None
        started = time.perf_counter()
        tensor = handle.unpack()
        self.recorder.unpack_seconds += time.perf_counter() - started
        return tensor

    def _decode(self, packed: Packed) -> Tensor:
        result = packed.result() if isinstance(packed, PendingActivation) else packed
        if result.stored.values_gone:
            raise ReaderError(OF_ATTENTION)
        if type(result) is RawActivation:
            return result.unpack()
        assert type(result) is Handle
        self._check_reader(packed, result)
        started = time.perf_counter()
        tensor = result.unpack()
        self.recorder.unpack_seconds += time.perf_counter() - started
        return tensor

    def _check_reader(self, packed: Packed, handle: Handle) -> None:
        """Lets only those read few bits, or less, who were known to take them, or are known now.

        Raises:
            ReaderError: Something else reads.
        """
        stored, reading = handle.stored, handle.reading
        if type(stored) is ReluSignsActivation or (not stored.lossy and handle.place is None):
            return
        node = running_node()
        name = None if node is None else node.name()
        if stored.readable_by_any_op and reading is not None and reading.is_certain_for(name):
            return
        if handle.place is None and reading is not None and reading.reader == name and stored.serves(reading):
            return  # a function of Python, which reads all that it saves in one way
        found = None
        if node is not None:
            found = self.readers.read(packed, handle.place, node, self.unpack)
        if found is not None and reading is not None and found.jumps and reading == replace(found, bounds=None):
            found = reading  # when it was stored a budget had no bits for sides
        # Where the first to ask for what a checkpoint recomputes is a node, the checkpoint's input is read meanwhile.
        if not (stored.readable_by_any_op if found is None else stored.serves(found)):
            self.readers.look_again()  # backward ends here, and others behind may read otherwise as well
            raise ReaderError(_refusal(stored, reading, name, own=found is not None))


def _refusal(stored: StoredActivation, reading: Reading | None, name: str | None, own: bool) -> str:
    """Returns the message for a node, if one asks, that gets no values; `own` says whether it has saved them."""
    if name is None:
        reader = "something outside of backward"
    elif not own:
        reader = "what is recomputed for another GELU" if name == GELU else f"what is recomputed for {name}"
    elif torch.is_grad_enabled() and name == GELU:
        reader = "a gradient of the gradient (create_graph=True)"
    else:
        reader = name
    if isinstance(stored, GeluDerivativeActivation | ReluOutputActivation):
        return (
            f"{reader} asks for the input of a GELU, of which only the derivative was kept: at the last calibration "
            "nothing but the GELU's own backward used it. Set precision to a number of bits (8, 4, 2 or 1), which "
            "keeps values"
        )
    known = "it was not known yet who reads it" if reading is None else f"{reading.reader} had read it until now"
    return (
        f"{reader} asks for the values of a tensor that was stored as {stored.name}, when {known}. From the next "
        "forward pass on it is kept as that needs it: run the step again, or set precision to 'exact'"
    )


skip_dynamo(Packer.pack, Packer.unpack)
