"""Finds the law of a loss: a few rows together and one by one, through the user's own loss function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from daf_core.batch.loss_reduction import Law, LossReduction, safest, shares, weights
from daf_core.batch.rows import named_tensors, rows_of
from daf_core.batch.samples import copied
from daf_core.batch.trial import ComparesRowsError, LossFunction, Trial, evaluating, loss_of
from daf_core.batch.unlike_rows import Alike, Class, alike_rows, classes, laws_of, row_without, weighing
from daf_core.errors import MicroBatchError

MOST_TESTS = 10
"""Tests up to which the law is looked for again where a batch brings new classes: what looks like classes may be
numbers of samples, which are always new."""

MOST_UNTRIED = 3
"""Batches in a row whose rows have no loss, up to which others are tried: it may be these rows alone. Losses or
gradients of rows that do not make those of the rows together say enough at once: such a loss compares rows."""


class MicroBatchWeights:
    """The weights of a batch's parts, by the law that the loss has been seen to follow.

    The law is looked for at the first batch. Where several agree with what was seen, that is done again at the first
    batch for which they say different weights, at each batch with new classes, where two rows are alike or one has no
    label for the first time, and where masks, weights, lengths or padding of rows differ for the first time: a loss
    that weighs classes, or counts what a mask does, is a mean over rows as long as all rows weigh the same. Batches of
    other tensors have a law of their own. `everything` returns a context in which all is trained, as laws are looked
    for there.
    """

    def __init__(
        self, model: nn.Module, everything: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._model, self._everything = model, everything
        self._seen: dict[frozenset[tuple[str, int]], _Seen] = {}

    def of(self, batch: Any, parts: int, loss_function: LossFunction) -> list[float]:
        """Returns the weight of each part that `split` makes; the loss function leaves no trace.

        Raises:
            MicroBatchError: No law agrees, or the loss cannot be computed for a few rows. In the second case
                the next batch of this kind is tested, too.
        """
        seen = self._seen_of(batch)
        if seen.doubted or seen.is_new(batch) or seen.disagree(batch, parts):
            self._look(seen, batch, loss_function)
            if seen.disagree(batch, parts):
                self._look(seen, batch, loss_function, _telling_rows(seen.laws, batch))
        return weights(safest(seen.laws, batch), batch, parts)

    def look_again(self, batch: Any, loss_function: LossFunction) -> None:
        """Looks for the law of a batch of two rows or more, whatever was seen of others; raises what `of` does."""
        if (rows_of(batch) or 0) > 1:
            self._look(self._seen_of(batch), batch, loss_function)

    def _look(self, seen: _Seen, batch: Any, loss_function: LossFunction, first: Sequence[int] = ()) -> None:
        with seen.testing(), self._everything(), evaluating(self._model) as modes:
            test = partial(Trial, self._model, batch, loss_function, first=first)
            seen.add(partial(test, modes), batch)  # once in training mode, too, is enough
            while seen.has_new_rows(batch):
                seen.add(test, batch, alike_rows(batch, seen.alike))

    def refusal(self, batch: Any) -> str | None:
        """Returns why batches of this kind are not cut any more; None where they may be."""
        return self._seen_of(batch).refusal

    def has_loss(self, batch: Any, loss_function: LossFunction) -> bool:
        """Says whether a batch as a whole has a loss; nothing is left of it."""
        with self._everything(), evaluating(self._model), torch.no_grad(), suppress(MicroBatchError):
            loss_of(loss_function, copied(batch))
            return True
        return False

    def _seen_of(self, batch: Any) -> _Seen:
        kind = frozenset((name, tensor.dim()) for name, tensor in named_tensors(batch))
        return self._seen.setdefault(kind, _Seen())


class _Seen:
    """What was seen of a loss: the laws that agree with it, classes, and names of what differed between rows."""

    def __init__(self) -> None:
        self.laws = frozenset[Law](LossReduction)
        self.classes: set[Class] = set()
        self.alike: set[tuple[str, float]] = set()  # values that two rows had
        self.without: set[str] = set()  # tensors of which a row had nothing that counts
        self.weighing: set[str] = set()
        self.refusal: str | None = None  # why no more batches are cut
        self.doubted = False  # after a batch that was not tried, until one is
        self._tests = self._untried = 0

    @contextmanager
    def testing(self) -> Generator[None]:
        """Inside, a batch is tested; raises `MicroBatchError` at once where no more are cut."""
        if self.refusal is not None:
            raise MicroBatchError(self.refusal)
        self.doubted = True
        try:
            yield
        except MicroBatchError as error:
            self._untried += 1
            if isinstance(error, ComparesRowsError) or self._untried == MOST_UNTRIED:
                self.refusal = str(error)
            raise
        self.doubted, self._untried = False, 0

    def disagree(self, batch: Any, parts: int) -> bool:
        """Whether laws say different weights for the parts of a batch."""
        return len(self.laws) > 1 and len({tuple(weights(law, batch, parts)) for law in self.laws}) > 1

    def is_new(self, batch: Any) -> bool:
        """Whether a batch has rows to be tried, or something that differs between rows for the first time."""
        return bool(weighing(batch, self.weighing)) or self.has_new_rows(batch)

    def has_new_rows(self, batch: Any) -> bool:
        """Whether a batch has rows to be tried: of new classes, that are alike, or in which nothing counts."""
        if self._tests < MOST_TESTS and classes(batch) - self.classes:
            return True
        return (alike_rows(batch, self.alike) or row_without(batch, self.without)) is not None

    def add(self, trial: Callable[..., Trial], batch: Any, alike: Alike | None = None) -> None:
        """Tries rows of a batch."""
        others, without = weighing(batch, self.weighing), row_without(batch, self.without)
        # Beside rows that are alike are such that are unlike, as in a first test.
        rows = {"known": self.classes} if alike is None else {"first": alike.rows}
        test = trial(last=() if without is None else without[1:], **rows)
        # Where rows weighed the same so far, a mean by weights was one over rows.
        possible = laws_of(others, batch) if LossReduction.ROWS in self.laws else frozenset[Law]()
        self.alike |= set() if alike is None else {(alike.name, alike.value)}
        self.without |= set() if without is None else {without[0]}
        try:
            self.laws = test.matching(self.laws | possible)
        except MicroBatchError as error:
            if alike is None or isinstance(error, ComparesRowsError):
                raise
            return  # these rows have no loss, where others had
        self.classes |= test.classes
        self.weighing |= others
        self._tests += alike is None


def _telling_rows(laws: Collection[Law], batch: Any) -> list[int]:
    """Returns the rows of a batch that weigh more by some laws than by others, those first where this is most so."""
    by_law = [shares(law, batch, rows_of(batch) or 0) for law in laws if law is not LossReduction.SUM]
    spread = [max(of_row) - min(of_row) for of_row in zip(*by_law, strict=True)]
    return sorted(range(len(spread)), key=spread.__getitem__, reverse=True)
