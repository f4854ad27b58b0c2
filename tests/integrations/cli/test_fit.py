"""`daf plan --device`: what fits on a device, from a configuration alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daf_core.plan.observe.without_values import without_values
from daf_integrations.cli import fit
from daf_integrations.cli.fit import Device, longest_row, most_tokens, standing_of
from daf_integrations.cli.main import main
from daf_integrations.cli.workload import BuiltWorkload, Workload, build

pytest.importorskip("transformers", reason="configurations are those of transformers")
pytest.importorskip("peft", reason="LoRA adapters count")

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
}
ROBERTA = {
    **{"model_type": "roberta", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 66, "pad_token_id": 1},
}
SIZE = ("--batch", "2", "--length", "64")
PLANNED = "DAF, least budget"


def folder_of(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder_of(tmp_path, **LLAMA)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def sized_on(device: str, model: str, rank: int | None) -> BuiltWorkload:
    return build(Workload(model=model, batch=2, length=64, lora_rank=rank), device)


def test_treatments_take_less_and_fit_longer_rows(llama: str) -> None:
    found = report(llama, *SIZE, "--device", "140MB")
    rows = {row["treatment"]: row for row in found["treatments"]}
    assert list(rows) == list(fit.TREATMENTS)
    peaks = [row["peak_bytes"] for row in rows.values()]
    assert max(peaks) == peaks[0]
    assert min(peaks) == peaks[-1]
    longest = [row["longest"] for row in rows.values()]
    assert 64 < longest[0] < longest[1] < longest[-1] <= found["longest_known"] == 1024
    assert all(row["fits"] and row["total_bytes"] < found["device"]["usable_bytes"] for row in rows.values())
    assert found["optimizer_bytes"] >= 2 * found["gradients_bytes"] > 0
    assert rows[PLANNED]["activation_bytes"] is None


def test_the_table_says_what_fits(llama: str) -> None:
    output = run(llama, *SIZE, "--full", "--device", "cpu:300MB").output
    assert "2 x 64 tokens, float32" in output
    assert "checkpointing" in output
    assert "fits 300 MB" in output


def test_nothing_fits_on_a_device_that_is_too_small(llama: str) -> None:
    result = run(llama, *SIZE, "--device", "134.5MB", "--json")
    assert result.exit_code == 1
    assert not any(row["fits"] or row["longest"] for row in json.loads(result.stdout)["treatments"])


def test_a_file_is_a_configuration_too(llama: str) -> None:
    assert report(f"{llama}/config.json", *SIZE, "--device", "1GB")["task"] == "causal-lm"


@pytest.mark.parametrize("rank", [4, None])
def test_counts_are_those_of_models_with_values(llama: str, rank: int | None) -> None:
    device = Device(1 << 30, is_gpu=False)
    with without_values():
        sized = sized_on("meta", llama, rank)
        assert all(each.is_meta for each in (*sized.model.parameters(), *sized.model.buffers()))
        standing, counts = standing_of(sized.model, device), counted(sized)
    # Not of the model that is counted: the optimizer's step takes gradients that are not initialized.
    assert standing == standing_of(sized_on("cpu", llama, rank).model, device)
    for name, taken in counted(sized_on("cpu", llama, rank)).items():
        predicted = counts[name]
        # Of a model as small as this one, the forms that values allow count.
        near = 0.2 if "DAF" in name else 0.001
        assert predicted.activations == pytest.approx(taken.activations, rel=near), name
        assert predicted.peak == pytest.approx(taken.peak, rel=near), name


def counted(sized: BuiltWorkload) -> dict[str, fit.Taken]:
    found: dict[str, fit.Taken] = {}
    for name, treatment in fit.TREATMENTS.items():
        if name != PLANNED:
            with treatment(sized.model) as count:
                found[name] = count(sized)
    return found


def test_a_gpu_updates_all_weights_at_once(llama: str) -> None:
    with without_values():
        model = sized_on("meta", llama, None).model
        one_by_one, at_once = (standing_of(model, Device(1 << 30, is_gpu)) for is_gpu in (False, True))
    assert at_once.updating > one_by_one.updating > one_by_one.gradients


def test_rows_are_no_longer_than_a_table_of_positions(tmp_path: Path) -> None:
    model = folder_of(tmp_path, **ROBERTA)
    assert report(model, *SIZE, "--device", "1GB")["longest_known"] == 64
    result = run(model, "--length", "65", "--device", "1GB")
    assert result.exit_code == 1
    assert "knows positions of 64 tokens, and --length is 65" in result.output


def test_models_without_positions_have_a_limit(tmp_path: Path) -> None:
    t5 = {"model_type": "t5", "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    with without_values():
        model = sized_on("meta", folder_of(tmp_path, **t5, decoder_start_token_id=0), None).model
    assert most_tokens(model) == fit.LONGEST


def in_proportion(length: int) -> int:
    return 100 + 3 * length


def squared(length: int) -> int:
    return 100 + length * length // 50


def with_a_jump(length: int) -> int:
    return 100 + length + 500 * (length > 70)


@pytest.mark.parametrize("size", [in_proportion, squared, with_a_jump])
@pytest.mark.parametrize("room", [90, 100, 130, 500, 2000, 40_000])
def test_the_longest_row_that_fits_is_found(size: Callable[[int], int], room: int) -> None:
    most, tried = 10_000, list[int]()

    def total(length: int) -> int:
        tried.append(length)
        return size(length)

    found = longest_row(total, {0: size(0), 64: size(64)}, most, room)
    exact = max((length for length in range(most + 1) if size(length) <= room), default=0)
    assert found <= exact <= max(found * fit.NEAR, found + fit.STEP)
    assert len(tried) < 20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--device", "big"), "--device"),
        (("--device", "24GB", "--budget", "1GB"), "without --budget"),
        (("--device", "24GB", "--save", "plan.json", "--budget", "1GB"), "without --budget and --save"),
        (("--device", "24GB", "--precision", "1"), "leave out --precision"),
    ],
)
def test_other_options_are_refused(llama: str, arguments: tuple[str, ...], told: str) -> None:
    result = run(llama, *arguments)
    assert result.exit_code == 2
    assert told in result.output
