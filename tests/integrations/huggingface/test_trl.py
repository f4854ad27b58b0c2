"""TRL's SFTTrainer, which adds to compute_loss and to log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from daf_integrations import DAFCallback, DAFTrainerMixin
from tests.integrations.hf_runs import QUICK
from tests.integrations.planned import AMPLE, in_parts

trl = pytest.importorskip("trl", reason="the trainer is TRL's")
small = pytest.importorskip("benchmarks.preferences", reason="its texts are for TRL")
WORDS = small.WORDS
# TRL says of its own interface that it will change, and of tokenizers that they have other special tokens than models.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class DAFSFTTrainer(DAFTrainerMixin, trl.SFTTrainer):
    """With DAF inside."""


def run(folder: Path, *callbacks: Any, **options: Any) -> list[dict[str, Any]]:
    """Returns the log of a short training."""
    torch.manual_seed(0)
    size = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS + 3, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    texts = [" ".join(f"w{(7 * word + text) % WORDS}" for word in range(64)) for text in range(32)]
    arguments = trl.SFTConfig(str(folder), **QUICK, max_length=64, bf16=False)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights="gaussian")
    trainer = (DAFSFTTrainer if options else trl.SFTTrainer)(
        model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=small.tokenizer(),
        peft_config=lora,
        callbacks=list(callbacks),
        **options,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def own(entry: dict[str, Any]) -> dict[str, Any]:
    """What the trainer logs by itself."""
    return {name: value for name, value in entry.items() if not name.startswith("daf/")}


def test_exact_mode_changes_no_number_of_the_log(tmp_path: Path) -> None:
    assert [own(entry) for entry in run(tmp_path, DAFCallback(precision="exact"))] == run(tmp_path)


def test_audits_count_no_tokens(tmp_path: Path) -> None:
    """They call the trainer's compute_loss, which counts tokens and collects accuracies."""
    plain, compressed = run(tmp_path), run(tmp_path, DAFCallback(precision=8, audit_every=1))
    assert "daf/gradient_error" in compressed[-1]
    assert compressed[-1]["daf/ratio"] > 2  # what the loss of TRL saves, a function of its own, stays exact
    for name in ("num_tokens", "mean_token_accuracy"):
        assert [entry[name] for entry in compressed] == [entry[name] for entry in plain]


@pytest.mark.parametrize("precision", ["exact", 8])
def test_steps_keep_a_budget(precision: Any, tmp_path: Path) -> None:
    """In parts, where the trainer counts tokens and collects accuracies."""
    plain = run(tmp_path)
    with in_parts(2):
        cut = run(tmp_path, daf={"precision": precision, "memory_budget": AMPLE, "audit_every": None})
    assert [entry["num_tokens"] for entry in cut] == [entry["num_tokens"] for entry in plain]
    tolerance = 1e-5 if precision == "exact" else 1e-2
    for name in ("loss", "mean_token_accuracy", "entropy"):
        assert [entry[name] for entry in cut] == pytest.approx([entry[name] for entry in plain], rel=tolerance)
