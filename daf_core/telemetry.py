"""Per-step statistics, as values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from daf_core.memory.books import PagerAccount


@dataclass(frozen=True)
class GradientError:
    """How a gradient differs from the exact one."""

    error: float  # length of the difference over the length of the exact gradient
    cosine: float  # of the angle between the two

    @property
    def finite(self) -> bool:
        """Whether both gradients were finite, and the exact one not zero."""
        return math.isfinite(self.error) and math.isfinite(self.cosine)


@dataclass(frozen=True)
class StepStatistics:
    """What happened to the saved activations of one training step.

    Attributes:
        raw_bytes: Bytes plain training would have kept: each storage counted once, parameters and buffers not at all,
            and blocks that a plan recomputes like others, with their inputs. With several forward passes in a step the
            largest of them (gradient accumulation), or their sum where one backward follows them.
        held_bytes: The most bytes that were held at once instead, pages and exact tensors together.
        stored_as: How many saved tensors each codec stored, parameters and buffers not counted; "shared" ones were
            stored already.
        pack_seconds: Time spent encoding by the threads that train, waiting for workers included.
        worker_seconds: Time that workers (`DAFConfig.packing`) spent encoding meanwhile.
        unpack_seconds: Time spent decoding.
        dropped_planes: Planes given up to keep the memory budget.
        dropped_bytes: Bytes of their pages.
        spilled_bytes: Bytes copied to the next tier to keep the memory budget.
        pager_seconds: Time spent on keeping it, a part of encoding and decoding.
        gradient_error: What the step's last audit measured; None without one.
        audit_seconds: Time spent on audits.
    """

    raw_bytes: int = 0
    held_bytes: int = 0
    stored_as: dict[str, int] = field(default_factory=dict)
    pack_seconds: float = 0.0
    worker_seconds: float = 0.0
    unpack_seconds: float = 0.0
    dropped_planes: int = 0
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    pager_seconds: float = 0.0
    gradient_error: GradientError | None = None
    audit_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Raw bytes over held bytes; 1 where nothing was saved."""
        return self.raw_bytes / self.held_bytes if self.held_bytes else 1.0


class StepRecorder:
    """Collects a step's figures while it runs; `finish` returns them and begins the next step."""

    def __init__(self) -> None:
        self._begin_step()

    def _begin_step(self) -> None:
        self.raw_bytes = self.scope_raw_bytes = self.batch_raw_bytes = self.batch_unsaved_bytes = 0
        self.in_batch = self.unpacked = False
        self.stored_as: Counter[str] = Counter()
        self.pack_seconds = self.worker_seconds = self.unpack_seconds = self.audit_seconds = 0.0
        self.gradient_error: GradientError | None = None

    def enter_scope(self, together: bool = False) -> None:
        """Starts a forward pass: that of a batch, or of a part of it while `in_batch`.

        `together` says whether what passes before it have saved is still kept, as it would be in plain training.
        """
        self.scope_raw_bytes, self.unpacked = 0, False
        if not self.in_batch and not together:
            self._end_batch()

    def add_raw(self, size: int) -> None:
        """Counts a storage that was saved."""
        self.scope_raw_bytes += size
        self.batch_raw_bytes += size

    def add_unsaved(self, size: int) -> None:
        """Counts a storage that plain training would save, and that was not; others may be counted meanwhile."""
        self.batch_unsaved_bytes += size

    def _end_batch(self) -> None:
        self.raw_bytes = max(self.raw_bytes, self.batch_raw_bytes + self.batch_unsaved_bytes)
        self.batch_raw_bytes = self.batch_unsaved_bytes = 0

    def add_audit(self, measured: GradientError | None, seconds: float) -> None:
        """Counts an audit."""
        self.gradient_error = measured or self.gradient_error
        self.audit_seconds += seconds

    def finish(self, accounts: Sequence[PagerAccount]) -> StepStatistics:
        """Returns the step's statistics, with those of the pagers of all devices, and begins the next step."""
        self._end_batch()
        own = {each.name: getattr(self, each.name) for each in fields(StepStatistics) if hasattr(self, each.name)}
        statistics = StepStatistics(
            **own,
            held_bytes=sum(account.peak_bytes for account in accounts),
            dropped_planes=sum(account.dropped_planes for account in accounts),
            dropped_bytes=sum(account.dropped_bytes for account in accounts),
            spilled_bytes=sum(account.spilled_bytes for account in accounts),
            pager_seconds=sum(account.seconds for account in accounts),
        )
        self._begin_step()
        return statistics
