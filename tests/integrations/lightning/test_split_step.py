"""Lightning steps in parts: weights, logs and what hooks see are as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from daf_core import ConfigError, MicroBatchError
from tests.integrations.hf_parts import MODELS, made, masked, tagger
from tests.integrations.lightning_parts_runs import Texts, fit, fit_in_parts, largest
from tests.integrations.lightning_runs import weights


@pytest.mark.parametrize(("name", "accumulation"), [("causal", 2), ("masked", 1), ("masked", 2), ("classifier", 1)])
def test_runs_in_parts(name: str, accumulation: int, tmp_path: Path) -> None:
    """Weights are those of a run without parts, and so is what is logged, returned and seen by hooks."""
    whole, cut = (Texts(made(MODELS[name])) for _ in range(2))
    begin = weights(whole)
    plain = fit(tmp_path, whole, accumulate_grad_batches=accumulation)
    parted = fit_in_parts(tmp_path, cut, accumulate_grad_batches=accumulation)
    assert largest(weights(whole), begin) > 1e-3
    assert largest(weights(cut), weights(whole)) < 1e-6
    assert cut.after == pytest.approx(whole.after, rel=1e-4)
    assert cut.before_clearing == pytest.approx(whole.before_clearing, rel=1e-4)
    assert cut.outputs == pytest.approx(whole.outputs, rel=1e-5)
    logged, expected = ({k: float(v) for k, v in trainer.callback_metrics.items()} for trainer in (parted, plain))
    logged = {name: value for name, value in logged.items() if not name.startswith("daf/")}
    rows = logged.pop("rows")
    if name != "masked":  # where parts without a label are left out
        assert rows == pytest.approx((2 * 2 + 3 * 3 + 3 * 3) / 8)
    assert expected.pop("rows") == 8
    assert logged == pytest.approx(expected, rel=1e-5)
    assert "log" not in vars(cut)


def test_half_precision(tmp_path: Path) -> None:
    """Parts differ from the batch by rounding."""
    whole, cut = (Texts(made(masked)) for _ in range(2))
    fit(tmp_path, whole, precision="bf16-mixed")
    fit_in_parts(tmp_path, cut, precision="bf16-mixed")
    assert largest(weights(cut), weights(whole)) < 2e-3


class Manual(Texts):
    """Steps on its own."""

    def __init__(self) -> None:
        super().__init__(made(tagger))
        self.automatic_optimization = False


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    """With the reason, and what to set."""
    module = Manual()
    with pytest.raises(ConfigError, match=r'manual optimization.*budget_covers="activations"'):
        fit_in_parts(tmp_path, module, gradient_clip_val=None)
    assert "forward" not in vars(module.model)


class Failing(Texts):
    """Skips batches of some sizes, or fails there."""

    def __init__(self, error: bool) -> None:
        super().__init__(made(masked))
        self.error = error
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += self.training and torch.is_grad_enabled()
        if self.global_step == 1 and self.steps % 3 == 2:
            if self.error:
                raise KeyError("second part")
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("error", "expected"), [(True, KeyError), (False, MicroBatchError)])
def test_gradients_of_before_come_back_after_an_error(error: bool, expected: Any, tmp_path: Path) -> None:
    """Those that were there before the step; no part's own."""
    whole = Texts(made(masked))
    fit(tmp_path, whole, max_steps=1)
    module = Failing(error)
    with pytest.raises(expected):
        fit_in_parts(tmp_path, module)
    assert "log" not in vars(module)
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)
