"""The engine: the only user of saved-tensor hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf_core.autograd import hook_stack
from daf_core.autograd.sites import ModuleFollower, ModuleScopes
from daf_core.autograd.torch_compile import has_no_values
from daf_core.autograd.torch_private import tensors_of
from daf_core.codecs.deferred_check import PendingChecks
from daf_core.compiled.executor import CompiledGraphs
from daf_core.config import DAFConfig, as_config, parse_size
from daf_core.memory.devices import DevicePagers
from daf_core.model.treatments import Treatments
from daf_core.precision.audit import PARTS, Auditor, restored
from daf_core.precision.policy import PrecisionPolicy
from daf_core.precision.probe import ProbePass
from daf_core.precision.site_stats import KindsOfPasses, SiteStatistics, Sizes
from daf_core.readers.learning import Readers
from daf_core.saved_tensors.backends import Backends
from daf_core.saved_tensors.background_choice import PackingChoice
from daf_core.saved_tensors.classify import Eligibility, check_trainable
from daf_core.saved_tensors.graph_capture import GraphCaptures
from daf_core.saved_tensors.hooks import Packer
from daf_core.saved_tensors.itemize import Items
from daf_core.saved_tensors.lossy import RandomStreams, RehearsalStore, TrainingStore
from daf_core.saved_tensors.replay import Replays
from daf_core.saved_tensors.store import ActivationStore, LossyStore
from daf_core.snapshots.attributes import LONGEST, Attributes
from daf_core.snapshots.measurement import Measurement
from daf_core.telemetry import GradientError, StepRecorder, StepStatistics
from daf_kernels import is_capturing

REHEARSED_ELEMENTS = REHEARSED_PAGE_BYTES = 128
"""A rehearsal encodes what a batch of 32 times as many rows would."""


class ActivationEngine:
    """Stores the activations of a model's forward passes in a few bits until backward needs them.

    Example:
        >>> engine = ActivationEngine(model, DAFConfig(precision=4))
        >>> with engine.compress():
        ...     loss = model(**batch).loss
        >>> loss.backward()
        >>> engine.finish_step().ratio

    Args:
        model: The model that is trained; its parameters and buffers are never compressed.
        config: How activations are stored; a mapping of the fields of `DAFConfig` will do.

    Raises:
        ConfigError: `model` is no module, or `config` no configuration, or the environment's `LOCAL_WORLD_SIZE` wrong.
        NothingToTrainError: No parameter requires a gradient.
        UnsupportedTorchError: Torch is older than 2.10.
        UnsupportedDeviceError: A part of the model is on device "meta".
        GraphCaptureError: A CUDA graph is being captured.
        SpillError: `spill_dir` takes no file.
    """

    def __init__(self, model: nn.Module, config: DAFConfig | Mapping[str, Any] | None = None) -> None:
        self.config = DAFConfig() if config is None else as_config(config)
        check_trainable(model)
        self._model, self.measurement = model, Measurement(model)
        self._backends = Backends(model, self.config)
        self._choice = PackingChoice(self.config, self._backends)
        self._pagers = DevicePagers(self.config, links=self._backends.links)
        self._eligibility, self._scopes = Eligibility(model), ModuleScopes()
        lossy = self.config.precision != "exact"
        self._readers, self._follower = Readers(model, wanted=lossy), ModuleFollower(model, self._scopes, lossy)
        self._recorder = StepRecorder()
        self._policy = PrecisionPolicy(self.config)
        self._auditor = Auditor(self.config, self._policy)
        self._streams, self._doubts = RandomStreams(self.config), PendingChecks()
        self._store = TrainingStore(self._policy, self._streams, self._doubts)
        self._packer = self._make_packer(self._eligibility, self._pagers, self._store, self._recorder)
        self._replays = Replays(self._packer, self._follower)
        self._captures = GraphCaptures(self.config, self._packer, self._store, self._replays)
        self._graphs = CompiledGraphs(self.config, self._replays.pack_at, self._packer.unpack, self._pagers.room_beside)
        self._passes = KindsOfPasses()

    @contextmanager
    def compress(self, inputs: Iterable[Tensor] = ()) -> Generator[Callable[[object], None]]:
        """Compresses what autograd saves inside: wrap it around the forward pass and the loss, not around backward.

        Entering it again inside itself changes nothing, nor does it where operators are recorded or transformed, as in
        ``torch.export``. `inputs` are what the model is given: of larger ones that they are views of, only they count.
        Yields a function to be told the result, if it can be: who has saved last may have other arguments than before.

        Raises:
            HooksActiveError: Other saved-tensor hooks are active, or were left open inside.
            GraphCaptureError: A CUDA graph is being captured, and see `GraphCaptures.capturing`.
            ActivationBudgetError: Less memory is available than activations of an earlier pass hold; inside, an
                activation does not fit in the budget. The step may be run again.
            SpillError: The spill file cannot be used, or main memory takes nothing more; raised in backward too.
        """
        if not (no_values := has_no_values(self._model)):
            self._packer.lend(inputs)
        if no_values or (own := self._replays.own).in_scope:
            yield self._packer.show
            return
        hook_stack.check_no_foreign_hooks(own=self._graphs.hook_over(own.pack))
        parameters, buffers = tensors_of(self._model)
        self._backends.follow(parameters)
        if is_capturing():
            with self._captures.capturing(self._model, self._passes.treatments, parameters + buffers):
                yield self._packer.show
            return
        complete, started, threads = False, time.perf_counter(), self._choice.threads()
        try:
            own.in_scope = True
            self._begin_pass(threads, parameters + buffers)
            with self._graphs.installed(own.pack), self._readers.watching(), hook_stack.telling(self._packer.pass_by):
                yield self._packer.show
            self._packer.finish()
            self._recorder.add_raw(self._graphs.account.pass_raw_bytes)
            self._choice.add(threads, time.perf_counter() - started, self._recorder.scope_raw_bytes)
            complete = True
        finally:
            own.in_scope = False
            self._end_pass(complete)

    def treat(self, treatments: Treatments) -> None:
        """Has parts of the model treated so, from the next forward pass on.

        It says what is stored how; to recompute blocks is the caller's part, with `RecomputedBlock`.
        """
        if treatments != self._passes.treatments:
            self._readers.expect_others()
        self._passes.turn_to(treatments)
        self._policy.recomputed = treatments.recomputed

    @contextmanager
    def probe_pass(self, loss_function: Callable[[], Tensor]) -> Generator[ProbePass]:
        """Runs a forward pass whose gradient can be taken at any precision, to measure errors.

        Training is not disturbed: `Measurement` says what is taken back, and gradients stay as they are. Meanwhile all
        activations are kept exactly, and take the memory of plain training on the rows that the function uses.

        Args:
            loss_function: Returns a scalar loss of a few rows of the current batch.

        Raises:
            HooksActiveError: Other saved-tensor hooks are active, or were left open inside.
            ActivationBudgetError: The activations of so many rows do not fit in the memory budget.
            TraceError: See `Measurement.running`.
        """
        hook_stack.check_no_foreign_hooks()
        self._backends.follow()
        store = RehearsalStore(self._policy, self._streams)
        # A few rows make small tensors of those that are compressed in training, and pages would swallow them.
        eligibility = Eligibility(self._model, REHEARSED_ELEMENTS)
        pagers = DevicePagers(self._room_left(), REHEARSED_PAGE_BYTES, to_host=False)
        packer = self._make_packer(eligibility, pagers, store, StepRecorder())
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        with self._follower.following(), self.measurement.running(), torch.enable_grad():
            eligibility.refresh()
            self._scopes.start()
            try:
                # What is too small to be compressed in training is not known from there.
                with hook_stack.installed(packer.pack, packer.unpack), self._readers.watching(always=True):
                    loss = loss_function()
                packer.finish()
            finally:
                self._scopes.stop()
                packer.end_pass()
            try:
                yield ProbePass(loss, parameters, store.activations, store.reads, store.census.sizes, packer.unpack)
            finally:
                store.reads.clear()  # they and the activations in it refer to each other

    @property
    def audit_due(self) -> bool:
        """Whether `audit` is to be called before the forward pass of this step."""
        return self.config.precision != "exact" and self._auditor.due and not is_capturing()

    def postpone_audit(self) -> None:
        """Has the next step be audited in place of this one, which does not train what others do."""
        self._auditor.postpone()

    def forget_audits(self) -> None:
        """Forgets what audits have found: they have measured something else than what is trained."""
        self._policy.forget()

    def audit(self, loss_function: Callable[[], Tensor]) -> GradientError | None:
        """Measures the error of the compressed gradient, and adapts the precision of each site to what it finds.

        Takes a forward pass and two backward passes on the rows that the function uses, and about ten at a calibration.

        Args:
            loss_function: Returns a scalar loss of a few rows of the step's batch.

        Returns:
            The error at the precisions of the pass before; None where the gradient is zero or not finite, or, without
            `max_gradient_error`, before the first pass.

        Raises:
            HooksActiveError: Other saved-tensor hooks are active, or were left open inside.
            ActivationBudgetError: The activations of so many rows do not fit, as they are, in the memory budget.
            TraceError: See `Measurement.running`.
        """
        started = time.perf_counter()
        with self.probe_pass(loss_function) as rehearsal:
            measured = self._auditor.audit(rehearsal, self._passes.last)
        self._recorder.add_audit(measured, time.perf_counter() - started)
        return measured

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned about the model's sites, as JSON-able values."""
        learned = zip(PARTS, (self._policy, self._auditor, self._passes, self._packer.common_rows), strict=True)
        return {"passes": self._streams.passes, **{name: part.state() for name, part in learned}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned.

        Raises:
            StateError: It is something else; nothing is changed then.
        """
        self._auditor, self._passes, self._streams.passes = restored(
            self.config, self._policy, self._packer.common_rows, state, self._passes.treatments
        )

    @contextmanager
    def itemized(self) -> Generator[Items]:
        """Lists what the forward passes inside save, tensor by tensor; it is not to be entered inside itself."""
        with self._doubts.none(), self._packer.itemized(self._pagers) as items:
            yield items

    def synchronous_packing(self) -> AbstractContextManager[None]:
        """Has packing wait, inside, for all that a device works out: what is measured does not depend on its hurry."""
        return self._doubts.none()

    @contextmanager
    def accumulating(self) -> Generator[None]:
        """Counts the forward passes inside as those of parts of one batch: plain training would keep their sum."""
        self._packer.drain()
        self._recorder.enter_scope()
        self._recorder.in_batch = True
        try:
            yield
        finally:
            self._recorder.in_batch = False

    def finish_backward(self) -> None:
        """Counts what is saved next as another forward pass, after a backward pass inside the scope."""
        self._packer.drain()
        self._recorder.enter_scope()

    def finish_step(self) -> StepStatistics:
        """Returns the statistics since the last call, and starts counting anew."""
        self._packer.drain()
        self._auditor.finish_step()
        self._recorder.stored_as.update(self._graphs.account.take_stored())
        graphs = [*self._captures.finish_step(), self._graphs.account.finish_step()]
        return self._recorder.finish([*self._pagers.finish_step(), *graphs])

    def look_again(self) -> None:
        """Has the next forward pass in this thread look who reads each tensor, as a first one does."""
        self._readers.look_again()

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that takes the engine back to now, for a step that ran out of memory and is run again.

        To be called when what was saved since is gone, any number of times. Statistics, treatments, what was learned
        and random numbers are then as they are now, and unused pages go back to the system.
        """
        self._packer.drain()
        pagers = self._pagers.snapshot()
        owners = (self._policy, self._auditor, self._streams, self._recorder, self._passes, self._packer.common_rows)
        parts = Attributes(*owners, private=True, longest=LONGEST)

        def restore() -> None:
            self._packer.drain()
            parts.restore()
            pagers()

        return restore

    def set_memory_budget(self, budget: int | str | None, set_aside: int = 0) -> None:
        """Changes the memory budget, also while activations are held: the least important bits are given up now.

        Args:
            budget: As `DAFConfig.memory_budget`.
            set_aside: The part of it for activations that stay as they are. Otherwise others give up bits when they
                come, and the pages that those had stay reserved.

        Raises:
            ConfigError: `budget` is no size.
            ActivationBudgetError: What is held does not fit even so; the budget stays as it was.
            SpillError: The next tier takes nothing more.
        """
        self._packer.drain()
        self._doubts.settle()
        self._pagers.set_budget(None if budget is None else parse_size("memory_budget", budget, "auto"), set_aside)

    @property
    def held_bytes(self) -> int:
        """Bytes that saved activations hold now; 0 after a step."""
        self._packer.drain()
        return self._pagers.held_bytes + self._captures.held_bytes + self._graphs.account.held_bytes

    @property
    def lossy_bytes(self) -> int:
        """The part of `held_bytes` that is lossy, of the last forward pass in this thread."""
        self._packer.drain()
        return self._store.census.held_bytes

    @property
    def leased_pages(self) -> int:
        """Pages that saved activations occupy now; 0 after a step."""
        self._packer.drain()
        return self._pagers.leased_pages

    @property
    def resident_bytes(self) -> int:
        """Bytes of the page pools that take memory, in use or not."""
        return self._pagers.resident_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the page pools, in use or not."""
        return self._pagers.reserved_bytes

    @property
    def pass_raw_bytes(self) -> int:
        """Bytes of the storages that autograd has saved in the forward pass, as they were."""
        self._packer.drain()
        return self._recorder.scope_raw_bytes

    @property
    def codec_seconds(self) -> float:
        """Time that packing and unpacking have taken in this step."""
        return self._recorder.pack_seconds + self._recorder.unpack_seconds

    @property
    def pass_sizes(self) -> Sizes:
        """Bytes of what may lose precision at each of `LEVELS` and as it was, by site, in this thread's last pass."""
        self._packer.drain()
        return self._store.census.sizes

    def close(self) -> None:
        """Removes the hooks from the model's modules; activations that are still held stay valid."""
        self._follower.close()

    def _room_left(self) -> DAFConfig:
        """Returns the configuration of a rehearsal's memory: what the budget leaves, and nothing may be given up."""
        budget = self._pagers.budget
        budget = max(budget - self.held_bytes, 1) if isinstance(budget, int) else budget
        return DAFConfig(precision=8, min_precision=8, memory_budget=budget)

    def _make_packer(
        self, eligibility: Eligibility, pagers: DevicePagers, store: LossyStore, recorder: StepRecorder
    ) -> Packer:
        activations = ActivationStore(self.config, self._backends, pagers, store, recorder)
        return Packer(eligibility, self._scopes, activations, recorder, self._readers)

    def _begin_pass(self, threads: int, tensors: list[Tensor]) -> None:
        self._packer.end_pass()  # an interrupt may have cut off the end of the pass before
        self._store.begin_pass()
        self._streams.passes += 1
        self._pagers.follow_available_memory()
        self._eligibility.refresh(tensors)
        self._recorder.enter_scope(together=not self._recorder.unpacked and self.held_bytes > 0)
        if threads:
            self._packer.pack_in_background(partial(self._join_pass, self._store.census, threads), self._pagers)
        replayable = not (threads or self._readers.learning)
        self._replays.own.begin(self._passes.treatments if replayable else None)
        self._scopes.start(self._passes.treatments.kept)

    def _join_pass(self, census: SiteStatistics, threads: int) -> None:
        """Lets a thread pack for another's forward pass."""
        self._store.census = census
        self._pagers.place.on_host = True
        for backend in list(self._backends.values()):  # another thread may add to them
            backend.limit_threads(threads)

    def _end_pass(self, complete: bool) -> None:
        self._scopes.stop()
        self._replays.own.end()
        self._packer.end_pass()
        if complete:
            census, sizes = self._store.census, self._store.census.sizes
            self._passes.last = self._passes.last.updated(census.precisions(), sizes)
            if sizes:
                self._policy.follow(sizes, self._room())

    def _room(self) -> int | None:
        """Returns the bytes that the budget leaves to lossy activations; None where nothing limits them."""
        budget = self._pagers.total_budget
        if budget is None or self.config.spill_dir is not None:
            return None
        return max(budget - (self.held_bytes - self.lossy_bytes), 0)
