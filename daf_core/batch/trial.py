"""Tries a few rows of a batch together and one by one: which laws does its loss follow?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_compile import is_compiled
from daf_core.batch.function_modes import ClassWeights, WithoutDropout
from daf_core.batch.loss_reduction import Law, LossReduction, ignoring, shares
from daf_core.batch.row_gradients import RowGradients, as_vectors, gradients_of
from daf_core.batch.rows import rows_of, take, tensors_in
from daf_core.batch.samples import length_of_texts
from daf_core.batch.unlike_rows import LENGTH, Class, classes, unlike_rows, weighing
from daf_core.distributed import apart
from daf_core.errors import DAFError, MicroBatchError
from daf_core.snapshots.measurement import measuring

FINE, COARSE = 1e-5, 1e-3
"""Relative differences between losses that rounding explains: in float32 on a CPU, and where a module computes in half
precision or a GPU in TF32, as it does in convolutions by default."""

GRADIENTS = {FINE: 1e-4, COARSE: 5e-2}
"""The same of gradients; in float32 they were 4e-7 at the most for 230 classes of transformers."""

ALIKE = 30
"""Times the allowed difference: the spread of the rows' losses up to which gradients are compared as well. A mean of
such losses does not show weights of rows that are off by .03."""

NEARLY = 3
"""Times the least error of a gradient: laws with larger ones are others. Rounding of bfloat16 makes errors of .004."""

TINY = 1e-300  # what a gradient of zeros is divided by

OTHER_LOSS = (
    "A loss that compares rows with each other (contrastive losses), or draws random numbers, is another one in parts: "
    "train without micro-batches, on smaller batches"
)

LossFunction = Callable[[Any], Tensor]
Value = TypeVar("Value", float, Tensor)
Result = TypeVar("Result")

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, and whether they are in training mode."""


@contextmanager
def evaluating(model: nn.Module) -> Generator[Modes]:
    """Puts a model in evaluation mode, as the loss function calls it; nothing leaves a trace of what runs inside.

    Gives the modes that its modules had.
    """
    modes = [(module, module.training) for module in model.modules()]
    with measuring(model), apart(model):
        model.eval()  # no dropout tells rows and batch apart; `measuring` puts the modes back
        yield modes


class ComparesRowsError(MicroBatchError):
    """Losses or gradients of rows do not make those of the rows together."""


class _Tried(NamedTuple):
    """Rows that were tried: their loss, and that of each."""

    sample: Any
    whole: Tensor
    single: list[Tensor]


class Trial:
    """Tries a few rows of a batch, some of them first, which have classes that are not known yet if there are any.

    What counts in the rows differs: see `unlike_rows`. What was changed for that is tried as it is, too, and so are
    they with the rows of `last`, if the loss bears these. Training mode is tried where `modes` says which modules are
    in it.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_function: LossFunction,
        modes: Modes = (),
        known: Collection[Class] = (),
        first: Sequence[int] = (),
        last: Sequence[int] = (),
    ) -> None:
        self._model, self._batch, self._loss_function, self._known = model, batch, loss_function, known
        self._modes, self._first, self._last = modes, first, last
        self._size = rows_of(batch) or 0
        if self._size < 2:
            raise MicroBatchError(
                f"a batch of {self._size} rows cannot be cut into parts; give one of two rows or more"
            )
        self.classes: set[Class] = set()

    def matching(self, laws: frozenset[Law]) -> frozenset[Law]:
        """Returns the laws, of those that may be, that the loss follows.

        Gradients have to follow them, too, in training mode, where losses of rows are nearly the same, as those of a
        head of zeros are, and where laws agree that say different weights.
        """
        compiled = any(is_compiled(module) for module in self._model.modules())  # anew, where a function mode is active
        weights = ClassWeights()
        with _tolerance(self._model, compiled) as tolerances, torch.no_grad(), nullcontext() if compiled else weights:
            changed = weighing(self._batch)
            some = self._if_borne(set(), self._last)
            tried = [each for each in (self._if_borne(changed), self._tried(set()), some) if each is not None]
        laws |= weights.laws(self._batch)
        for each in tried:
            allowed = max(max(tolerances), 2 * torch.finfo(each.whole.dtype).eps)
            of_gradients = GRADIENTS[FINE if allowed == FINE else COARSE]
            try:
                laws = self._matching(laws, each, allowed, of_gradients)
            except MicroBatchError as error:
                if each is some and not isinstance(error, ComparesRowsError):
                    continue
                raise
            if self._modes and not compiled and each is not some:
                self._check_training(laws, each, of_gradients)
        return laws

    def _check_training(self, laws: frozenset[Law], tried: _Tried, allowed: float) -> None:
        """Has gradients follow one of some laws in training mode, too, unless chance decides them there."""
        for module, training in self._modes:
            module.training = training
        try:
            with WithoutDropout():
                whole, single = self._gradients(tried)
                errors = self._errors(laws, tried, whole, single)
                wrong = min(errors.values()) > allowed
                again = self._gradients(tried)[0] if wrong else whole
        except MicroBatchError:  # as where a loss takes gradients itself: here blocks keep nothing for them
            return
        finally:
            self._model.eval()
        if wrong and again.shape == whole.shape and (again - whole).norm() <= allowed * whole.norm():
            raise _not_made(len(single), errors, allowed, " in training mode")

    def _if_borne(self, names: set[str], last: Sequence[int] = ()) -> _Tried | None:
        """Returns what was tried with other weights or rows; None where there are none or the loss has none."""
        try:
            tried = self._tried(names, last) if names or last else None
        except MicroBatchError:  # what a mask says may be bound to something else
            return None
        return tried if tried is not None and tried.whole.isfinite() else None

    def _tried(self, names: set[str], last: Sequence[int] = ()) -> _Tried:
        def tried(length: int | None) -> _Tried:
            sample, rows = unlike_rows(self._batch, self._size, names, self._known, length, self._first, last)
            self.classes |= classes(take(self._batch, rows, self._size))
            return _Tried(sample, *_each(lambda part: loss_of(self._loss_function, part), sample, len(rows)))

        cut = (length_of_texts(self._batch) or 0) > LENGTH
        try:
            found = tried(LENGTH)
            # A row without a label that counts has no loss; any other one may have it where it was cut off.
            if not cut or last or ignoring(self._batch, self._size) or all(loss.isfinite() for loss in found.single):
                return found
        except MicroBatchError:
            if not cut or last:
                raise
        return tried(None)  # a model may need the ends of its texts

    def _matching(self, laws: frozenset[Law], tried: _Tried, allowed: float, of_gradients: float) -> frozenset[Law]:
        sample, target, losses = tried.sample, float(tried.whole), [float(loss) for loss in tried.single]
        together = {law: _together(law, sample, losses) for law in _sorted(laws | frozenset(LossReduction))}
        finite = list(filter(math.isfinite, losses))  # all but those of rows without a label
        # Losses of either sign may cancel to rounding.
        size = max(abs(target), sum(map(abs, finite)) / max(len(finite), 1)) if math.isfinite(target) else 0.0
        matching = laws & {law for law, loss in together.items() if abs(loss - target) <= allowed * size}
        if not matching or not size:  # to which every number is near
            raise _no_law(target, together, allowed, len(losses))
        different = {tuple(shares(law, sample, len(losses))) for law in matching}
        if len(different) == 1 and max(finite) - min(finite) > ALIKE * allowed * size:
            return matching
        return self._by_gradients(matching, tried, of_gradients)

    def _by_gradients(self, laws: frozenset[Law], tried: _Tried, allowed: float) -> frozenset[Law]:
        """Returns the laws by which the gradients of single rows make that of the rows together."""
        errors = self._errors(laws, tried, *self._gradients(tried))
        best = min(errors.values())
        matching = frozenset(law for law, error in errors.items() if error <= min(allowed, max(NEARLY * best, FINE)))
        if not matching:
            raise _not_made(len(tried.single), errors, allowed)
        return matching

    def _gradients(self, tried: _Tried) -> tuple[Tensor, list[Tensor]]:
        """Returns gradients of the rows together, and of each."""

        def gradients(rows: Any) -> RowGradients:
            with _computing():
                return gradients_of(self._model, lambda: loss_of(self._loss_function, rows))

        return as_vectors(*_each(gradients, tried.sample, len(tried.single)))

    def _errors(self, laws: Collection[Law], tried: _Tried, whole: Tensor, single: list[Tensor]) -> dict[Law, float]:
        """Returns errors of a gradient by laws, of the lengths of what is added up: it may cancel to rounding."""
        lengths = [float(each.norm()) for each in single]

        def error(law: Law) -> float:
            size = max(_together(law, tried.sample, lengths), float(whole.norm()), TINY)
            return float((_together(law, tried.sample, single) - whole).norm()) / size

        return {law: error(law) for law in _sorted(laws)}


def _each(of: Callable[[Any], Result], sample: Any, count: int) -> tuple[Result, list[Result]]:
    """Returns what a function gives for all rows, and for each of them."""
    # Copies: Trainer.compute_loss takes the labels out of the batch where it computes the loss itself.
    whole = of(take(sample, list(range(count)), count))
    return whole, [of(take(sample, [row], count)) for row in range(count)]


def _sorted(laws: Collection[Law]) -> list[Law]:
    """Returns laws in the order of messages: those by tensors of a batch come last."""
    known = list[Law](LossReduction)
    return sorted(laws, key=lambda law: (known.index(law) if law in known else len(known), law.value))


def _together(law: Law, sample: Any, single: Sequence[Value]) -> Value:
    """Returns what the losses or gradients of single rows make by a law."""
    by_rows = shares(law, sample, len(single))
    return cast("Value", sum(share * each for share, each in zip(by_rows, single, strict=True) if share))


def loss_of(loss_function: LossFunction, batch: Any) -> Tensor:
    """Returns the loss of a batch; raises `MicroBatchError` where it has none that is one number."""
    with _computing():
        loss = loss_function(batch)
    if not loss.is_floating_point() or loss.numel() != 1:
        raise MicroBatchError(f"the loss is a tensor of shape {list(loss.shape)}, {loss.dtype}; it must be one number")
    return loss


@contextmanager
def _computing() -> Generator[None]:
    try:
        yield
    except (DAFError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model does with a part of a batch
        raise MicroBatchError(
            f"the loss of a few rows of the batch cannot be computed: {error!r}. Micro-batches need a loss that any "
            "rows of a batch have; train without them"
        ) from error


def _not_made(rows: int, errors: Mapping[Law, float], allowed: float, mode: str = "") -> ComparesRowsError:
    measured = ", ".join(f"{error:.2g} by the law of {law.value}" for law, error in errors.items())
    return ComparesRowsError(
        f"the gradients of {rows} rows one by one do not make that of the rows together{mode}: it is off by "
        f"{measured}, and {allowed:.1g} is allowed. {OTHER_LOSS}"
    )


def _no_law(whole: float, together: Mapping[Law, float], allowed: float, rows: int) -> MicroBatchError:
    measured = ", ".join(f"{loss:.8g} by the law of {law.value}" for law, loss in together.items())
    return (ComparesRowsError if whole and math.isfinite(whole) else MicroBatchError)(
        f"the loss of {rows} rows is {whole:.8g}, and their losses one by one give {measured}; one of these must be "
        f"equal within {allowed:.1g} of it, and not zero. {OTHER_LOSS}"
    )


@contextmanager
def _tolerance(model: nn.Module, compiled: bool) -> Generator[list[float]]:
    """Gives a list of the relative differences that what was run inside may show by rounding.

    `compiled` says whether a part of the model is.
    """
    found = [FINE]
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu" or torch.get_float32_matmul_precision() != "highest":
        found.append(COARSE)
    if compiled:  # hooks would have it compiled again
        found.append(COARSE)

    def note(_module: nn.Module, _inputs: object, output: Any) -> None:
        if any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors_in(output)):
            found.append(COARSE)

    with ExitStack() as stack:
        for module in model.modules() if len(found) == 1 else ():
            stack.callback(module.register_forward_hook(note).remove)
        yield found
