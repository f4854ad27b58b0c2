"""Causal language models of transformers: the loss without the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from daf_core.forward import ForwardWrapper
from daf_core.rewrites.chunked_loss import linear_cross_entropy_sum
from daf_core.rewrites.lazy_logits import LazyLogits, LogitsSource
from daf_core.rewrites.rewrite import Undo, is_bare, qualified_name
from daf_core.torch_internals import is_tracing

_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LOSS = "transformers.loss.loss_utils.ForCausalLMLoss"


class ChunkedCausalLMLoss:
    """The loss of a causal language model, from its lazy logits.

    Args:
        original: transformers' ``ForCausalLMLoss``. It computes the loss of logits that are there.
    """

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original

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
        """Returns what transformers' function of the same signature returns.

        Args:
            logits: (batch, tokens, vocabulary).
            labels: (batch, tokens); the token after is what is predicted.
            vocab_size: Size of the vocabulary.
            num_items_in_batch: Divisor of the loss; None for the labels that count.
            ignore_index: Label that does not count.
            shift_labels: Labels of the token after, if they are shifted already.
            kwargs: Are ignored.
        """
        targets = _targets(labels, shift_labels, ignore_index)
        if targets is None or not _is_pending(logits, vocab_size, targets):
            options: dict[str, Any] = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._original(logits, labels, vocab_size, **options, shift_labels=shift_labels, **kwargs)
        total, count = _summed_loss(logits.source, targets.to(logits.device), ignore_index)
        divisor = count if num_items_in_batch is None else num_items_in_batch
        return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


def find_head(model: nn.Module) -> nn.Linear | None:
    """Returns the output projection of a causal language model, or None where its loss stays as it is.

    Args:
        model: Any module.
    """
    if not any(qualified_name(base) == _MODEL for base in type(model).__mro__):
        return None
    owner: Any = model
    head = owner.get_output_embeddings()
    if type(head) is not nn.Linear or not is_bare(head) or type(head.weight) is not nn.Parameter:
        return None
    return head if qualified_name(owner.loss_function) == _LOSS else None


def rewrite_loss(model: nn.Module, head: nn.Linear) -> Undo:
    """Makes a model compute its loss without logits while it trains.

    Args:
        model: The model.
        head: Its output projection, from `find_head`.

    Returns:
        What undoes it.
    """
    owner: Any = model
    previous = vars(model).get("_loss_function")
    wrapper = ForwardWrapper(head, partial(_project, head))
    owner.loss_function = ChunkedCausalLMLoss(owner.loss_function)

    def undo() -> None:
        wrapper.remove()
        del owner._loss_function
        if previous is not None:
            owner._loss_function = previous

    return undo


def _project(head: nn.Linear, forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns lazy logits where the output projection is being trained through."""
    if kwargs or len(args) != 1 or not _trains(head, args[0]):
        return forward(*args, **kwargs)
    return LazyLogits.of(LogitsSource(args[0], head.weight, head.bias))


def _trains(head: nn.Linear, hidden: Tensor) -> bool:
    if not head.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing():
        return False
    source = LogitsSource(hidden, head.weight, head.bias)
    tensors = source.inputs
    plain = all(type(tensor) in (Tensor, nn.Parameter) and tensor.device == hidden.device for tensor in tensors)
    same = source.dtype is not hidden.dtype or all(tensor.dtype is hidden.dtype for tensor in tensors)
    return plain and same and any(tensor.requires_grad for tensor in tensors)


def _targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """Returns the label of each row of logits, shifted as transformers does."""
    if shift_labels is not None:
        return shift_labels.reshape(-1)
    return None if labels is None else functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)


def _is_pending(logits: Tensor, vocab_size: int, targets: Tensor) -> TypeGuard[LazyLogits]:
    if not isinstance(logits, LazyLogits) or logits.source.is_computed:
        return False
    return logits.shape[-1] == vocab_size and logits.numel() == len(targets) * vocab_size


def _summed_loss(source: LogitsSource, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Returns the sum of losses, and how many labels count."""
    hidden = source.hidden.reshape(-1, source.hidden.shape[-1])
    total = linear_cross_entropy_sum(hidden, source.weight, source.bias, targets, ignore_index, source.dtype)
    return total, (targets != ignore_index).sum()
