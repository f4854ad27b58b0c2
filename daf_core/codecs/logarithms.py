"""Lossy: logarithms of probabilities, such that the gradient of a loss keeps its relative error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.deferred_check import PendingChecks
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.scaling_groups import Grouping, Rows
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_core.readers.table import Kind, Reading
from daf_kernels import Backend, Seed

LARGEST = 8
"""Logarithms of a row that stay exact: the target is among them wherever its probability matters."""

DEPTH = 20.0
"""How far below the largest of its row a logarithm is told from smaller ones: such probabilities are 2e-9 of the
largest. The range of a group would otherwise be that of a mask (-1e9)."""

CHUNK_BYTES = 16 << 20
"""Bytes of rows that are decoded at a time: what is computed of them is as large."""


class LogarithmsActivation(PlanesActivation):
    """Planes of all but the largest logarithms of each row, which are exact, and the sum of the other probabilities.

    The gradient of the cross entropy is p - 1 at the target and p elsewhere. Where a model is sure it is small beside
    p, and codes of the logarithms alone are wrong by a factor (at p = .998: 2 times the gradient at 8 bits, 56 at 4).
    Decoded, the others are scaled to their sum, so that all probabilities of a row sum to 1.
    """

    codec = "logarithms"

    @classmethod
    def beside(cls, rows: Rows, element_size: int) -> int:
        """Returns the bytes that are held beside the planes."""
        count = rows.outer * rows.inner
        return count * (min(LARGEST, rows.length - 1) * (element_size + 4) + 4)

    @override
    @classmethod
    def encode(
        cls,
        values: Tensor,
        grouping: Grouping,
        precision: int,
        pager: Pager,
        backend: Backend,
        seed: Seed | None,
        finite: bool = True,
        errors: Sequence[float] | None = None,
        doubts: PendingChecks | None = None,
    ) -> Self | None:
        """See `PlanesActivation.encode`; the rows are those of the grouping."""
        rows = grouping.logarithms
        assert rows is not None
        least = cls.sizes(values.numel(), grouping.row, values.element_size(), pager.pool.page_bytes)[0]
        beside = cls.beside(rows, values.element_size())
        if rows.length < 2 or least + beside >= values.nbytes:
            return None
        shaped = values.view(rows.shape)
        best, places = shaped.topk(min(LARGEST, rows.length - 1) + 1, dim=1)
        next_best = best[:, -1:]
        others = shaped.clamp(best[:, :1] - DEPTH, next_best)
        # What is kept raw besides is no part of what a device may still doubt: it is waited for.
        stored = super().encode(others.view(-1), grouping, precision, pager, backend, seed, finite, errors, None)
        if stored is None:
            return None
        count = best.shape[1] - 1
        total = others.exp_().sum(1, keepdim=True, dtype=torch.float32) - count * next_best.float().exp()
        stored._rows = rows
        stored._best = best[:, :-1].clone()
        stored._places = places[:, :-1].int()
        stored._log_sum = total.clamp_min_(0).log_()
        stored._kept = KeptStorage(pager, beside)
        return stored

    _rows: Rows
    _best: Tensor
    _places: Tensor
    _log_sum: Tensor
    _kept: KeptStorage

    @property
    @override
    def held_bytes(self) -> int:
        return super().held_bytes + self.beside(self._rows, self._best.element_size())

    @override
    def serves(self, reading: Reading) -> bool:
        if reading.kind is Kind.LOGARITHMS:
            return reading.dim == self._rows.dim
        return super().serves(reading)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        super()._decode(out, lease)
        for rows, best, places, log_sum in self._chunks(out.view(self._rows.shape)):
            rows.scatter_(1, places, -torch.inf)
            rows += (log_sum - rows.float().logsumexp(1, keepdim=True)).to(rows.dtype)
            rows.scatter_(1, places, best)

    def _chunks(self, out: Tensor) -> Iterator[tuple[Any, ...]]:
        count = max(1, CHUNK_BYTES // max(1, out[0].nbytes))
        parts = (out, self._best, self._places.long(), self._log_sum)
        return zip(*(part.split(count) for part in parts), strict=True)
