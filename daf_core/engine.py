"""The engine: the only user of saved-tensor hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from daf_core import hook_stack
from daf_core.codecs import (
    BitmaskActivation,
    NarrowIntActivation,
    PlanesActivation,
    RawActivation,
    RectifiedActivation,
    StoredActivation,
    VerbatimActivation,
)
from daf_core.config import DAFConfig, parse_size
from daf_core.derivation import Derivation
from daf_core.eligibility import Eligibility, Form
from daf_core.errors import ActivationBudgetError, NothingToTrainError, UnsupportedDeviceError
from daf_core.geometry import Geometry, geometry_of
from daf_core.handle import Handle
from daf_core.memory.devices import DevicePagers
from daf_core.sharing import SharingTable
from daf_core.sites import ModuleScopes, Site, follow_modules
from daf_core.telemetry import StepRecorder, StepStatistics
from daf_core.torch_internals import in_backward
from daf_kernels import Backend, NoKernelError, Seed, load_backend


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
        config: How activations are stored.

    Raises:
        NothingToTrainError: No parameter requires a gradient.
        UnsupportedDeviceError: There are no kernels for a device that the model is on.
        SpillError: `spill_dir` takes no file.
    """

    def __init__(self, model: nn.Module, config: DAFConfig | None = None) -> None:
        self.config = config or DAFConfig()
        _check_trainable(model)
        devices = {parameter.device for parameter in model.parameters()}
        self._backends = {device: _load_backend(device, self.config.backend) for device in devices}
        self._pagers = DevicePagers(self.config)
        self._eligibility = Eligibility(model)
        self._sharing = SharingTable()
        self._scopes = ModuleScopes()
        self._derivation = Derivation(self._scopes)
        self._hooks = follow_modules(model, self._scopes)
        self._recorder = StepRecorder()
        self._inside = threading.local()
        self._passes = 0

    @contextmanager
    def compress(self) -> Generator[None]:
        """Compresses what autograd saves inside: wrap it around the forward pass and the loss, not around backward.

        Entering it again inside itself changes nothing.

        Raises:
            HooksActiveError: Other saved-tensor hooks are active, or were left open inside.
            ActivationBudgetError: Less memory is available than activations of an earlier pass hold; inside, an
                activation does not fit in the budget. The step may be run again.
            SpillError: The spill file cannot be read or written; raised in backward too.
        """
        if getattr(self._inside, "scope", False):
            yield
            return
        hook_stack.refuse_foreign_hooks()
        try:
            self._begin_pass()
            with hook_stack.installed(self._pack, self._unpack):
                yield
        finally:
            self._end_pass()

    def finish_step(self) -> StepStatistics:
        """Returns the statistics since the last call, and starts counting anew."""
        return self._recorder.finish(self._pagers.finish_step())

    def set_memory_budget(self, budget: int | str | None) -> None:
        """Changes the memory budget, also while activations are held: the least important bits are given up now.

        Args:
            budget: As `DAFConfig.memory_budget`.

        Raises:
            ConfigError: `budget` is no size.
            ActivationBudgetError: What is held does not fit even so; the budget stays as it was.
            SpillError: The spill file cannot be written.
        """
        self._pagers.set_budget(None if budget is None else parse_size("memory_budget", budget, "auto"))

    @property
    def held_bytes(self) -> int:
        """Bytes that saved activations hold now; 0 after a step."""
        return self._pagers.held_bytes

    @property
    def leased_pages(self) -> int:
        """Pages that saved activations occupy now; 0 after a step."""
        return self._pagers.leased_pages

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the page pools, in use or not."""
        return self._pagers.reserved_bytes

    def close(self) -> None:
        """Removes the hooks from the model's modules; activations that are still held stay valid."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_pass(self) -> None:
        self._inside.scope = True
        self._passes += 1
        self._pagers.follow_available_memory()
        self._eligibility.refresh()
        self._recorder.enter_scope()
        self._scopes.start()

    def _end_pass(self) -> None:
        self._scopes.stop()
        self._sharing.clear()
        self._inside.scope = False

    def _pack(self, tensor: Tensor) -> Handle | RawActivation:
        started = time.perf_counter()
        call = self._scopes.current
        form = self._eligibility.form(tensor, call.largest)
        # A backward inside the scope recomputes checkpointed blocks, whose activations are used at once.
        if form is Form.PARAMETER or in_backward():
            return RawActivation(tensor, None)
        site = call.next_site(tensor)
        if self._sharing.is_new_storage(tensor):
            self._recorder.add_raw(tensor.untyped_storage().nbytes())
        packed = self._pack_activation(tensor, form, site)
        self._recorder.pack_seconds += time.perf_counter() - started
        return packed

    def _pack_activation(self, tensor: Tensor, form: Form, site: Site) -> Handle | RawActivation:
        """Packs an activation in the first form that can hold it: shared, a codec's, or raw."""
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        shared = self._sharing.find(tensor, geometry)
        kept = None
        try:
            stored = shared or self._derive(tensor, form) or self._store(tensor, geometry, form, site)
            if stored is None:
                kept = self._sharing.keep(tensor, self._pagers.on(tensor.device))
        except ActivationBudgetError:
            # Perhaps not finite, and too large to stay as it is: gradient scalers need to see that, not where.
            stored = self._store(tensor, geometry, form, site, finite=False)
            if stored is None:
                raise
        if stored is None:
            self._recorder.stored_as[RawActivation.codec] += 1
            return RawActivation(tensor, kept)
        self._sharing.add(tensor, geometry, stored)
        self._recorder.stored_as["shared" if shared else stored.codec] += 1
        return Handle(stored, geometry, tensor.dtype, tensor.device)

    def _derive(self, tensor: Tensor, form: Form) -> StoredActivation | None:
        """Returns a recipe for a tensor that follows from what is stored."""
        if form is not Form.LOSSY:
            return None
        return self._derivation.derive(tensor, self.config.precision == "exact", self._unpack)

    def _store(
        self, tensor: Tensor, geometry: Geometry, form: Form, site: Site, finite: bool = True
    ) -> StoredActivation | None:
        """Encodes a tensor in the form it may take; None keeps it raw."""
        backend = self._backends.get(tensor.device)
        if form is Form.RAW or backend is None:
            return None
        values, pager = geometry.compact(tensor), self._pagers.on(tensor.device)
        stored: StoredActivation | None
        if form is Form.INTEGER:
            stored = NarrowIntActivation.encode(values, pager)
        else:
            stored = BitmaskActivation.encode(values, pager, backend)
        if stored is None and form is Form.LOSSY and self.config.precision != "exact":
            lossy = RectifiedActivation if site.op.startswith("ReluBackward") else PlanesActivation
            precision, seed = self.config.precision, self._seed(site)
            stored = lossy.encode(values, geometry.row, precision, pager, backend, seed, finite)
        if stored is None and self.config.spill_dir is not None and pager.budget is not None:
            return VerbatimActivation.copy(values, pager)
        return stored

    def _unpack(self, packed: Handle | RawActivation) -> Tensor:
        if isinstance(packed, RawActivation):
            return packed.unpack()
        started = time.perf_counter()
        tensor = packed.unpack()
        self._recorder.unpack_seconds += time.perf_counter() - started
        return tensor

    def _seed(self, site: Site) -> Seed | None:
        """Returns the random stream of a site in this forward pass: the same in every run with the same seed."""
        if self.config.rounding == "nearest":
            return None
        seed = self.config.seed
        return seed & 0xFFFFFFFF, seed >> 32, site.number, self._passes & 0xFFFFFFFF


def _check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToTrainError(
            f"{type(model).__name__} has no parameter that requires a gradient, so nothing is saved for backward; "
            "set requires_grad on the parameters to train, for example with peft.get_peft_model"
        )


def _load_backend(device: torch.device, name: str) -> Backend:
    try:
        return load_backend(device, name)
    except NoKernelError as error:
        raise UnsupportedDeviceError(
            f'{error}. Move the model, or set backend="reference", which runs on any device in plain torch, slowly'
        ) from error
