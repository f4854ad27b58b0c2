"""Forward passes that a CUDA graph captures.

The graph runs again what the host gave the GPU, and nothing of the host's. So a pass that is captured decides nothing:
each tensor is stored as the one of the last pass was, and no value is looked at. Pages are the graph's own, as torch
allocates them while it captures: nobody else may get them between two runs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from daf_core.autograd import hook_stack
from daf_core.autograd.torch_compile import has_compiled_parts
from daf_core.autograd.torch_private import in_backward, skip_dynamo
from daf_core.codecs import RawActivation
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.config import DAFConfig
from daf_core.errors import GraphCaptureError
from daf_core.memory.devices import DevicePagers
from daf_core.readers.attention import KERNELS, dropout_of
from daf_core.readers.places import DROPOUT, input_of
from daf_core.readers.table import Kind
from daf_core.readers.waiting import saver_of

if TYPE_CHECKING:
    from daf_core.memory.books import PagerAccount
    from daf_core.model.treatments import Treatments
    from daf_core.saved_tensors.hooks import Packed, Packer
    from daf_core.saved_tensors.lossy import TrainingStore
    from daf_core.saved_tensors.recording import Look, Save
    from daf_core.saved_tensors.replay import Replays

WARM_UP = (
    "A captured pass stores each tensor as the passes before it did: train some five steps first, and capture then"
)


class GraphCaptures:
    """The forward passes of an engine that CUDA graphs capture.

    Args:
        config: How activations are stored.
        packer: Stores those of other passes.
        lossy: Chooses their bits.
        replays: Know those passes.
    """

    def __init__(self, config: DAFConfig, packer: Packer, lossy: TrainingStore, replays: Replays) -> None:
        self._config, self._packer, self._lossy, self._replays = config, packer, lossy, replays
        self._pagers: DevicePagers | None = None  # of the last pass

    @contextmanager
    def capturing(self, model: nn.Module, treatments: Treatments, tensors: list[Tensor]) -> Generator[None]:
        """Compresses what is saved inside, as the last pass with these treatments was.

        Args:
            model: The model.
            treatments: Those of the model's parts.
            tensors: Its parameters and buffers.

        Raises:
            GraphCaptureError: No such pass was recorded; or what is stored changes from one pass to the next. Inside,
                something is saved that was not before.
        """
        _check_unchanging(self._config, model)
        recorded = self._replays.recordings.latest(treatments)
        if recorded is None:
            raise GraphCaptureError(f"a CUDA graph is being captured, and no pass like it was recorded. {WARM_UP}")
        pagers = self._pagers = DevicePagers(DAFConfig(), to_host=False)
        packer = self._packer.beside(pagers, self._lossy)
        packer.eligibility.refresh(tensors)
        packer.recorder.enter_scope()
        packer.scopes.start(treatments.kept)
        captured = _CapturedPass(packer, recorded)
        try:
            self._replays.own.in_scope = True
            with self._replays.follower.following(), hook_stack.installed(captured.pack, packer.unpack):
                yield
            packer.finish()
        finally:
            self._replays.own.in_scope = False
            packer.scopes.stop()
            packer.end_pass()

    @property
    def held_bytes(self) -> int:
        """Bytes that activations of the last pass hold, as long as backward has not run while a graph is captured."""
        return 0 if self._pagers is None else self._pagers.held_bytes

    def finish_step(self) -> list[PagerAccount]:
        """Returns what was done since the last call."""
        pagers, self._pagers = self._pagers, None
        return [] if pagers is None else pagers.finish_step()


class _CapturedPass:
    """The pack hook of a pass, given the tree of those before it."""

    def __init__(self, packer: Packer, recorded: Save) -> None:
        self._packer = packer
        self._at = recorded
        # What the attention that is running has saved, with what is known of it, and what autograd keeps in its place.
        self._inputs: list[tuple[Tensor, Look, Packed]] = []

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor.

        Raises:
            GraphCaptureError: No pass before has saved it here.
        """
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if in_backward():
            return RawActivation(tensor, None)
        self._packer.readers.show(tensor.grad_fn)
        if frame.f_code is DROPOUT:
            self._packer.scopes.drops(input_of(DROPOUT, frame))
        is_parameter = self._packer.eligibility.form(tensor, 0) is TensorKind.PARAMETER
        for save in self._at.following:
            if (save.look is None) is is_parameter and (is_parameter or self._is_like(save, tensor, frame)):
                self._at = save
                return RawActivation(tensor, None) if save.look is None else self._store(save.look, tensor, frame)
        maker = "the program" if tensor.grad_fn is None else tensor.grad_fn.name()
        raise GraphCaptureError(
            f"a CUDA graph is being captured, and the pass saves a tensor of shape {tuple(tensor.shape)} and type "
            f"{tensor.dtype}, made by {maker}, where no pass before has. {WARM_UP}"
        )

    def _is_like(self, save: Save, tensor: Tensor, frame: FrameType) -> bool:
        small = tensor.numel() < self._packer.eligibility.least_elements
        return save.small is small and save.is_of(tensor, tensor.grad_fn, frame)

    def _store(self, look: Look, tensor: Tensor, frame: FrameType) -> Packed:
        """Stores a tensor as another one was; indices, whose bits depend on values, stay as they are.

        So does what an attention with dropout saves.
        """
        store = self._packer.replayed_by
        assert store is not None
        if look.form is TensorKind.INTEGER:
            return store.keep(tensor, look.site)
        if look.sighting.fresh:  # its reader is told by its arguments, once there is one
            look = look._replace(sighting=look.sighting._replace(number=saver_of(tensor, look.site.op)))
        if look.site.op in KERNELS:  # the result of an attention, or a statistic
            if dropout_of(tensor.grad_fn):  # to run again, it would need numbers that the host reads
                for saved in self._inputs:
                    self._packer.keep_after_all(*saved)
            self._inputs.clear()
        packed = self._packer.store(tensor, look, frame)
        if look.reading is not None and look.reading.kind is Kind.ATTENTION:
            self._inputs.append((tensor, look, packed))
        return packed


def _check_unchanging(config: DAFConfig, model: nn.Module) -> None:
    """Checks that what is stored does not change from one pass to the next.

    Raises:
        GraphCaptureError: It does.
    """
    if config.memory_budget is not None:
        reason, remedy = f"memory_budget={config.memory_budget!r} gives up bits as tensors come", "leave it out"
    elif config.rounding != "nearest":
        reason, remedy = f"rounding={config.rounding!r} takes other random numbers in each pass", 'set "nearest"'
    elif config.packing == "workers":
        reason, remedy = 'packing="workers" has the host pack', 'set "device"'
    elif has_compiled_parts(model):
        reason = "parts of the model are compiled, into graphs with codes of their own"
        remedy = 'compile the model with mode="reduce-overhead" in place of the capture'
    else:
        return
    raise GraphCaptureError(f"a CUDA graph is being captured, which runs without the host, and {reason}: {remedy}")


skip_dynamo(_CapturedPass.pack)
