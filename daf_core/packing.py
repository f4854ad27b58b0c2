"""The pair of saved-tensor hooks: packs what autograd saves, and unpacks it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from daf_core.background import BackgroundPacker
from daf_core.codecs import AttendedActivation, RawActivation, SignsActivation
from daf_core.codecs.slopes import GELU
from daf_core.derivation import Derivation
from daf_core.eligibility import Eligibility, Form
from daf_core.errors import ReaderError
from daf_core.exact_readers import ExactReaders
from daf_core.handle import Handle
from daf_core.in_flight import InFlight
from daf_core.itemized import ItemizingStore, Items
from daf_core.memory.devices import DevicePagers
from daf_core.readers.again import AttentionAgain
from daf_core.saved import note
from daf_core.sites import ModuleScopes
from daf_core.store import ActivationStore
from daf_core.telemetry import StepRecorder
from daf_core.torch_internals import in_backward, packed_for, run_as_written, running_node

Packed = Handle | RawActivation | InFlight

OF_ATTENTION = (
    "something other than its own backward asks for what a fused attention has saved of its results: they are not "
    "stored, but computed in backward from what its query, key and value decode to. Set precision to 'exact', which "
    "keeps them"
)


class _Own(threading.local):
    """The forward pass of this thread."""

    def __init__(self) -> None:
        self.background: BackgroundPacker | None = None


class Packer:
    """A pair of saved-tensor hooks.

    Args:
        eligibility: Tells activations from parameters.
        scopes: Knows which module is running.
        store: Stores activations.
        recorder: Counts what is done.
        readers: Knows where activations are saved that have to stay as they are.
    """

    def __init__(
        self,
        eligibility: Eligibility,
        scopes: ModuleScopes,
        store: ActivationStore,
        recorder: StepRecorder,
        readers: ExactReaders,
    ) -> None:
        self._readers = readers
        self._eligibility = eligibility
        self._scopes = scopes
        self._store: ActivationStore | ItemizingStore = store
        self._recorder = recorder
        self._own = _Own()
        self._attention = AttentionAgain()

    def pack_in_background(self, prepare: Callable[[], None], pagers: DevicePagers) -> None:
        """Has activations packed in the background until this thread's forward pass ends.

        Args:
            prepare: Is called first on the thread that packs.
            pagers: Where activations are stored.
        """
        store = partial(self._store.store, derivation=Derivation(self.unpack))
        self._own.background = BackgroundPacker(store, prepare, pagers)

    @contextmanager
    def itemized(self, pagers: DevicePagers) -> Generator[Items]:
        """Lists what is packed inside.

        Args:
            pagers: Where activations are stored.
        """
        store, items = self._store, Items(self.unpack)
        assert isinstance(store, ActivationStore)
        self._store = ItemizingStore(store, pagers, self._recorder, items)
        try:
            yield items
        finally:
            self._store = store

    def drain(self) -> None:
        """Returns when nothing of this thread is being packed in the background; errors are kept."""
        if self._own.background is not None:
            self._own.background.drain()

    def finish(self) -> None:
        """Returns when everything is packed.

        Raises:
            Exception: Packing in the background failed.
        """
        if self._own.background is not None:
            started = time.perf_counter()
            self._own.background.finish()
            self._recorder.pack_seconds += time.perf_counter() - started

    def end_pass(self) -> None:
        """Ends a forward pass, also one that failed."""
        background, self._own.background = self._own.background, None
        if background is not None:
            background.close()
            self._recorder.worker_seconds += background.seconds
        self._store.finish_pass()

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor.

        Raises:
            ActivationBudgetError: It, or one before it, does not fit in the budget.
            SpillError: The next tier takes nothing more.
        """
        started = time.perf_counter()
        call = self._scopes.current
        form = self._eligibility.form(tensor, call.largest)
        # A backward inside the scope recomputes checkpointed blocks, whose activations are used at once.
        if form is Form.PARAMETER or in_backward():
            return RawActivation(tensor, None)
        site, background = call.next_site(tensor), self._own.background
        if self._readers.stays_exact(tensor, site) or call.kept:
            form = Form.RAW
        saved = note(tensor, form, site, self._scopes)
        if background is not None and background.admits(saved):
            packed = background.send(saved)
        else:
            packed = self._store.store(saved, Derivation(self.unpack))
        self._recorder.pack_seconds += time.perf_counter() - started
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Returns the tensor.

        Raises:
            ModifiedInPlaceError: It was changed, though it was kept as it was or packed in the background.
            SpillError: The next tier cannot be read.
            ReaderError: The derivative of GELU was kept of it, and something else asks for it.
        """
        self.drain()  # a backward inside the scope lets go of nodes that packing looks at
        return self._attention.unpack(packed, self.unpack, partial(self._decode, packed))

    def _decode(self, packed: Packed) -> Tensor:
        result = packed.result() if isinstance(packed, InFlight) else packed
        if result.gone if isinstance(result, RawActivation) else isinstance(result.stored, AttendedActivation):
            raise ReaderError(OF_ATTENTION)
        if isinstance(result, RawActivation):
            return result.unpack()
        if not (result.stored.whole or isinstance(result.stored, SignsActivation)):  # slopes, rectified or not
            self._check_reader(packed)
        started = time.perf_counter()
        tensor = result.unpack()
        self._recorder.unpack_seconds += time.perf_counter() - started
        return tensor

    def _check_reader(self, packed: Packed) -> None:
        """Lets only the backward of a GELU read codes of the derivative at its own input.

        Raises:
            ReaderError: It is something else, or the backward is to be differentiated in turn.
        """
        node = running_node()
        name = None if node is None else node.name()
        # Where a GELU is the first to ask for what a checkpoint recomputes, the checkpoint's input is read meanwhile.
        own = name == GELU and packed_for(node, "self", self.unpack) is packed
        if own and not torch.is_grad_enabled():
            return
        if own:
            reader = "a gradient of the gradient (create_graph=True)"
        elif name == GELU:
            reader = "what is recomputed for another GELU"
        else:
            reader = name or "something outside of backward"
        raise ReaderError(
            f"{reader} asks for the input of a GELU, of which only the derivative was kept: at the last calibration "
            "nothing but the GELU's own backward used it. Set precision to a number of bits (8, 4, 2 or 1), which "
            "keeps values"
        )


run_as_written(Packer.pack, Packer.unpack)
