"""`daf profile`: its columns add up to what the engine reports of a step, and what it writes and refuses."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daf_core import ActivationEngine, DAFConfig
from daf_core.snapshots.measurement import measuring
from daf_integrations.cli.main import main
from daf_integrations.cli.options import PRECISIONS
from daf_integrations.cli.plan import plan
from daf_integrations.cli.profile.command import profile as command
from daf_integrations.cli.profile.compute import Row, fold, pattern
from daf_integrations.cli.workload import Workload, build
from tests.integrations.cli.saved_bytes import saved_bytes

pytest.importorskip("transformers", reason="profiles are made of models of transformers")
pytest.importorskip("peft", reason="profiles are made of LoRA")

BATCH, LENGTH = 4, 64
SIZE = ("--batch", str(BATCH), "--length", str(LENGTH))
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 256, "n_positions": 64},
        **{"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"},
    },
    "roberta": {
        **{"model_type": "roberta", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 70},
    },
    "t5": {
        **{"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
        **{"vocab_size": 256, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    },
    "bart": {
        **{"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64},
        **{"decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 256},
        **{"max_position_embeddings": 64},
    },
}
RESNET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        stages = [each for size in (3, 16) for each in (nn.Conv2d(size, 16, 3), nn.BatchNorm2d(16), nn.ReLU())]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(16, 4)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.head(self.stages(images).mean((2, 3))), labels)


def make(rows, length):
    return Net(), {"images": torch.randn(rows, 3, 32, 32), "labels": torch.zeros(rows, dtype=torch.long)}


def wrong(rows, length):
    return Net()


def short(rows, length):
    return Net(), {"images": torch.randn(1, 3, 32, 32)}


def failing(rows, length):
    raise OSError("no data")


def detached(rows, length):
    class Detached(Net):
        def forward(self, images, labels):
            return super().forward(images, labels).detach()

    return Detached(), make(rows, length)[1]


calls = 0


def elsewhere(rows, length):
    class Elsewhere(Net):
        def forward(self, images, labels):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(images, labels)

    return Elsewhere(), make(rows, length)[1]


def unlike(rows, length):
    class Unlike(Net):
        def forward(self, images, labels):
            global calls
            calls += 1
            return super().forward(images, labels) + (self.head.weight * torch.ones(calls, 4, 16)).mean()

    return Unlike(), make(rows, length)[1]
"""
CASES = {
    "gpt2": ("gpt2",),
    "gpt2-full": ("gpt2", "--full"),
    "roberta": ("roberta",),
    "roberta-tied": ("roberta", "--full", "--task", "masked-lm"),
    "t5": ("t5",),
    "resnet": ("net.py:make",),
}
"""Models, by the arguments that name them."""

TOTALS = ("raw_bytes", "exact_bytes", "held_bytes")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, in which the command runs."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "net.py").write_text(RESNET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile", *arguments, *SIZE])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def workload_of(model: str, *options: str) -> Workload:
    rank = None if "--full" in options or ".py" in model else 8
    task: Any = "masked-lm" if "masked-lm" in options else None
    return Workload(model=model, batch=BATCH, length=LENGTH, task=task, lora_rank=rank)


@pytest.mark.parametrize(
    ("case", "precision"), [*((case, "auto") for case in CASES), ("gpt2", "1"), ("resnet", "exact")]
)
def test_columns_add_up_to_the_ledger_of_a_step(case: str, precision: str) -> None:
    """The step is one of the engine's, run here: forward, backward, and what it says then."""
    found = report(*CASES[case], "--precision", precision)
    sized, ledger = build(workload_of(*CASES[case])), dict[str, Any]()
    for column, bits in (("exact_bytes", "exact"), ("held_bytes", precision)):
        engine = ActivationEngine(sized.model, DAFConfig(precision=PRECISIONS[bits]))
        with measuring(sized.model), engine.compress():
            loss = sized.loss(sized.batch)
        loss.backward()
        del loss
        statistics = engine.finish_step()
        ledger |= {"raw_bytes": statistics.raw_bytes, column: statistics.held_bytes}
    for rows in ([found], found["modules"], found["operators"]):
        assert {total: sum(row[total] for row in rows) for total in TOTALS} == ledger


def test_plain_bytes_are_those_of_plain_autograd() -> None:
    """Hooks of another kind, in a model without DAF, see the same operators save the same bytes."""
    sized = build(workload_of("gpt2", "--full"))
    expected = Counter({"EmbeddingBackward0": sized.batch["input_ids"].nbytes})  # the hooks leave the batch out
    for (_, operator), size in saved_bytes(sized.model, sized.batch).items():
        expected[f"{operator}Backward0"] += size
    found = {row["name"]: row["raw_bytes"] for row in report("gpt2", "--full")["operators"] if row["raw_bytes"]}
    assert found == {name: size for name, size in expected.items() if size}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("gpt2", "causal-lm"),
        ("roberta", "sequence-classification"),
        ("t5", "seq2seq-lm"),
        ("bart", "seq2seq-lm"),
    ],
)
def test_models_are_trained_for_what_they_mostly_are(model: str, task: str) -> None:
    sized = build(workload_of(model))
    assert sized.task == task
    assert sized.loss_of(BATCH).requires_grad


def test_blocks_that_repeat_are_one_row() -> None:
    rows = {row["name"]: row for row in report("gpt2", "--full")["modules"]}
    assert rows["transformer.h.*.mlp.act"]["count"] == 3
    assert rows["transformer.h.*.mlp.act"]["class"] == "NewGELUActivation"
    assert rows["transformer.ln_f"]["count"] == 1
    assert not [name for name in rows if name.startswith("transformer.h.0")]


def test_modules_of_several_classes_are_not_counted_together() -> None:
    rows = {(row["name"], row["class"]): row["count"] for row in report("net.py:make")["modules"]}
    assert rows["stages.*", "Conv2d"] == rows["stages.*", "BatchNorm2d"] == rows["stages.*", "ReLU"] == 2
    assert rows["(the model itself)", "Net"] == 1


def test_fewer_bits_hold_less_and_exact_holds_what_it_must() -> None:
    four, one, exact = (report("gpt2", "--precision", precision) for precision in ("4", "1", "exact"))
    assert one["held_bytes"] < four["held_bytes"] < exact["held_bytes"] == exact["exact_bytes"] < exact["raw_bytes"]
    assert four["held_bytes"] == report("gpt2")["held_bytes"], "auto begins with 4 bits"
    assert one["peak_bytes"]["daf"] < one["peak_bytes"]["plain"]


def test_curves_rise_and_fall_with_what_is_held() -> None:
    found = report("gpt2")
    for name, held in (("plain", found["raw_bytes"]), ("daf", found["held_bytes"])):
        curve = found["curves"][name]
        times, sizes = zip(*curve["points"], strict=True)
        assert list(times) == sorted(times)
        assert 0 < curve["forward_seconds"] < times[-1]
        at_end = [size for time, size in curve["points"] if time <= curve["forward_seconds"]][-1]
        assert held <= at_end <= max(sizes) == found["peak_bytes"][name]
        assert sizes[-1] < held / 10


def test_tables_show_the_largest_rows_and_the_sum_of_the_others() -> None:
    output = run("gpt2", "--full", "--top", "2").output
    assert "transformer" in output
    assert output.count("more)") == 2
    assert output.count("all") >= 2
    assert "4 bits" in output
    assert "without DAF" in output


def test_rows_fold_into_a_sum() -> None:
    rows = [Row("a", "A", 1, 50, 40, 30), Row("b", "B", 2, 20, 10, 5), Row("c", "C", 3, 2, 1, 1)]
    assert fold(rows, 3) == rows
    assert fold(rows, 1) == [rows[0], Row("(2 more)", "", 5, 22, 11, 6)]


@pytest.mark.parametrize(
    ("name", "folded"),
    [("", ""), ("h.11.attn", "h.*.attn"), ("0.1", "*.*"), ("layer1.conv2", "layer1.conv2")],
)
def test_numbers_alone_are_folded(name: str, folded: str) -> None:
    assert pattern(name) == folded


class Links(HTMLParser):
    """Collects what a page loads, and its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_files_are_written(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    result = run("gpt2", "--json", "all.json", "--png", "curve.png", "--html", "page.html", "--top", "3")
    assert result.exit_code == 0, result.output
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads((folder / "all.json").read_text())["lora_rank"] == 8
    page, links = (folder / "page.html").read_text(), Links()
    links.feed(page)
    assert len(links.loads) == 1
    assert links.loads[0].startswith("data:image/png;base64,")
    assert (links.tags["table"], links.tags["script"], links.tags["link"]) == (2, 0, 0)
    assert "http" not in page.replace(links.loads[0], "")
    assert "transformer.h.*.mlp.act (NewGELUActivation)" in page
    assert "module" in result.output, "the tables are still shown"


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_missing_matplotlib_is_named_before_work_starts(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("nowhere", option, f"file.{option[2:]}")
    assert result.exit_code == 1
    assert f"{option} needs matplotlib, which is not installed: pip install matplotlib" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "a.txt"], "'a.txt' has another suffix; give a file that ends in .json, or - for the standard outp"),
        (["--png", "a.svg"], "'a.svg' has another suffix; give a file that ends in .png"),
        (["--html", "a"], "'a' has another suffix; give a file that ends in .html or .htm"),
        (["--html", "-"], "'-' has another suffix; give a file that ends in .html or .htm"),
        (["--png", "none/a.png"], "there is no folder 'none' for 'none/a.png'; make it, or give another"),
        (["--html", "folder.html"], "'folder.html' is a folder; give a file that ends in .html or .htm"),
        (["--json", "locked.json"], "'locked.json' cannot be written; give a file where you may write"),
        (["--top", "0"], "0 is not in the range x>=1"),
        (["--precision", "3"], "'3' is not one of 'auto', 'exact', '8', '4', '2', '1'"),
        (["--full", "--lora", "4"], "--lora and --full exclude each other"),
    ],
)
def test_wrong_options_are_answered_with_what_is_allowed(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "folder.html").mkdir()
    (folder / "locked.json").touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("locked.json") and access(path, mode))
    result = run("gpt2", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_file_that_cannot_be_written_after_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    result = run("gpt2", "--json", "all.json")
    assert result.exit_code == 1
    assert "all.json was not written: No space left on device" in result.output


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("none.py:make", "there is no file 'none.py'; give MODEL as FILE.py:FUNCTION"),
        ("net.py:maker", "net.py has no function 'maker'; functions in it: make, wrong"),
        ("net.py:wrong", "net.py:wrong returned a Net; it is called with the rows of a batch and their length"),
        ("net.py:short", "a batch of 4 rows in which 'images' is a tensor of shape (1, 3, 32, 32)"),
        ("net.py:failing", "net.py:failing raised OSError: no data"),
        ("net.py:detached", "no gradient flows from the loss to the model; return the loss itself"),
        ("net.py:unlike", "Make the forward pass repeatable"),
        ("nowhere/at/all", "no configuration is found for the name 'nowhere/at/all'"),
    ],
)
def test_models_that_cannot_be_profiled(model: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run(model)
    assert result.exit_code == 1, result.output
    assert message in result.output


def test_a_model_that_saves_nothing_by_itself() -> None:
    """Hooks of its own do."""
    found = report("net.py:elsewhere")
    assert (found["raw_bytes"], found["modules"]) == (0, [])


def test_options_for_other_models_are_refused() -> None:
    for option in (["--lora", "4"], ["--task", "causal-lm"]):
        result = run("net.py:make", *option)
        assert result.exit_code == 2
        assert f"{option[0]} is for Hugging Face models; what net.py:make makes is trained as it is" in result.output


def test_profile_takes_the_options_of_plan() -> None:
    known = {option for parameter in plan.params for option in parameter.opts}
    assert known - {"--budget", "--save", "--device"} <= {
        option for parameter in command.params for option in parameter.opts
    }


def test_plans_are_made_of_what_a_function_makes() -> None:
    result = CliRunner().invoke(main, ["plan", "net.py:make", "--batch", "4", "--budget", "1GB"])
    assert result.exit_code == 0, result.output
    assert "own loss" in result.output
