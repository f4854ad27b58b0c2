"""Models whose losses ask for views of their labels are audited at every size of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import daf_integrations as daf
from tests.integrations.hf_runs import daf_records

LENGTH = 64


class NanoGPT(nn.Module):
    """Returns logits and loss, of labels that it takes as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 50))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(self.embedding(input_ids))
        return logits, nn.functional.cross_entropy(logits.view(-1, 50), labels.view(-1))


T5: dict[str, Any] = {
    **{"vocab_size": 50, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2},
    "decoder_start_token_id": 0,
}


def roberta(kind: Any) -> nn.Module:
    size: dict[str, Any] = {"vocab_size": 50, "num_labels": 5, "hidden_size": 64, "intermediate_size": 128}
    return kind(RobertaConfig(num_hidden_layers=2, num_attention_heads=2, **size))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "masked language model": (lambda: roberta(RobertaForMaskedLM), 50),
    "token classifier": (lambda: roberta(RobertaForTokenClassification), 5),
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(T5Config(**T5)),
        50,
    ),
    "logits and loss": (NanoGPT, 50),
}


@pytest.mark.parametrize(("make", "labels"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16])
def test_they_are_audited(
    make: Callable[[], nn.Module], labels: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And "auto" chooses by what it has found, so that its bits are not the same everywhere."""
    torch.manual_seed(0)
    model = daf.prepare(make().train())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        output: Any = model(
            input_ids=torch.randint(5, 50, (rows, LENGTH)), labels=torch.randint(0, labels, (rows, LENGTH))
        )
        (output[1] if isinstance(output, tuple) else output.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < daf.metrics(model)["daf/gradient_error"] < 1
    plan = daf.state_dict(model)["engine_state"]["policy"]["plan"]
    assert len({bits for *_, bits in plan}) > 1
    assert not [record for record in daf_records(caplog) if "audits" in record.message]
