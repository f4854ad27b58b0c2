"""Which loss is audited, where the model returns one and a loop of the user's own runs backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daf_integrations as daf
from daf_core import AuditError
from tests.integrations.hf_runs import daf_records


class Ways(nn.Module):
    """Returns a loss and more, in a form of the user's choice."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        self.form = [form]

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        return self.form[0](logits, nn.functional.cross_entropy(logits, labels))


@dataclass
class Result:
    """What some models return."""

    loss: Tensor
    logits: Tensor


def itself(found: Tensor) -> Tensor:
    return found


@dataclass(slots=True)
class Slots:
    """The same without a dictionary of attributes."""

    loss: Tensor
    logits: Tensor


def other(logits: Tensor) -> Tensor:
    return logits.square().mean()


def mapping(logits: Tensor, loss: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "loss": loss}


def result(logits: Tensor, loss: Tensor) -> Result:
    return Result(loss, logits)


# What the model returns, the loss that backward runs on, and whether that is audited.
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor], bool]] = {
    "first of a tuple": (lambda logits, loss: (loss, logits), lambda found: found[0], True),
    "second of a tuple": (lambda logits, loss: (logits, loss), lambda found: found[1] / 4, True),
    "last of two numbers": (lambda logits, loss: (logits.mean(), loss), lambda found: found[1], True),
    "scaled": (lambda _, loss: loss, lambda found: found * 1024, True),
    "mapping": (mapping, lambda found: found["loss"], True),
    "object": (result, lambda found: found.loss, True),
    "of two uses of the logits": (
        lambda logits, loss: Result(loss + other(logits), logits),
        lambda found: found.loss,
        True,
    ),
    "another name": (
        lambda logits, loss: {"objective": loss, "logits": logits},
        lambda found: found["objective"],
        True,
    ),
    "beside its parts": (
        lambda logits, loss: {"loss": loss + other(logits), "ce": loss, "reg": other(logits)},
        lambda found: found["loss"],
        True,
    ),
    "before its parts": (
        lambda logits, loss: (loss + other(logits), loss, other(logits)),
        lambda found: found[0],
        True,
    ),
    "after its parts": (lambda logits, loss: [loss, other(logits), loss + other(logits)], lambda found: found[2], True),
    "by two names": (lambda _, loss: {"loss": loss, "objective": loss}, lambda found: found["loss"], True),
    "in slots": (lambda logits, loss: Slots(loss, logits), lambda found: found.loss, True),
    "part of a sum": (
        lambda logits, loss: {"loss": loss, "reg": other(logits)},
        lambda found: found["loss"] + found["reg"],
        False,
    ),
    "of the logits": (mapping, lambda found: other(found["logits"]), False),
    "of the logits of an object": (result, lambda found: other(found.logits), False),
    "with more of the logits": (result, lambda found: found.loss + other(found.logits), False),
    "sum of two": (lambda logits, loss: (loss, other(logits)), lambda found: found[0] + found[1], False),
}


def step(model: nn.Module, trained: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    trained(model(torch.randn(32, 64), torch.randint(10, (32,)))).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("form", "trained", "audited"), LOSSES.values(), ids=LOSSES)
def test_it_is_the_one_that_backward_runs_on(
    form: Callable[..., Any], trained: Callable[..., Tensor], audited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Or none is, and one line says so."""
    model = daf.prepare(Ways(form), precision=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(4):
        step(model, trained, optimizer, seed)
    assert ("daf/gradient_error" in daf.metrics(model)) == audited
    warned = [record for record in daf_records(caplog) if "ran on something else" in record.message]
    assert len(warned) == (not audited)


def test_the_error_is_that_of_the_loss_that_is_found_to_be_trained() -> None:
    """The first audit measured another one, and what it found is gone."""
    form, trained, _ = LOSSES["last of two numbers"]
    model, only = daf.prepare(Ways(form), audit_every=2), daf.prepare(Ways(lambda _, loss: loss), audit_every=2)
    only.load_state_dict(model.state_dict())
    for each, loss_of in ((model, trained), (only, itself)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for seed in range(4):
            step(each, loss_of, optimizer, seed)
    errors = [daf.metrics(each)["daf/gradient_error"] for each in (model, only)]
    assert errors[0] == pytest.approx(errors[1], rel=0.2)


def test_another_loss_ends_training_where_the_error_is_bounded() -> None:
    """The bound cannot be kept."""
    form, trained, _ = LOSSES["of the logits"]
    model = daf.prepare(Ways(form), max_gradient_error=0.5)
    with pytest.raises(AuditError, match=r"backward ran on something else.*daf_integrations\.step"):
        step(model, trained, torch.optim.SGD(model.parameters(), 0.1))


def test_nothing_is_said_where_no_backward_ran(caplog: pytest.LogCaptureFixture) -> None:
    """As of a batch that is left out."""
    model = daf.prepare(Ways(result), precision=4)
    model(torch.randn(32, 64), torch.randint(10, (32,)))
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not [record for record in daf_records(caplog) if "audits" in record.message]
