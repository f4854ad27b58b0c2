"""Sixteen bits: scalers see what is not finite, and models of bfloat16 train as they do without DAF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daf_integrations as daf
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import MakeTrainer, differing, last_step, losses, roberta, run, weights
from tests.integrations.lightning_runs import Classifier, fit, strategy_of
from tests.integrations.loop_runs import adam, batches, own_loss, weights_of

TOO_LARGE = 1e6
"""Beyond what float16 holds."""


def scaled(model: nn.Module, spoil: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Trains three steps in float16 with a scaler, spoils the second, and returns the scales and the weights."""
    optimizer, scaler, scales = adam(model), torch.amp.GradScaler("cpu", init_scale=256.0), []
    torch.manual_seed(0)
    for number, batch in enumerate(batches(model, 3)):
        hook = None
        if spoil == "activation" and number == 1:
            hook = model.roberta.encoder.layer[0].register_forward_hook(
                lambda _module, _inputs, result: result * TOO_LARGE
            )
        with torch.autocast("cpu", torch.float16):
            loss = own_loss(model.train(), batch)
        if hook is not None:
            hook.remove()
        factor = float("inf") if spoil == "loss" and number == 1 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, weights_of(model)


@pytest.mark.parametrize("spoil", [None, "activation", "loss"])
class TestFloat16:
    def test_exact_mode_changes_no_bit_and_skips_the_same_steps(self, spoil: str | None) -> None:
        scales, expected = scaled(roberta(), spoil)
        assert scales == ([256.0, 256.0, 256.0] if spoil is None else [256.0, 128.0, 128.0])
        found = scaled(daf.prepare(roberta(), precision="exact"), spoil)
        assert found[0] == scales
        assert differing(found[1], expected) == []

    def test_four_bits_skip_the_same_steps(self, spoil: str | None) -> None:
        model = daf.prepare(roberta(), precision=4, audit_every=None)
        assert scaled(model, spoil)[0] == scaled(roberta(), spoil)[0]
        assert all(values.isfinite().all() for values in weights_of(model).values())
        assert daf.metrics(model)["daf/ratio"] > 2.5


class TestModelsOfBfloat16:
    def test_trainer(self, make_trainer: MakeTrainer) -> None:
        four = DAFCallback(precision=4)
        runs = [
            make_trainer(*each, model=roberta().bfloat16()) for each in ([], [DAFCallback(precision="exact")], [four])
        ]
        for trainer in runs:
            run(trainer)
        assert differing(weights(runs[1]), weights(runs[0])) == []
        assert losses(runs[2]) == pytest.approx(losses(runs[0]), rel=0.05)
        assert last_step(four).ratio > 2.5

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_lightning(self, tmp_path: Path, precision: Any) -> None:
        plain, exact, four = (Classifier(roberta()) for _ in range(3))
        strategies = [strategy_of("lightning.pytorch")(precision=each) for each in ("exact", 4)]
        fit(tmp_path, plain, precision=precision)
        fit(tmp_path, exact, precision=precision, strategy=strategies[0])
        fit(tmp_path, four, precision=precision, strategy=strategies[1])
        assert exact.losses == plain.losses
        assert differing(weights_of(exact), weights_of(plain)) == []
        assert four.losses == pytest.approx(plain.losses, rel=0.05)
        assert strategies[1].last_step.ratio > 2.5
