"""Finds the law of a loss: a few rows together and one by one, through the user's own loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_private import is_compiled
from daf_core.batch.loss_reduction import LossReduction, counts_of, ignoring, safest, weights
from daf_core.batch.rows import IGNORED, named_tensors, rows_of, take, tensors_in
from daf_core.batch.samples import short_texts
from daf_core.distributed import apart
from daf_core.errors import DAFError, MicroBatchError
from daf_core.snapshots.measurement import measuring

MOST_ROWS = 4  # rows that are tried

LENGTH = 16
"""Tokens of each that are tried: the logits of 4 rows take 13 MB with a vocabulary of 50,000. Micro-batches are for
those who have no room."""

MOST_CLASSES = 1000
MOST_TESTS = 10
"""Classes in a batch, and tests so far, up to which the law is looked for again where a batch brings new classes: what
looks like classes may be numbers of samples, new in every batch."""

FINE, COARSE = 1e-5, 1e-3
"""Relative differences between losses that rounding explains: in float32 on a CPU, and where a module computes in half
precision or a GPU in TF32, as it does in convolutions by default."""

LossFunction = Callable[[Any], Tensor]


class MicroBatchWeights:
    """The weights of a batch's parts, by the law that the loss has been seen to follow.

    The law is looked for at the first batch. Where several agree with what was seen, that is done again at the first
    batch for which they say different weights, at each batch with new classes, and where a mask leaves something out
    for the first time: a loss that weighs classes, or counts what a mask does, is a mean over rows as long as all rows
    are alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._laws = frozenset(LossReduction)
        self._classes: set[int] = set()
        self._masks: set[str] = set()
        self._tests = 0

    def of(self, batch: Any, parts: int, loss_function: LossFunction) -> list[float]:
        """Returns the weight of each part that `split` makes; the loss function leaves no trace.

        Raises:
            MicroBatchError: No law agrees, or the loss cannot be computed for a few rows.
        """
        new = _classes(batch) - self._classes if self._tests < MOST_TESTS else set[int]()
        masks = _masks(batch) - self._masks
        disagree = len(self._laws) > 1 and len({tuple(weights(law, batch, parts)) for law in self._laws}) > 1
        if new or masks or disagree:
            self._classes |= new
            self._masks |= masks
            self._tests += 1
            self._laws = matching_laws(self._model, batch, loss_function, self._laws)
        return weights(safest(self._laws, batch), batch, parts)


def matching_laws(
    model: nn.Module,
    batch: Any,
    loss_function: LossFunction,
    among: frozenset[LossReduction] = frozenset(LossReduction),
) -> frozenset[LossReduction]:
    """Returns the laws, of those that agreed before, that a loss follows on at most `MOST_ROWS` rows of a batch.

    The model, as the loss function calls it, is put in evaluation mode meanwhile, and nothing leaves a trace. Where
    labels are ignored in the batch, or masks leave something out, some of the rows' others are, too, so that the rows
    differ in how many count. No other label is changed: which values a loss bears, only its own batches tell.

    Raises:
        MicroBatchError: No law agrees, the batch has one row, or the loss cannot be computed for a few rows.
    """
    size = rows_of(batch) or 0
    if size < 2:
        raise MicroBatchError(f"a batch of {size} rows cannot be cut into parts; give one of two rows or more")
    with measuring(model), apart(model), _tolerance(model) as tolerances, torch.no_grad():
        model.eval()  # no dropout tells rows and batch apart; `measuring` puts the modes back
        sample, whole, single = _tried(loss_function, batch, size, _masks(batch))
    allowed = max(max(tolerances), 2 * torch.finfo(whole.dtype).eps)
    together = {law: _together(law, sample, single) for law in LossReduction}
    target = float(whole)
    matching = {law for law, loss in together.items() if abs(loss - target) <= allowed * abs(target)}
    if not matching & among or not target or not math.isfinite(target):  # to which every number is near
        raise _no_law(target, together, allowed, len(single))
    return frozenset(matching & among)


def _tried(loss_function: LossFunction, batch: Any, size: int, masks: set[str]) -> tuple[Any, Tensor, list[Tensor]]:
    """Returns a few rows of a batch, with some masks thinned out if these may be, their loss, and that of each."""
    sample, count = _sample(batch, size, masks)
    try:
        # A copy: Trainer.compute_loss takes the labels out of the batch where it computes the loss itself.
        whole = _loss(loss_function, take(sample, list(range(count)), count))
        single = [_loss(loss_function, take(sample, [row], count)) for row in range(count)]
    except MicroBatchError:
        if not masks:
            raise
    else:
        if whole.isfinite() or not masks:
            return sample, whole, single
    return _tried(loss_function, batch, size, set())  # what a mask says may be bound to something else


def _sample(batch: Any, size: int, masks: set[str]) -> tuple[Any, int]:
    """Returns copies of the rows with the most labels, thinned out as some masks are, and how many they are."""
    labels = ignoring(batch, size)
    order = _unlike_first(batch, size)
    if labels:
        counted = (labels[0] != IGNORED).reshape(size, -1)
        keys: list[tuple[bool, int]] = list(zip(counted[:, 0].tolist(), counted.sum(1).tolist(), strict=True))
        order.sort(key=keys.__getitem__, reverse=True)
    rows = order[:MOST_ROWS]
    sample = short_texts(take(batch, rows, size), LENGTH)
    # By their names: what is left of longer texts may have no label that is ignored.
    ignored = {name for name, tensor in named_tensors(batch) if any(tensor is each for each in labels)}
    for name, tensor in named_tensors(sample):
        if name in ignored:
            _thin(tensor)
        elif name in masks:
            _thin_mask(tensor)
    return sample, len(rows)


def _masks(batch: Any) -> set[str]:
    """Returns the names of what has a one or a zero for each place of each row, and not as many ones in all rows."""
    size = rows_of(batch)
    found = [(name, each) for name, each in named_tensors(batch) if each.dim() == 2 and each.shape[0] == size]
    masks = [(name, each.count_nonzero(1)) for name, each in found if ((each == 0) | (each == 1)).all()]
    return {name for name, counts in masks if (counts != counts[0]).any()}


def _row_labels(batch: Any) -> list[list[int]]:
    """Returns the integers that a batch has one of for each row, as classes are."""
    size = rows_of(batch)
    whole = [tensor for tensor in tensors_in(batch) if tensor.dim() == 1 and tensor.shape[0] == size]
    return [tensor.tolist() for tensor in whole if not tensor.is_floating_point() and not tensor.is_complex()]


def _classes(batch: Any) -> set[int]:
    """Returns the classes in a batch, if they are few: a loss may weigh each of them in its own way."""
    found = set().union(*_row_labels(batch))
    return found if len(found) <= MOST_CLASSES else set()


def _unlike_first(batch: Any, size: int) -> list[int]:
    """Returns the numbers of the rows, those first whose class none before them has."""
    order = list(range(size))
    for labels in _row_labels(batch)[:1]:
        first = [labels.index(value) for value in dict.fromkeys(labels)]
        order = first + [row for row in order if row not in set(first)]
    return order


def _thin(labels: Tensor) -> None:
    """Leaves the first row a label at its first place and one more, and the second row none at its first place.

    The laws of labels then say different weights than that of rows, and different ones from each other.
    """
    rows = labels.reshape(labels.shape[0], -1)
    places = (rows[0] != IGNORED).nonzero().flatten().tolist()
    kept = places[:2] if places[:1] == [0] and rows.shape[1] > 1 else places[:1]
    if rows.shape[1] == 1:  # of two labels one has to stay
        kept = [] if bool((rows[1:] != IGNORED).any()) else kept
    rows[0, [place for place in places if place not in kept]] = IGNORED
    if bool((rows[1, 1:] != IGNORED).any()):
        rows[1, 0] = IGNORED
    labels.copy_(rows.view(labels.shape))  # where they lie in another order the rows are a copy


def _thin_mask(mask: Tensor) -> None:
    """Leaves the row with the most ones half of them: where rows differ by a few, rounding hides how laws differ.

    Where there are none, as in a mask of padding, half of the first row is made of ones.
    """
    counts = mask.count_nonzero(1)
    row = int(counts.argmax())
    places = mask[row].nonzero().flatten()
    if len(places):
        mask[row, places[max(len(places) // 2, 1) :]] = 0
    else:
        mask[0, mask.shape[1] // 2 :] = 1


def _together(law: LossReduction, sample: Any, single: list[Tensor]) -> float:
    losses = [float(loss) for loss in single]
    if law is LossReduction.SUM:
        return sum(losses)
    counts = counts_of(law, sample, len(losses))
    return sum(count * loss for count, loss in zip(counts, losses, strict=True) if count) / sum(counts)


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
    return loss.detach()


def _no_law(whole: float, together: Mapping[LossReduction, float], allowed: float, rows: int) -> MicroBatchError:
    measured = ", ".join(f"{loss:.8g} by the law of {law.value}" for law, loss in together.items())
    return MicroBatchError(
        f"the loss of {rows} rows is {whole:.8g}, and their losses one by one give {measured}; one of these must be "
        f"equal within {allowed:.1g} of it, and not zero. A loss that compares rows with each other (contrastive "
        "losses), or draws random numbers, is another one in parts: train without micro-batches, on smaller batches"
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
