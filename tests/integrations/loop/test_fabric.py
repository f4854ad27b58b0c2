"""Lightning Fabric: a model that is prepared before or after it is set up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import lightning_fabric
import pytest
import torch
from torch import Tensor, nn

import daf_integrations as daf
from daf_core import ConfigError, ReaderError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations.loop import training
from daf_integrations.loop.training import training_of
from tests.integrations.elastic_runs import ELASTIC, STEPS, adapters, count_time
from tests.integrations.hf_runs import daf_records, differing, gpt2, lora, roberta
from tests.integrations.loop_runs import adam, batches, own_loss, weights_of
from tests.integrations.planned import AMPLE, in_parts
from tests.integrations.two_processes import run_in_two_processes

FIRST = pytest.mark.parametrize("first", [True, False], ids=["prepared before", "prepared after"])
CASTS = pytest.mark.parametrize("casts", ["32-true", "bf16-mixed", "bf16-true"])


@pytest.fixture(autouse=True)
def no_earlier_models() -> Iterator[None]:
    """Forgets the models of other tests, which the garbage collector may not have found yet."""
    yield
    training._trainings.clear()
    training._exit_summaries.clear()


class Loop:
    """A loop as in Fabric's own examples."""

    def __init__(
        self,
        model: nn.Module,
        first: bool = False,
        casts: str = "32-true",
        package: Any = lightning,
        **options: Any,
    ) -> None:
        self.fabric = package.Fabric(accelerator="cpu", devices=1, precision=casts)
        self.inner = model
        optimizer = adam(model)
        prepared = daf.prepare(model, **options) if options and first else model
        self.model, self.optimizer = self.fabric.setup(prepared, optimizer)
        if options and not first:
            assert daf.prepare(self.model, **options) is self.model

    def run(self, steps: int, accumulation: int = 1, by_step: bool = False) -> list[float]:
        torch.manual_seed(0)
        self.model.train()
        losses: list[float] = []
        for number, batch in enumerate(batches(self.inner, steps * accumulation), 1):
            with self.fabric.no_backward_sync(self.model, enabled=number % accumulation != 0):
                losses.append(self._step(batch, by_step))
            if number % accumulation == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses

    def _step(self, batch: dict[str, Tensor], by_step: bool) -> float:
        if by_step:
            return daf.step(self.model, batch, backward=self.fabric.backward).item()
        loss = own_loss(self.model, batch)
        self.fabric.backward(loss)
        return loss.item()


@FIRST
@CASTS
@pytest.mark.parametrize("by_step", [False, True])
def test_exact_mode_changes_no_bit(first: bool, casts: str, by_step: bool) -> None:
    plain, exact = Loop(lora(), casts=casts), Loop(lora(), first, casts, precision="exact")
    assert plain.run(3) == exact.run(3, by_step=by_step)
    assert differing(weights_of(plain.inner), weights_of(exact.inner)) == []
    for model in (exact.model, exact.inner):
        assert daf.state_dict(model)["totals"]["steps"] == 3
        assert "DAF held at most" in daf.summary(model)
    assert daf.metrics(exact.model)["daf/ratio"] > 1
    assert daf.metrics(exact.inner) == {}


@FIRST
@CASTS
def test_the_gradient_is_audited_in_the_precision_of_training(
    first: bool, casts: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(lora(), first, casts, precision="auto")
    seen: list[torch.dtype] = []
    loop.inner.base_model.model.roberta.encoder.layer[0].attention.register_forward_hook(
        lambda _module, _inputs, outputs: seen.append(outputs[0].dtype)
    )
    loop.run(3)
    assert 0 < daf.metrics(loop.model)["daf/gradient_error"] < 1
    assert daf_records(caplog) == []
    assert len({*seen}) == 1


@FIRST
@pytest.mark.parametrize("package", [lightning, lightning_fabric])
def test_both_packages(first: bool, package: Any) -> None:
    loop = Loop(lora(), first, package=package, precision=4)
    loop.run(2)
    assert daf.metrics(loop.model)["daf/ratio"] > 4


@FIRST
@CASTS
def test_a_budget_for_steps(first: bool, casts: str) -> None:
    """What a step takes is measured in backward passes that are not Fabric's."""
    plain = Loop(lora(), casts=casts)
    kept = Loop(lora(), first, casts, precision="exact", memory_budget=AMPLE)
    assert plain.run(2) == kept.run(2, by_step=True)
    assert differing(weights_of(plain.inner), weights_of(kept.inner)) == []


@FIRST
def test_accumulated_batches_are_one_step_in_parts(first: bool) -> None:
    plain = Loop(roberta(dropout=0.0))
    parts = Loop(roberta(dropout=0.0), first, precision="exact", memory_budget=AMPLE)
    expected = plain.run(2, accumulation=2)
    with in_parts(2):
        assert parts.run(2, accumulation=2, by_step=True) == pytest.approx(expected, rel=1e-5)
    assert daf.state_dict(parts.model)["totals"]["steps"] == 2


@FIRST
def test_elastic_training(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)
    loop = Loop(adapters(), first, **ELASTIC)
    loop.run(STEPS)
    training = training_of(loop.model)
    assert training is not None
    assert training.session.totals.elastic_steps == STEPS
    assert daf.metrics(loop.model)["daf/elastic_share"] < 0.9


@FIRST
def test_logits_that_nobody_reads_are_not_computed(first: bool) -> None:
    """Fabric hooks, and in sixteen bits converts, whatever a model returns."""
    for casts in ("32-true", "bf16-mixed"):
        loop = Loop(gpt2(), first, casts, precision=4)
        loop.model.train()
        [batch] = batches(loop.inner, 1)
        output = loop.model(**batch)
        loop.fabric.backward(output.loss)
        assert not output.logits.source.is_computed
        assert output.logits.dtype is torch.float32
        with pytest.raises(ReaderError, match="no gradient"):
            output.logits.register_hook(print)


def test_goes_on_from_a_checkpoint_of_fabrics(tmp_path: Path) -> None:
    whole = Loop(lora(dropout=0.0), precision="auto")
    whole.run(3)
    saved = {"model": whole.model, "optimizer": whole.optimizer, "daf": daf.state_dict(whole.model)}
    whole.fabric.save(tmp_path / "checkpoint", saved)
    expected = whole.run(3)
    resumed = Loop(lora(dropout=0.0), precision="auto")
    into: dict[str, Any] = {"model": resumed.model, "optimizer": resumed.optimizer, "daf": {}}
    resumed.fabric.load(tmp_path / "checkpoint", into)
    daf.load_state_dict(resumed.model, into["daf"])
    assert resumed.run(3) == expected
    learned = [daf.state_dict(each.model)["engine_state"] for each in (whole, resumed)]
    assert json.dumps(learned[0]) == json.dumps(learned[1])


@FIRST
def test_the_model_is_given_back(first: bool) -> None:
    loop = Loop(roberta(), first, precision=4)
    loop.run(1)
    training = training_of(loop.model)
    assert training is not None
    training.stop()
    assert training_of(loop.model) is training_of(loop.inner) is None
    assert "forward" not in {*vars(loop.model), *vars(loop.inner)}
    loop.run(1)
    assert innermost_hooks() is None


def test_a_compiled_model_is_found() -> None:
    compiled = torch.compile(daf.prepare(roberta(), precision=4), backend="eager")
    model = lightning.Fabric(accelerator="cpu", devices=1).setup(compiled)
    assert daf.summary(model) != "DAF is not active"
    assert training_of(daf.prepare(model, precision=4)).model is model.module


def test_a_model_inside_of_an_unknown_wrapper_is_found() -> None:
    models = [daf.prepare(roberta(), precision=4) for _ in range(2)]
    one, both = nn.Sequential(models[0]), nn.Sequential(*models)
    [batch] = batches(models[0], 1)
    daf.step(one, batch, lambda rows: models[0](**rows).loss)
    adam(one).step()
    assert "DAF held at most" in daf.summary(one)
    assert daf.state_dict(one)["totals"]["steps"] == 1
    with pytest.raises(ConfigError, match="2 models are prepared inside of Sequential"):
        daf.step(both, batch)


def test_in_two_processes(tmp_path: Path) -> None:
    run_in_two_processes("tests.integrations.fabric_run", tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first.keys() == second.keys()
    for name in ("exact", "exact, prepared first", "budget"):
        assert first[name] == second[name] == first["plain"], name
    assert first["elastic"] == second["elastic"] != first["plain"]
    for found in (first, second):
        assert "DDPStrategy(find_unused_parameters=True)" in found["elastic without it"]
        assert "prepared before it was put into DistributedDataParallel" in found["budget, prepared first"]
        assert "wrap it first" in found["elastic, prepared first"]
        assert "another method than forward" in found["training_step with a budget"]
        assert found["training_step"] == found["plain training_step"]
        assert found["training_step compressed"]
