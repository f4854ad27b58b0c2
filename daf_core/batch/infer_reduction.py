"""Finds the law of a loss: a few rows together and one by one, through the user's own loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_private import is_compiled
from daf_core.batch.loss_reduction import Law, LossReduction, counts_of, safest, weights
from daf_core.batch.rows import rows_of, take, tensors_in
from daf_core.batch.unlike_rows import classes, laws_of, unlike_rows, weighing
from daf_core.distributed import apart
from daf_core.errors import DAFError, MicroBatchError
from daf_core.snapshots.measurement import measuring
from daf_core.snapshots.step import gradients_aside

MOST_TESTS = 10
"""Tests up to which the law is looked for again where a batch brings new classes: what looks like classes may be
numbers of samples, which are always new."""

FINE, COARSE = 1e-5, 1e-3
"""Relative differences between losses that rounding explains: in float32 on a CPU, and where a module computes in half
precision or a GPU in TF32, as it does in convolutions by default."""

GRADIENTS = {FINE: 1e-3, COARSE: 5e-2}  # the same of gradients

ALIKE = 30
"""Times the allowed difference: the spread of the rows' losses up to which gradients are compared as well. A mean of
such losses does not show weights of rows that are off by .03."""

ELEMENTS = 4096  # of the gradient of each parameter that are compared

OTHER_LOSS = (
    "A loss that compares rows with each other (contrastive losses), or draws random numbers, is another one in parts: "
    "train without micro-batches, on smaller batches"
)

LossFunction = Callable[[Any], Tensor]
Value = TypeVar("Value", float, Tensor)


class MicroBatchWeights:
    """The weights of a batch's parts, by the law that the loss has been seen to follow.

    The law is looked for at the first batch. Where several agree with what was seen, that is done again at the first
    batch for which they say different weights, at each batch with new classes, and where masks, weights, lengths or
    padding of rows differ for the first time: a loss that weighs classes, or counts what a mask does, is a mean over
    rows as long as all rows are alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._laws = frozenset[Law](LossReduction)
        self._classes: set[int] = set()
        self._weighing: set[str] = set()
        self._tests = 0

    def of(self, batch: Any, parts: int, loss_function: LossFunction) -> list[float]:
        """Returns the weight of each part that `split` makes; the loss function leaves no trace.

        Raises:
            MicroBatchError: No law agrees, or the loss cannot be computed for a few rows.
        """
        new = classes(batch) - self._classes if self._tests < MOST_TESTS else set[int]()
        others = weighing(batch, self._weighing)
        disagree = len(self._laws) > 1 and len({tuple(weights(law, batch, parts)) for law in self._laws}) > 1
        if new or others or disagree:
            self._classes |= new
            self._weighing |= others
            self._tests += 1
            # Where rows weighed the same so far, a mean by weights was one over rows.
            possible = laws_of(others, batch) if LossReduction.ROWS in self._laws else frozenset[Law]()
            self._laws = matching_laws(self._model, batch, loss_function, self._laws | possible)
        return weights(safest(self._laws, batch), batch, parts)


def matching_laws(
    model: nn.Module,
    batch: Any,
    loss_function: LossFunction,
    among: frozenset[Law] = frozenset(LossReduction),
) -> frozenset[Law]:
    """Returns the laws, of those that may be, that a loss follows on at most `MOST_ROWS` rows of a batch.

    The model, as the loss function calls it, is put in evaluation mode meanwhile, and nothing leaves a trace. What
    counts in the rows that are tried differs: see `unlike_rows`. Where their losses are nearly the same, as those of a
    head of zeros are, gradients have to follow the law as well.

    Raises:
        MicroBatchError: No law agrees, the batch has one row, or the loss cannot be computed for a few rows.
    """
    size = rows_of(batch) or 0
    if size < 2:
        raise MicroBatchError(f"a batch of {size} rows cannot be cut into parts; give one of two rows or more")
    with measuring(model), apart(model):
        model.eval()  # no dropout tells rows and batch apart; `measuring` puts the modes back
        with _tolerance(model) as tolerances, torch.no_grad():
            sample, whole, single = _tried(loss_function, batch, size, weighing(batch))
        allowed = max(max(tolerances), 2 * torch.finfo(whole.dtype).eps)
        target, losses = float(whole), [float(loss) for loss in single]
        together = {law: _together(law, sample, losses) for law in _sorted(among | frozenset(LossReduction))}
        matching = among & {law for law, loss in together.items() if abs(loss - target) <= allowed * abs(target)}
        if not matching or not target or not math.isfinite(target):  # to which every number is near
            raise _no_law(target, together, allowed, len(single))
        if max(losses) - min(losses) <= ALIKE * allowed * abs(target):
            rounding = GRADIENTS[FINE if allowed == FINE else COARSE]
            matching = _by_gradients(matching, model, loss_function, sample, len(single), rounding)
    return matching


def _tried(loss_function: LossFunction, batch: Any, size: int, weighing: set[str]) -> tuple[Any, Tensor, list[Tensor]]:
    """Returns a few rows of a batch, with other weights of some if these may change, their loss, and that of each."""
    sample, count = unlike_rows(batch, size, weighing)
    try:
        whole, single = _each(lambda rows: _loss(loss_function, rows), sample, count)
    except MicroBatchError:
        if not weighing:
            raise
    else:
        if whole.isfinite() or not weighing:
            return sample, whole, single
    return _tried(loss_function, batch, size, set())  # what a mask says may be bound to something else


def _each(of: Callable[[Any], Tensor], sample: Any, count: int) -> tuple[Tensor, list[Tensor]]:
    """Returns what a function gives for all rows, and for each of them."""
    # Copies: Trainer.compute_loss takes the labels out of the batch where it computes the loss itself.
    whole = of(take(sample, list(range(count)), count))
    return whole, [of(take(sample, [row], count)) for row in range(count)]


def _by_gradients(
    laws: frozenset[Law],
    model: nn.Module,
    loss_function: LossFunction,
    sample: Any,
    count: int,
    allowed: float,
) -> frozenset[Law]:
    """Returns the laws by which the gradients of single rows make that of the rows together."""

    def gradient(rows: Any) -> Tensor:
        with gradients_aside(model):
            loss = _loss(loss_function, rows)
            if loss.requires_grad:
                loss.backward()
            found = [each.grad for each in model.parameters() if each.grad is not None]
            return torch.cat([_some_elements(each) for each in found])

    whole, single = _each(gradient, sample, count)
    size = whole.norm().clamp(min=torch.finfo(whole.dtype).tiny)
    errors = {law: float((_together(law, sample, single) - whole).norm() / size) for law in _sorted(laws)}
    matching = frozenset(law for law, error in errors.items() if error <= allowed)
    if not matching:
        measured = ", ".join(f"{error:.2g} by the law of {law.value}" for law, error in errors.items())
        raise MicroBatchError(
            f"the gradients of {count} rows one by one, whose losses are nearly the same, do not make that of the rows "
            f"together: it is off by {measured}, and {allowed:.1g} is allowed. {OTHER_LOSS}"
        )
    return matching


def _some_elements(gradient: Tensor) -> Tensor:
    """Returns up to `ELEMENTS` of its elements, evenly spaced, in float64 on the CPU."""
    flat = gradient.reshape(-1)
    return flat[:: math.ceil(flat.numel() / ELEMENTS) or 1].double().cpu()


def _sorted(laws: Collection[Law]) -> list[Law]:
    """Returns laws in the order of messages: those by tensors of a batch come last."""
    known = list[Law](LossReduction)
    return sorted(laws, key=lambda law: (known.index(law) if law in known else len(known), law.value))


def _together(law: Law, sample: Any, single: Sequence[Value]) -> Value:
    """Returns what the losses or gradients of single rows make by a law."""
    counts = [1] * len(single) if law is LossReduction.SUM else counts_of(law, sample, len(single))
    summed = cast("Value", sum(count * each for count, each in zip(counts, single, strict=True) if count))
    return summed if law is LossReduction.SUM else summed / sum(counts)


def _loss(loss_function: LossFunction, batch: Any) -> Tensor:
    try:
        loss = loss_function(batch)
    except (DAFError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model does with a part of a batch
        raise MicroBatchError(
            f"the loss of a few rows of the batch cannot be computed: {error!r}. Micro-batches need a loss that any "
            "rows of a batch have; train without them"
        ) from error
    if not loss.is_floating_point() or loss.numel() != 1:
        raise MicroBatchError(f"the loss is a tensor of shape {list(loss.shape)}, {loss.dtype}; it must be one number")
    return loss


def _no_law(whole: float, together: Mapping[Law, float], allowed: float, rows: int) -> MicroBatchError:
    measured = ", ".join(f"{loss:.8g} by the law of {law.value}" for law, loss in together.items())
    return MicroBatchError(
        f"the loss of {rows} rows is {whole:.8g}, and their losses one by one give {measured}; one of these must be "
        f"equal within {allowed:.1g} of it, and not zero. {OTHER_LOSS}"
    )


@contextmanager
def _tolerance(model: nn.Module) -> Generator[list[float]]:
    """Gives a list of the relative differences that what was run inside may show by rounding."""
    found = [FINE]
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu" or torch.get_float32_matmul_precision() != "highest":
        found.append(COARSE)
    if any(is_compiled(module) for module in model.modules()):  # hooks would have it compiled again
        found.append(COARSE)

    def note(_module: nn.Module, _inputs: object, output: Any) -> None:
        if any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors_in(output)):
            found.append(COARSE)

    with ExitStack() as stack:
        for module in model.modules() if len(found) == 1 else ():
            stack.callback(module.register_forward_hook(note).remove)
        yield found
