"""Training loops as people write them: plain torch and Accelerate, on the models of `hf_runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integrations.hf_runs import BATCH, rows_for

Step = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def loader_for(model: nn.Module, rows: int = 64) -> DataLoader[Any]:
    return DataLoader(rows_for(model, rows), batch_size=BATCH, collate_fn=collate)


def batches(model: nn.Module, count: int) -> Iterator[dict[str, Tensor]]:
    loader = loader_for(model, count * BATCH)
    yield from loader


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes."""
    return model(**batch).loss


def loss_outside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that the model knows nothing of."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    return nn.functional.cross_entropy(model(**inputs).logits, batch["labels"])


def train(
    model: nn.Module,
    steps: int,
    loss_of: Step = own_loss,
    optimizer: torch.optim.Optimizer | None = None,
    skip: int = 0,
) -> list[float]:
    """Trains in a plain loop on the batches after the first `skip`; returns the losses."""
    optimizer = optimizer or adam(model)
    torch.manual_seed(skip)
    model.train()
    losses = []
    for number, batch in enumerate(batches(model, skip + steps)):
        if number < skip:
            continue
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
