"""The trainers of TRL, whose losses are their own: supervised, on preferences, with rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from daf_core import ActivationEngine, ConfigError, HooksActiveError, PlanError
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import NEWER_CHECKPOINTS, last_step
from tests.integrations.planned import AMPLE, in_parts

small = pytest.importorskip("benchmarks.preferences", reason="its trainers are those of TRL")
make, train, weights = small.make, small.train, small.weights
# TRL says of its own interface that it will change, and of tokenizers that they have other special tokens than models.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

STEPS = 3
WHOLE: dict[str, Any] = {"gradient_checkpointing": False}
"""TRL checkpoints each layer unless it is told not to."""

CLOCKS = {"step_time"}
OTHER_LOSSES: dict[str, dict[str, Any]] = {"sft": {"loss_type": "dft"}}
"""By options of a trainer whose loss is by default the model's own."""

PACKED: dict[str, Any] = {"packing": True, "max_length": 48, **WHOLE}


def numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """What the trainer logs by itself, but for what a clock says."""
    return {name: value for name, value in entry.items() if not name.startswith("daf/") and name not in CLOCKS}


def losses(folder: Path, *callbacks: Any, **options: Any) -> list[float]:
    return [entry["loss"] for entry in train(make("sft", folder, *callbacks, steps=STEPS, **options))]


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kind", small.KINDS)
def test_exact_mode_changes_no_number(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": STEPS, "gradient_checkpointing": checkpointing}
    plain, exact = make(kind, tmp_path, **options), make(kind, tmp_path, DAFCallback(precision="exact"), **options)
    expected, found = train(plain), train(exact)
    assert list(map(numbers, found)) == list(map(numbers, expected))
    assert found[-1]["daf/raw_mb"] > 0
    for name, weight in weights(exact).items():
        assert torch.equal(weight, weights(plain)[name]), name


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lists the losses that audits differentiate."""
    found: list[float] = []
    audit = ActivationEngine.audit

    def watched(engine: ActivationEngine, loss_of: Callable[[], Tensor]) -> Any:
        def loss() -> Tensor:
            value = loss_of()
            found.append(float(value))
            return value

        return audit(engine, loss)

    monkeypatch.setattr(ActivationEngine, "audit", watched)
    return found


@pytest.mark.parametrize("kind", small.KINDS)
def test_audits_measure_the_loss_of_the_trainer(kind: str, audited: list[float], tmp_path: Path) -> None:
    """A model's own loss is that of guessing, above 5."""
    options = {**WHOLE, **OTHER_LOSSES.get(kind, {})}
    log = train(make(kind, tmp_path, DAFCallback(audit_every=1), steps=STEPS, **options))
    assert len(audited) == STEPS
    assert audited == pytest.approx([log[0]["loss"]] * STEPS, abs=0.5)
    assert 0 < log[-1]["daf/gradient_error"] < 0.3
    assert log[-1]["daf/ratio"] > 1.5


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "kto"])
def test_the_loss_of_trl_needs_no_logits(kind: str, tmp_path: Path) -> None:
    trainer = make(kind, tmp_path, DAFCallback(chunked_loss=True), steps=STEPS)
    with pytest.raises(ConfigError, match="its forward computes a fused loss already"):
        train(trainer)


class TestTextsInOneRow:
    """TRL packs texts into one row of a batch, and says by cu_seq_lens where they begin."""

    @pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
    def test_exact_mode_changes_no_loss(self, strategy: str, tmp_path: Path) -> None:
        options = {**PACKED, "packing_strategy": strategy}
        assert losses(tmp_path, DAFCallback(precision="exact"), **options) == losses(tmp_path, **options)

    def test_audits_take_some_of_the_texts(self, audited: list[float], tmp_path: Path) -> None:
        options = {**PACKED, **OTHER_LOSSES["sft"]}
        log = train(make("sft", tmp_path, DAFCallback(audit_every=1), steps=STEPS, **options))
        assert 0 < log[-1]["daf/gradient_error"] < 0.3
        assert audited == pytest.approx([log[0]["loss"]] * STEPS, abs=0.5)

    def test_steps_within_a_budget_leave_them_together(self, tmp_path: Path) -> None:
        expected = losses(tmp_path, **PACKED)
        with in_parts(2):
            found = losses(tmp_path, DAFCallback(precision="exact", memory_budget=AMPLE), **PACKED)
        assert found == expected

    def test_a_budget_for_less_is_refused_by_what_packed_them(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match=r"the batch is packed \(packing=True, padding_free=True\): cu_seq_lens"):
            losses(tmp_path, DAFCallback(memory_budget="100kB"), **PACKED)


class TestOtherHooks:
    @pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "kto"])
    def test_offloading_of_trl_is_refused_by_its_name(self, kind: str, tmp_path: Path) -> None:
        trainer: Any = make(kind, tmp_path, DAFCallback(), steps=STEPS)
        trainer.args.activation_offloading = True  # TRL itself makes the hooks where there is an accelerator alone
        with pytest.raises(HooksActiveError, match=r"Config\(activation_offloading=True\).* or leave out DAFCallback"):
            train(trainer)
        assert not {"compute_loss", "training_step"} & vars(trainer).keys()

    @NEWER_CHECKPOINTS
    def test_offloaded_checkpoints_keep_their_own_hooks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def pageable(pin_memory: bool, device_type: str) -> save_on_cpu:  # there may be no device to pin memory for
            return save_on_cpu(pin_memory=False, device_type=device_type)

        monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", pageable)
        kept, offloaded = (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": on}} for on in (False, True)
        )
        options: dict[str, Any] = {"precision": "exact"}
        expected, callback, other = losses(tmp_path, **offloaded), DAFCallback(**options), DAFCallback(**options)
        assert losses(tmp_path, callback, **offloaded) == expected
        assert losses(tmp_path, other, **kept) == expected
        assert 0 < last_step(callback).raw_bytes < last_step(other).raw_bytes

    def test_selective_checkpoints_are_compressed(self, tmp_path: Path) -> None:
        """What a policy of TRL's keeps of each layer belongs to the checkpoint, and what a checkpoint keeps to DAF."""
        options: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}
        expected = losses(tmp_path, **options)
        assert losses(tmp_path, DAFCallback(precision="exact"), **options) == expected
        assert losses(tmp_path, DAFCallback(precision=4), **options) == pytest.approx(expected, rel=0.01)
