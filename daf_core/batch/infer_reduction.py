"""Finds the law of a loss: a few rows together and one by one, through the user's own loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from daf_core.autograd.torch_private import is_compiled
from daf_core.batch.loss_reduction import Law, LossReduction, counts_of, safest, weights
from daf_core.batch.rows import by_rows, named_tensors, rows_of, take, tensors_in
from daf_core.batch.unlike_rows import Class, classes, laws_of, unlike_rows, weighing
from daf_core.distributed import apart
from daf_core.errors import DAFError, MicroBatchError
from daf_core.model.blocks import Block, layers_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.measurement import measuring
from daf_core.snapshots.step import backward_beside, gradients_aside

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

TINY = 1e-300  # what a gradient of zeros is divided by

OTHER_LOSS = (
    "A loss that compares rows with each other (contrastive losses), or draws random numbers, is another one in parts: "
    "train without micro-batches, on smaller batches"
)

LossFunction = Callable[[Any], Tensor]
Value = TypeVar("Value", float, Tensor)
Result = TypeVar("Result")


class MicroBatchWeights:
    """The weights of a batch's parts, by the law that the loss has been seen to follow.

    The law is looked for at the first batch. Where several agree with what was seen, that is done again at the first
    batch for which they say different weights, at each batch with new classes, and where masks, weights, lengths or
    padding of rows differ for the first time: a loss that weighs classes, or counts what a mask does, is a mean over
    rows as long as all rows are alike. Batches of other tensors have a law of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[frozenset[tuple[str, int]], _Seen] = {}

    def of(self, batch: Any, parts: int, loss_function: LossFunction) -> list[float]:
        """Returns the weight of each part that `split` makes; the loss function leaves no trace.

        Raises:
            MicroBatchError: No law agrees, or the loss cannot be computed for a few rows.
        """
        kind = frozenset((name, tensor.dim()) for name, tensor in named_tensors(batch))
        seen = self._seen.setdefault(kind, _Seen())
        others = weighing(batch, seen.weighing)
        disagree = len(seen.laws) > 1 and len({tuple(weights(law, batch, parts)) for law in seen.laws}) > 1
        if others or disagree or seen.has_new_classes(batch):
            with _evaluating(self._model):
                seen.add(_Test(self._model, batch, loss_function, seen.classes), others)
                while seen.has_new_classes(batch):
                    seen.add(_Test(self._model, batch, loss_function, seen.classes))
        return weights(safest(seen.laws, batch), batch, parts)


class _Seen:
    """What was seen of a loss: the laws that agree with it, classes, and names of what differed between rows."""

    def __init__(self) -> None:
        self.laws = frozenset[Law](LossReduction)
        self.classes: set[Class] = set()
        self.weighing: set[str] = set()
        self._tests = 0

    def has_new_classes(self, batch: Any) -> bool:
        """Whether there are classes to be tried in a batch."""
        return self._tests < MOST_TESTS and bool(classes(batch) - self.classes)

    def add(self, test: _Test, others: Collection[str] = ()) -> None:
        """Runs a test; `others` are names of what differs between rows for the first time."""
        # Where rows weighed the same so far, a mean by weights was one over rows.
        possible = laws_of(others, test.batch) if LossReduction.ROWS in self.laws else frozenset[Law]()
        self.laws = test.matching(self.laws | possible)
        self.classes |= test.classes
        self.weighing |= {*others}
        self._tests += 1


def matching_laws(model: nn.Module, batch: Any, loss_function: LossFunction) -> frozenset[Law]:
    """Returns the laws of `LossReduction` that a loss follows on at most `MOST_ROWS` rows of a batch.

    Raises:
        MicroBatchError: No law agrees, the batch has one row, or the loss cannot be computed for a few rows.
    """
    with _evaluating(model):
        return _Test(model, batch, loss_function).matching(frozenset[Law](LossReduction))


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Puts a model in evaluation mode, as the loss function calls it; nothing leaves a trace of what runs inside."""
    with measuring(model), apart(model):
        model.eval()  # no dropout tells rows and batch apart; `measuring` puts the modes back
        yield


class _Tried(NamedTuple):
    """Rows that were tried: their loss, and that of each."""

    sample: Any
    whole: Tensor
    single: list[Tensor]


class _Gradients(NamedTuple):
    """Some elements of those of parameters, and of what the last block gives, for each of its rows."""

    parameters: Tensor
    outputs: list[Tensor | None]


class _Test:
    """Tries a few rows of a batch, which have classes that are not known yet if there are any.

    What counts in the rows differs: see `unlike_rows`. What was changed for that is tried as it is, too.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss_function: LossFunction, known: Collection[Class] = ()
    ) -> None:
        self._model, self.batch, self._loss_function, self._known = model, batch, loss_function, known
        self._size = rows_of(batch) or 0
        if self._size < 2:
            raise MicroBatchError(
                f"a batch of {self._size} rows cannot be cut into parts; give one of two rows or more"
            )
        self.classes: set[Class] = set()

    def matching(self, laws: frozenset[Law]) -> frozenset[Law]:
        """Returns the laws, of those that may be, that the loss follows.

        Where losses of rows are nearly the same, as those of a head of zeros are, gradients have to follow them, too.
        """
        with _tolerance(self._model) as tolerances, torch.no_grad():
            changed = weighing(self.batch)
            tried = [each for each in (self._changed(changed), self._tried(set[str]())) if each is not None]
        for each in tried:
            laws = self._matching(laws, each, max(max(tolerances), 2 * torch.finfo(each.whole.dtype).eps))
        return laws

    def _changed(self, names: set[str]) -> _Tried | None:
        """Returns what was tried with other weights; None where there are none, or the loss does not bear them."""
        try:
            tried = self._tried(names) if names else None
        except MicroBatchError:  # what a mask says may be bound to something else
            return None
        return tried if tried is not None and tried.whole.isfinite() else None

    def _tried(self, names: set[str]) -> _Tried:
        sample, rows = unlike_rows(self.batch, self._size, names, self._known)
        self.classes |= classes(take(self.batch, rows, self._size))
        return _Tried(sample, *_each(lambda part: _loss(self._loss_function, part), sample, len(rows)))

    def _matching(self, laws: frozenset[Law], tried: _Tried, allowed: float) -> frozenset[Law]:
        sample, target, losses = tried.sample, float(tried.whole), [float(loss) for loss in tried.single]
        together = {law: _together(law, sample, losses) for law in _sorted(laws | frozenset(LossReduction))}
        matching = laws & {law for law, loss in together.items() if abs(loss - target) <= allowed * abs(target)}
        if not matching or not target or not math.isfinite(target):  # to which every number is near
            raise _no_law(target, together, allowed, len(losses))
        if max(losses) - min(losses) > ALIKE * allowed * abs(target):
            return matching
        return self._by_gradients(matching, sample, len(losses), GRADIENTS[FINE if allowed == FINE else COARSE])

    def _by_gradients(self, laws: frozenset[Law], sample: Any, count: int, allowed: float) -> frozenset[Law]:
        """Returns the laws by which the gradients of single rows make that of the rows together.

        They are those of parameters outside of blocks, and of what the last block gives. In blocks nothing is kept for
        backward: no plan has room for the activations of so many rows.
        """
        trained = [each for each in self._model.parameters() if each.requires_grad]

        def gradients(rows: Any) -> _Gradients:
            with gradients_aside(self._model), _without_graph(layers_of(self._model)) as outputs:
                loss = _loss(self._loss_function, rows)
                with _computing():
                    if loss.requires_grad:
                        backward_beside(loss, (*trained, *outputs))
                found = [_some_elements(each.grad.reshape(1, -1)) for each in trained if each.grad is not None]
                of_rows = [None if each.grad is None else _some_elements(by_rows(each.grad)) for each in outputs]
            return _Gradients(torch.cat([*found, torch.zeros(1, 0, device="cpu")], 1).flatten(), of_rows)

        whole, single = _vectors(*_each(gradients, sample, count))
        errors = {law: self._error(law, sample, whole, single) for law in _sorted(laws)}
        matching = frozenset(law for law, error in errors.items() if error <= allowed)
        if not matching:
            measured = ", ".join(f"{error:.2g} by the law of {law.value}" for law, error in errors.items())
            raise MicroBatchError(
                f"the gradients of {count} rows one by one, whose losses are nearly the same, do not make that of the "
                f"rows together: it is off by {measured}, and {allowed:.1g} is allowed. {OTHER_LOSS}"
            )
        return matching

    def _error(self, law: Law, sample: Any, whole: Tensor, single: list[Tensor]) -> float:
        """Returns the error of a gradient by a law, of the lengths of what is added up: it may cancel to rounding."""
        size = _together(law, sample, [float(each.norm()) for each in single])
        return float((_together(law, sample, single) - whole).norm()) / max(size, float(whole.norm()), TINY)


def _each(of: Callable[[Any], Result], sample: Any, count: int) -> tuple[Result, list[Result]]:
    """Returns what a function gives for all rows, and for each of them."""
    # Copies: Trainer.compute_loss takes the labels out of the batch where it computes the loss itself.
    whole = of(take(sample, list(range(count)), count))
    return whole, [of(take(sample, [row], count)) for row in range(count)]


def _vectors(whole: _Gradients, single: list[_Gradients]) -> tuple[Tensor, list[Tensor]]:
    """Returns gradients as one vector each: in those of single rows what a block gives for others has none."""
    count = len(single)

    def is_of_rows(*gradients: Tensor | None) -> bool:
        sizes = {None if each is None else each.shape[1] for each in gradients}
        return len(sizes) == 1 and [None if each is None else len(each) for each in gradients] == [count, *[1] * count]

    outputs = [each.outputs for each in (whole, *single)]
    alike = len({len(each) for each in outputs}) == 1
    places = [place for place, each in enumerate(zip(*outputs, strict=alike)) if alike and is_of_rows(*each)]
    found: list[list[Tensor]] = [[each.parameters] for each in (whole, *single)]
    for place in places:
        rows = [cast("Tensor", each[place]) for each in outputs]
        found[0].append(rows[0].flatten())
        for row, each in enumerate(rows[1:]):
            alone = torch.zeros_like(rows[0])
            alone[row] = each[0]
            found[1 + row].append(alone.flatten())
    first, *others = map(torch.cat, found)
    return first, others


@contextmanager
def _without_graph(blocks: Collection[Block]) -> Generator[list[Tensor]]:
    """Gives a list of leaves for what the last of some blocks gives inside; none keeps how it came to that."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[-1].clone()  # of a leaf nothing may be written to

    def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves.clear()
        with torch.no_grad():
            output = forward(*args, **kwargs)
        return tree_map(leaf, output) if torch.is_grad_enabled() else output

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(ForwardPatch(block.module, around).remove)
        yield leaves


def _some_elements(rows: Tensor) -> Tensor:
    """Returns up to `ELEMENTS` of each row, evenly spaced, in float64 on the CPU."""
    return rows[:, :: math.ceil(rows.shape[1] / ELEMENTS) or 1].to("cpu", torch.float64)


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
