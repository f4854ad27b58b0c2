"""The training loop of the accuracy benchmarks."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.methods import Method


def train(
    model: nn.Module,
    method: Method,
    batches: Iterable[dict[str, Tensor]],
    optimizer: Optimizer,
    schedule: LRScheduler,
    on_step: Callable[[], None],
    first_seed: int | None = None,
) -> None:
    """Trains a model that computes its own loss.

    Args:
        model: What is trained.
        method: Keeps its activations.
        batches: The model's inputs, one step each.
        optimizer: Has the model's parameters.
        schedule: Sets the learning rate, step by step.
        on_step: Called after each step.
        first_seed: Seed of torch's generator in the first step, one more in each that follows; None leaves it alone.
    """
    model.train()
    for number, batch in enumerate(batches):
        method.audit(batch, lambda rows: model(**rows).loss)
        if first_seed is not None:
            torch.manual_seed(first_seed + number)
        with method.compress():
            loss = model(**batch).loss
        loss.backward()
        method.update(optimizer)
        method.finish_step()
        schedule.step()
        optimizer.zero_grad()
        on_step()
