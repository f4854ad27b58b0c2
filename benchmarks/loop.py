"""The training loop of the accuracy benchmarks."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daf_integrations.cli.bench.methods import Method


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss that a model computes of its inputs."""
    return model(**batch).loss


def train(
    model: nn.Module,
    method: Method,
    batches: Iterable[dict[str, Tensor]],
    optimizer: Optimizer,
    schedule: LRScheduler,
    on_step: Callable[[], None],
    first_seed: int | None = None,
    loss_function: Callable[[nn.Module, dict[str, Tensor]], Tensor] = own_loss,
) -> None:
    """Trains a model, one step a batch.

    Args:
        model: What is trained.
        method: Keeps its activations.
        batches: The model's inputs, one step each.
        optimizer: Has the model's parameters.
        schedule: Sets the learning rate, step by step.
        on_step: Called after each step.
        first_seed: Seed of torch's generator in the first step, one more in each that follows; None leaves it alone.
        loss_function: Returns the loss of the model on a batch.
    """
    model.train()
    for number, batch in enumerate(batches):
        if first_seed is not None:
            torch.manual_seed(first_seed + number)
        method.run(batch, lambda rows: loss_function(model, rows))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step()
