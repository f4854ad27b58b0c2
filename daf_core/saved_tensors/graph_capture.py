"""Forward passes that a CUDA graph captures.

The graph runs again what the host gave the GPU, and nothing of the host's. So a pass that is captured learns nothing:
each tensor is stored as its reader is known to need it, and no value is looked at. Pages are the graph's own, as torch
allocates them while it captures: nobody else may get them between two runs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from logging import getLogger
from typing import TYPE_CHECKING

from torch import Tensor, nn

from daf_core.autograd import hook_stack
from daf_core.autograd.torch_compile import has_compiled_parts, skip_dynamo
from daf_core.autograd.torch_private import is_being_saved
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import TensorKind
from daf_core.config import DAFConfig
from daf_core.errors import GraphCaptureError
from daf_core.memory.devices import DevicePagers
from daf_core.precision.site_stats import SiteStatistics
from daf_core.readers.attention import KERNELS, can_attend_again, dropout_of
from daf_core.readers.table import Kind, Reading
from daf_core.readers.waiting import EXACT_MODE

if TYPE_CHECKING:
    from daf_core.memory.books import PagerAccount
    from daf_core.model.treatments import Treatments
    from daf_core.saved_tensors.hooks import Packed, Packer
    from daf_core.saved_tensors.lossy import TrainingStore
    from daf_core.saved_tensors.recording import Look
    from daf_core.saved_tensors.replay import Replays

log = getLogger("daf")


class GraphCaptures:
    """The forward passes of an engine that CUDA graphs capture.

    Args:
        config: How activations are stored.
        packer: Stores those of other passes.
        lossy: Chooses their bits.
        replays: The hooks of those passes.
    """

    def __init__(self, config: DAFConfig, packer: Packer, lossy: TrainingStore, replays: Replays) -> None:
        self._config, self._packer, self._lossy, self._replays = config, packer, lossy, replays
        self._pagers: DevicePagers | None = None  # of the last pass

    @contextmanager
    def capturing(self, model: nn.Module, treatments: Treatments, tensors: list[Tensor]) -> Generator[None]:
        """Compresses what is saved inside, as far as it is known who reads it.

        Args:
            model: The model.
            treatments: Those of its parts.
            tensors: Its parameters and buffers.

        Raises:
            GraphCaptureError: Nothing is known yet; or what is stored changes from one pass to the next.
        """
        _check_unchanging(self._config, model)
        if self._packer.readers.learning:
            raise GraphCaptureError(
                "a CUDA graph is being captured, and DAF does not know yet who reads what is saved: train some five "
                "steps first, and capture then"
            )
        pagers = self._pagers = DevicePagers(DAFConfig(), to_host=False)
        packer, own = self._packer.beside(pagers, self._lossy), self._replays.own
        captured = _CapturedPass(packer)
        try:
            own.in_scope = True
            self._lossy.census = SiteStatistics()
            packer.eligibility.refresh(tensors)
            packer.recorder.enter_scope()
            packer.scopes.start(treatments.kept)
            with self._replays.follower.following(), hook_stack.installed(captured.pack, packer.unpack):
                yield
            packer.finish()
            captured.tell()
        finally:
            own.in_scope = False
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
    """The pack hook of a pass."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        # What the attention that is running has saved, with what is known of it, and what autograd keeps in its place.
        self._inputs: list[tuple[Tensor, Look, Packed]] = []
        self._unknown: list[int] = []  # bytes of tensors of which nothing is known

    def pack(self, tensor: Tensor) -> Packed:
        """Returns what autograd keeps in place of a tensor."""
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        look = self._packer.look(tensor, frame, recalls=True)
        if look is None:
            return RawActivation(tensor, None)
        attention = look.site.op in KERNELS  # that has made it: it is the result, or a statistic
        if attention:
            self._end_attention(tensor)
        known = look.form is not TensorKind.LOSSY or look.sighting is EXACT_MODE or look.reading is not None
        if attention and not known and is_being_saved(tensor.grad_fn, "output"):  # of another kernel than before
            known, sighting = True, look.sighting._replace(reading=Reading(Kind.EXACT, look.site.op), fresh=False)
            look = look._replace(sighting=sighting)
        if known and look.form is not TensorKind.INTEGER:  # whose bits depend on values
            packed = self._packer.store(tensor, look, frame)
            if look.reading is not None and look.reading.kind is Kind.ATTENTION:
                self._inputs.append((tensor, look, packed))
            return packed
        if not known:
            self._unknown.append(tensor.nbytes)
        return self._packer.store(tensor, look._replace(form=TensorKind.RAW), frame)

    def tell(self) -> None:
        """Warns of what stays as it is since nothing is known of it."""
        if self._unknown:
            log.warning(
                "In the CUDA graph that was captured %d tensors (%.1f MB) stay as they are: no step before has saved "
                "them where this one does",
                len(self._unknown),
                sum(self._unknown) / 1e6,
            )

    def _end_attention(self, result: Tensor) -> None:
        """Keeps the inputs of an attention as they are, and so its result, where it cannot run again in a graph.

        With dropout it would need numbers that the host reads.
        """
        if dropout_of(result.grad_fn) or not can_attend_again(result.grad_fn, result.device):
            for saved in self._inputs:
                self._packer.keep_after_all(*saved)
        self._inputs.clear()


def _check_unchanging(config: DAFConfig, model: nn.Module) -> None:
    """Checks that what is stored does not change from one pass to the next.

    Raises:
        GraphCaptureError: It does.
    """
    if config.memory_budget is not None:
        reason, remedy = f"memory_budget={config.memory_budget!r} gives up bits as tensors come", "leave it out"
    elif config.elastic is not None:
        reason, remedy = "elastic training chooses in each step what it trains", "leave elastic out"
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
