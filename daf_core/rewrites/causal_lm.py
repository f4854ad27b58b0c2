"""Causal language models of transformers: the loss without the logits, and which of them can have it."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from daf_core.autograd.torch_private import is_tracing, is_transforming
from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.base import Undo, is_bare, is_watched, qualified_name
from daf_core.rewrites.chunked_loss import linear_cross_entropy_sum
from daf_core.rewrites.lazy_logits import LazyLogits, LogitsSource, Updates
from daf_core.unsupported.table import Feature, unsupported_reasons

_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LOSSES = "transformers.loss.loss_utils"
_LOSS = f"{_LOSSES}.ForCausalLMLoss"

_FUSED = {"liger_kernel", "trl"}  # packages whose forward for models computes the loss by itself, without logits


class ChunkedCausalLMLoss:
    """The loss of a causal language model, from its lazy logits.

    Copies and pickles of it are the function it replaces, transformers' ``ForCausalLMLoss``, which computes the loss of
    logits that are there. `remove` makes the model the one it was; `holders` count who wants it to be rewritten.
    """

    def __init__(self, original: Callable[..., Tensor], remove: Callable[[], None]) -> None:
        self._original = original
        self.remove = remove
        self.holders = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Needs nothing of DAF where a pickle is read."""
        return operator.getitem, ((self._original,), 0)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns what transformers' function of the same signature returns."""
        targets = shift_labels
        if targets is None and labels is not None:
            targets = _shifted(labels, ignore_index)
        if targets is None or not _is_pending(logits, vocab_size, targets):
            options: dict[str, Any] = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._original(logits, labels, vocab_size, **options, shift_labels=shift_labels, **kwargs)
        return _mean_loss(logits, targets, ignore_index, num_items_in_batch)


def smoothed_loss(
    logits: Tensor,
    labels: Tensor,
    epsilon: float,
    ignore_index: int = -100,
    shift_labels: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor | None:
    """Returns what transformers' ``LabelSmoother`` returns, from lazy logits; None of any others.

    Args:
        logits: (..., vocabulary).
        labels: Indices into the vocabulary, of the shape of the logits without their last dimension.
        epsilon: Part of a label's probability that all tokens share.
        ignore_index: The label of tokens that do not count.
        shift_labels: Whether a token's label is that of the next one.
        num_items_in_batch: What the sum is divided by; None for the number of labels that count.
    """
    targets = _shifted(labels, ignore_index) if shift_labels else labels
    if not _is_pending(logits, logits.shape[-1], targets):
        return None
    return _mean_loss(logits, targets, ignore_index, num_items_in_batch, epsilon)


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Returns for each token the one after it, which is what it predicts."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _mean_loss(
    logits: LazyLogits,
    targets: Tensor,
    ignore_index: int,
    num_items_in_batch: Tensor | int | None,
    smoothing: float = 0.0,
) -> Tensor:
    source, targets = logits.source, targets.reshape(-1).to(logits.device)
    source.gave_loss = True
    hidden = source.hidden.reshape(-1, source.hidden.shape[-1])
    given = hidden, source.weight, source.bias, targets, ignore_index, source.dtype
    total = linear_cross_entropy_sum(*given, logits.bend, smoothing)
    divisor = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


def rewrite_loss(model: nn.Module, head: nn.Linear) -> Undo:
    """Makes a model compute its loss without logits while it trains, given its output projection from `find_head`.

    A model that is rewritten already stays so until everybody has undone it, by one call each of what is returned.
    """
    present = vars(model).get("_loss_function")
    loss = present if isinstance(present, ChunkedCausalLMLoss) else _install(model, head)
    loss.holders += 1

    def undo() -> None:
        loss.holders -= 1
        if not loss.holders:
            loss.remove()

    return undo


def _install(model: nn.Module, head: nn.Linear) -> ChunkedCausalLMLoss:
    owner: Any = model
    previous = vars(model).get("_loss_function")
    updates = Updates(head.parameters())

    def project(forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        own = updates.watch(head.parameters()) and not is_watched(head)
        if kwargs or len(args) != 1 or not own or not _trains(head, args[0]):
            return forward(*args, **kwargs)
        return LazyLogits.of(LogitsSource(args[0], head.weight, head.bias, updates))

    wrapper = ForwardPatch(head, project)

    def remove() -> None:
        wrapper.remove()
        if vars(model).get("_loss_function") is not loss:
            return  # the user has set another one meanwhile
        del owner._loss_function
        if previous is not None:
            owner._loss_function = previous

    loss = owner.loss_function = ChunkedCausalLMLoss(owner.loss_function, remove)
    return loss


def _trains(head: nn.Linear, hidden: Tensor) -> bool:
    if not head.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if is_tracing() or is_transforming():
        return False
    source = LogitsSource(hidden, head.weight, head.bias)
    tensors = source.inputs
    plain = all(type(tensor) in (Tensor, nn.Parameter) and tensor.device == hidden.device for tensor in tensors)
    same = source.dtype is not hidden.dtype or all(tensor.dtype is hidden.dtype for tensor in tensors)
    return plain and same and any(tensor.requires_grad for tensor in tensors)


def _is_pending(logits: Tensor, vocab_size: int, targets: Tensor) -> TypeGuard[LazyLogits]:
    if not isinstance(logits, LazyLogits) or logits.source.is_computed:
        return False
    return logits.shape[-1] == vocab_size and logits.numel() == targets.numel() * vocab_size


def find_head(model: nn.Module) -> nn.Linear | None:
    """Returns the output projection of a causal language model; None where its loss stays as it is."""
    owner: Any = model
    rewritten = isinstance(vars(model).get("_loss_function"), ChunkedCausalLMLoss)
    if not has_head(model) or (not rewritten and unsupported_reasons(LOSSES_WITHOUT_LOGITS, model)):
        return None
    return owner.get_output_embeddings()


def has_head(model: nn.Module) -> bool:
    """Whether a module is a model of transformers with an output projection of any kind."""
    owner: Any = model
    is_pretrained = any(qualified_name(base) == _MODEL for base in type(model).__mro__)
    return is_pretrained and owner.get_output_embeddings() is not None


def _other_layer(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return None if type(head) is nn.Linear else type(head).__name__


def _other_weight(model: Any) -> bool:
    head = model.get_output_embeddings()
    plain = type(getattr(head, "weight", None)) is nn.Parameter
    return type(head) is nn.Linear and not (plain and head.weight.shape == (head.out_features, head.in_features))


def _is_fused(model: Any) -> bool:
    # What wraps a function has that one's module, by functools.wraps, and globals of its own.
    layer, modules = model.forward, set[str]()
    while layer is not None:
        layer = getattr(layer, "__func__", layer)
        modules |= {getattr(layer, "__module__", ""), getattr(layer, "__globals__", {}).get("__name__", "")}
        layer = getattr(layer, "__wrapped__", None)
    return any(module.partition(".")[0] in _FUSED for module in modules)


def _other_loss(model: Any) -> bool:
    # A class that computes its loss by other means reads the logits.
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and "forward" in vars(kind)]
    codes = [getattr(inspect.unwrap(vars(kind)["forward"]), "__code__", None) for kind in kinds]
    # Not `model.loss_function`: transformers warns where it takes the default.
    known = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", {})
    default = known.get(getattr(model, "loss_type", None)) or known.get("ForCausalLM")
    loss = getattr(model, "_loss_function", None) or default
    return not any("loss_function" in getattr(code, "co_names", ()) for code in codes) or qualified_name(loss) != _LOSS


LOSSES_WITHOUT_LOGITS = Feature(
    (
        (_other_layer, "its output projection is a {}, and no nn.Linear"),
        (
            lambda model: not is_bare(model.get_output_embeddings()),
            "its output projection has hooks or a forward of its own",
        ),
        (_other_weight, "the weight of its output projection is no plain parameter"),
        (_is_fused, "its forward computes a fused loss already"),
        (_other_loss, "its loss is another than transformers' ForCausalLMLoss"),
    ),
)
"""For a model of transformers that has an output projection."""
