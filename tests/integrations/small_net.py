"""A network and its data without any library but torch, for scripts that have to start quickly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCH, LENGTH, WIDTH, LABELS = 8, 32, 64, 3


class SmallNet(nn.Module):
    """Two encoder layers with dropout; computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(inputs).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def loader(batches: int) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(batches * BATCH, LENGTH, WIDTH, generator=random)
    labels = torch.randint(0, LABELS, (batches * BATCH,), generator=random)
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    return DataLoader(rows, batch_size=BATCH)
