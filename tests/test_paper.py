"""Tests of the tasks of the DAF paper: tiny random models, rows in the columns that the Hub's data sets have."""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import Table, parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from benchmarks import accuracy, finetune, images
from benchmarks.rows import HubData, Row, SourceError, hub_data, load_hub
from benchmarks.scores import METRICS, next_token_loss, score
from benchmarks.tasks import TASKS, Recipe, TextTask, triples
from benchmarks.texts import IGNORED, open_tokenizer, pad, tokenize

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>")  # the padding is 1, as in RoBERTa
WORDS = ("a", "good", "bad", "film", "name", "is", "Mill", "Rome", "|", ":")
END = SPECIAL.index("<|endoftext|>")
HIDDEN = 32
WEBNLG_ROW = {
    "modified_triple_sets": {"mtriple_set": [["Rome | is | good", "Mill | is | bad"]]},
    "lex": {"comment": ["good", "toFix", "good"], "text": ["Rome is good", "is", "Mill is bad"]},
}
ROWS: dict[str, list[Row]] = {
    "sst2": [{"sentence": "a bad film", "label": 0, "idx": 0}, {"sentence": "a good film", "label": 1, "idx": 1}],
    "mrpc": [
        {"sentence1": "a film", "sentence2": f"a {word} film", "label": label} for label, word in enumerate(WORDS[:2])
    ],
    "stsb": [{"sentence1": "a film", "sentence2": f"a {word}", "label": n / 2} for n, word in enumerate(WORDS)],
    "e2e": [{"meaning_representation": f"name [ {word} ]", "human_reference": f"a {word}"} for word in WORDS],
    "webnlg": [WEBNLG_ROW],
}
ROWS["e2e-small"] = [{"mr": row["meaning_representation"], "ref": row["human_reference"]} for row in ROWS["e2e"]]


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the random weights of a tiny encoder and of a tiny GPT-2, and their tokenizer."""
    torch.manual_seed(0)
    words = len(SPECIAL + WORDS)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": HIDDEN, "hidden_size": HIDDEN}
    encoder = RobertaModel(RobertaConfig(vocab_size=words, max_position_embeddings=66, **sizes))
    decoder = GPT2LMHeadModel(GPT2Config(vocab_size=words, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=64))
    split = Tokenizer(models.WordLevel({word: n for n, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<|endoftext|>")
    folders = {}
    for kind, model in (("sentences", encoder), ("text", decoder)):
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders


def tiny(name: str, tiny_models: dict[str, Path]) -> TextTask:
    """The named task with a tiny model in place of its own."""
    task = TASKS[name]
    assert isinstance(task, TextTask)
    folder = str(tiny_models["text" if task.kind == "text" else "sentences"])
    return replace(task, model=folder, tokenizer=folder)


def write(file: Path, rows: list[Row]) -> Path:
    if file.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(rows), file)
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as lines:
            table = csv.DictWriter(lines, list(rows[0]), delimiter="\t" if file.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.mark.parametrize(
    ("task", "suffix", "scores"),
    [
        ("sst2", ".tsv", {"validation"}),
        ("mrpc", ".csv", {"validation", "validation F1"}),
        ("stsb", ".parquet", {"validation Pearson", "validation Spearman"}),
        ("e2e", ".jsonl", {"validation loss", "validation perplexity"}),
        ("webnlg", ".jsonl.gz", {"validation loss", "validation perplexity"}),
        ("e2e-small", ".jsonl", {"validation loss", "validation perplexity"}),
    ],
)
def test_tasks_train(
    task: str,
    suffix: str,
    scores: set[str],
    tiny_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    definition = tiny(task, tiny_models)
    steps: list[float] = []
    monkeypatch.setattr(accuracy.Progress, "advance", lambda *_: steps.append(1))
    write(tmp_path / f"train{suffix}", ROWS[task] * 32)
    write(tmp_path / f"validation{suffix}", ROWS[task])
    report, table = tmp_path / "report.json", tmp_path / "table.md"
    rows = str(2 * definition.recipe.batch)
    accuracy.main(
        [
            *("--task", task, "--dataset", str(tmp_path), "--model", definition.model),
            *("--train-rows", rows, "--epochs", "1", "--seeds", "1", "--threads", "1"),
            *("--methods", "plain,daf-exact", "--json", str(report), "--markdown", str(table)),
        ]
    )
    plain, exact = (run["accuracy"] for run in json.loads(report.read_text())["runs"])
    assert len(steps) == 4
    assert plain == exact
    assert plain.keys() == scores
    assert all(math.isfinite(value) for value in plain.values())
    if "validation loss" in scores:
        assert f"| plain | {plain['validation loss']:.4f} |" in table.read_text(), "losses are no percentages"


def test_images_train(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (256, 32, 32, 3), dtype=np.uint8)
    for file in (images.TRAINING_FILE, images.TEST_FILE):
        np.savez(tmp_path / file, x=pixels, y=np.arange(256, dtype=np.uint8) % 10)
    report = tmp_path / "report.json"
    short = ["--epochs", "1", "--seeds", "1", "--threads", "1", "--methods", "plain", "--evaluation-rows", "10"]
    accuracy.main(["--task", "cifar10", "--dataset", str(tmp_path), *short, "--json", str(report)])
    assert json.loads(report.read_text())["runs"][0]["accuracy"].keys() == {"test"}


def test_images_of_the_hub_are_those_of_files(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    for file in (images.TRAINING_FILE, images.TEST_FILE):
        np.savez(tmp_path / file, x=pixels, y=np.arange(3, dtype=np.uint8))
    from_rows = images.images_of_rows(
        [{"img": Image.fromarray(picture), "label": n} for n, picture in enumerate(pixels)]
    )
    from_files = images.load_images(tmp_path)["test"]
    assert torch.equal(from_rows.pixels, from_files.pixels)
    assert torch.equal(from_rows.labels, from_files.labels)
    blue = (pixels[0, 3, 5, 2] / 255 - 0.4465) / 0.262
    assert from_files.pixels[0, 2, 3, 5].item() == pytest.approx(blue, rel=1e-5)


def test_recipes_reach_the_optimizer(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny("e2e", tiny_models)
    splits = finetune.tokenized({"train": ROWS["e2e"] * 400, "validation": ROWS["e2e"]}, task)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        finetune, "train", lambda *given, **named: seen.update(named, optimizer=given[3], rates=given[4])
    )
    finetune.finetune("plain", 0, splits, task)
    rate = seen["rates"].lr_lambdas[0]
    assert seen["optimizer"].defaults["weight_decay"] == 0.01
    assert seen["optimizer"].defaults["lr"] == 2e-4
    assert seen["loss_function"].keywords == {"smoothing": 0.1}
    assert [rate(step) for step in (0, 250, 500, 1500, 2500)] == [0, 0.5, 1, 0.5, 0]


def test_a_warmup_below_one_is_a_share(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(finetune, "train", lambda *arguments, **_: seen.append(arguments[4]))
    task = replace(tiny("sst2", tiny_models), recipe=Recipe(batch=1, epochs=50, warmup=0.06))
    finetune.finetune("plain", 0, finetune.tokenized({"train": ROWS["sst2"], "dev": ROWS["sst2"]}, task), task)
    assert [seen[0].lr_lambdas[0](step) for step in (3, 6, 53)] == [0.5, 1, 0.5]


def test_adapters_are_those_of_the_paper(tiny_models: dict[str, Path]) -> None:
    shapes = {}
    for name in ("stsb", "e2e"):
        model = finetune.build_encoder(0, tiny(name, tiny_models))
        trained = {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}
        shapes[name] = {key.replace(".default", ""): shape for key, shape in trained.items()}
    heads = [shape for key, shape in shapes["stsb"].items() if "classifier" in key and "out_proj.weight" in key]
    adapters = {shape for key, shape in shapes["stsb"].items() if "lora_A" in key}
    assert (heads, adapters) == ([(1, HIDDEN)], {(8, HIDDEN)})
    assert set(shapes["e2e"].values()) == {(4, HIDDEN), (3 * HIDDEN, 4)}


def test_only_the_written_text_has_labels(tiny_models: dict[str, Path]) -> None:
    source = "Rome : is : good | Mill : is : bad"
    assert [(*example.texts, example.target) for example in triples(WEBNLG_ROW)] == [
        (source, "Rome is good"),
        (source, "Mill is bad"),
    ]
    tokenizer = open_tokenizer(str(tiny_models["text"]))
    row = tokenize(tokenizer, triples(WEBNLG_ROW), "text", longest=64)[0]
    read, written = tokenizer.encode(source), tokenizer.encode("Rome is good")
    assert row["input_ids"] == [*read, END, *written, END]
    assert row["labels"] == [IGNORED] * (len(read) + 1) + [*written, END]
    assert tokenize(tokenizer, triples(WEBNLG_ROW), "text", longest=15)[0]["input_ids"] == row["input_ids"][:15]


def test_padding_has_no_label_and_no_attention() -> None:
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [6] * n} for n in (1, 2)]
    batch = pad(rows, pad_id=3)
    assert {name: value.tolist()[0] for name, value in batch.items()} == {
        "input_ids": [5, 3],
        "attention_mask": [1, 0],
        "labels": [6, IGNORED],
    }


def test_gpt2_tokenizer_of_its_two_files(data_dir: Path) -> None:
    tokenizer = open_tokenizer(str(data_dir / "gpt2_vocab"))
    assert (tokenizer.encode("Hello world"), tokenizer.eos_token_id) == ([15496, 995], 50256)


def test_metrics() -> None:
    answers = torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0]])
    labels = torch.tensor([1, 0, 1, 1])
    assert METRICS["accuracy"](answers, labels) == 0.25
    assert METRICS["F1"](answers, labels) == pytest.approx(0.4)  # 1 found, 1 wrongly, 2 missed: 2 / (2 + 1 + 2)
    scores, truth = torch.tensor([[1.0], [2], [3], [10]]), torch.tensor([1.0, 2, 3, 4])
    assert METRICS["Pearson"](scores, truth) == pytest.approx(14 / math.sqrt(50 * 5))
    assert METRICS["Spearman"](scores, truth) == pytest.approx(1)


def test_losses_are_smoothed_and_skip_what_has_no_label() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[4, 1, IGNORED], [IGNORED, IGNORED, 2]])
    logs = logits.log_softmax(-1)
    expected = [-0.9 * row[label] - 0.1 * row.mean() for row, label in ((logs[0, 0], 1), (logs[1, 1], 2))]
    assert next_token_loss(logits, labels, 0.1).item() == pytest.approx(sum(map(float, expected)) / 2)


def test_losses_of_splits_are_means_of_tokens() -> None:
    table = nn.Embedding(8, 8, _weight=torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.table(input_ids))

    rows = [{"input_ids": [1, *range(2, n)], "labels": [IGNORED, *range(2, n)]} for n in (3, 8, 4, 5, 6, 7, 8, 3, 8)]
    pairs = [pair for row in rows for pair in zip(row["input_ids"], row["input_ids"][1:], strict=False)]
    expected = sum(-table.weight[one].log_softmax(-1)[other].item() for one, other in pairs) / len(pairs)
    found = score(Bigrams(), {"dev": rows, "test": rows[:1]}, (), pad_id=0)
    assert list(found) == [
        f"{split} {name}" for split in ("dev", "test", "dev+test") for name in ("loss", "perplexity")
    ]
    assert found["dev loss"] == pytest.approx(expected)
    assert found["dev perplexity"] == pytest.approx(math.exp(expected))


def test_data_sets_are_loaded_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "web_nlg"
    data.mkdir()
    for split in ("train", "validation"):
        write(data / f"{split}.jsonl", [WEBNLG_ROW])
    rows = load_hub(HubData(name=str(data)))
    assert {split: triples(found[0]) for split, found in rows.items()} == dict.fromkeys(rows, triples(WEBNLG_ROW))
    with pytest.raises(SourceError, match=r"has the splits \['train', 'validation'\], and \['test'\] are needed"):
        load_hub(HubData(name=str(data), evaluation="test"))


@pytest.mark.parametrize(
    ("text", "name", "config", "revision"),
    [
        ("glue/stsb", "nyu-mll/glue", "stsb", "main"),
        ("nyu-mll/glue", "nyu-mll/glue", "mrpc", "main"),
        ("nyu-mll/glue/stsb@abc", "nyu-mll/glue", "stsb", "abc"),
        ("other/pairs", "other/pairs", None, None),
        ("other/pairs/small@abc", "other/pairs", "small", "abc"),
    ],
)
def test_names_of_the_hub(text: str, name: str, config: str | None, revision: str | None) -> None:
    own = HubData(name="nyu-mll/glue", config="mrpc", revision="main", evaluation="dev")
    assert hub_data(text, own) == HubData(name=name, config=config, revision=revision, evaluation="dev")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "cola"], "invalid choice: 'cola' (choose from"),
        (["--data", ".", "--model", "minilm"], "got --model without --task; allowed are cifar10, sst2"),
    ],
)
def test_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.parse_arguments(arguments)
    assert message in capsys.readouterr().err.replace("'cifar10'", "cifar10")


def test_results_from_before_there_were_tasks_are_continued(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    results = Path(__file__).parent.parent / "docs" / "results" / "cifar-auto.json"
    asked = ["--data", str(tmp_path / "cifar10"), "--json", str(results), "--threads", "1"]
    assert "task" not in json.loads(results.read_text())["settings"]
    assert len(accuracy.read_runs(accuracy.parse_arguments(asked))) == 10
    with pytest.raises(SystemExit, match="pass another file as --json"):
        accuracy.read_runs(accuracy.parse_arguments([*asked, "--task", "cifar10"]))


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("sst2", [{"text": "a film", "label": 1}], r"columns \['label', 'text'\], and \['sentence'\] are needed"),
        ("sst2", [{"sentence": "a film", "label": -1}], "got the label -1; allowed are 0 and 1"),
        ("stsb", [{"sentence1": "a", "sentence2": "a", "label": -1.0}], "got the label -1.0; allowed are 0 to 5"),
        ("e2e", [{"mr": "a"}], r"and \['ref'\] are needed"),
        ("webnlg", [{"modified_triple_sets": [], "lex": []}], "have to be objects, as in web_nlg"),
        ("webnlg", [WEBNLG_ROW | {"lex": {"comment": ["toFix"], "text": ["a"]}}], "the split train has no example"),
    ],
)
def test_wrong_rows_are_refused(task: str, rows: list[Row], message: str, tiny_models: dict[str, Path]) -> None:
    with pytest.raises(SourceError, match=message):
        finetune.tokenized({"train": rows}, tiny(task, tiny_models))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dataset", "glue/stsb"],
            "'nyu-mll/glue' is no file or folder here, and cannot be had from the Hub: .+ pass",
        ),
        (["--dataset", "FOLDER", "--model", "no/model"], "the tokenizer 'no/model' cannot be had: .+ pass the folder"),
        (["--dataset", "FOLDER", "--evaluation", "dev.csv"], "a file to train on needs one to evaluate on"),
        (["--dataset", "FOLDER/train.jsonl"], "a file to train on needs one to evaluate on"),
        (
            ["--dataset", "FOLDER/train.xml", "--evaluation", "FOLDER/train.xml"],
            "allowed are files that end in .jsonl.gz",
        ),
        (["--dataset", "FOLDER/two"], r"two has \['train.jsonl', 'train.csv'\]; one file a split is needed"),
        (["--dataset", "FOLDER/none"], "none has the splits"),
    ],
)
def test_data_that_cannot_be_had(arguments: list[str], message: str, tmp_path: Path) -> None:
    for folder in ("two", "none"):
        (tmp_path / folder).mkdir()
    for name in ("train.jsonl", "dev.jsonl", "two/train.jsonl"):
        write(tmp_path / name, ROWS["stsb"])
    write(tmp_path / "two" / "train.csv", ROWS["stsb"])
    (tmp_path / "train.xml").touch()
    with pytest.raises(SystemExit, match=message):
        accuracy.main(["--task", "stsb", *(text.replace("FOLDER", str(tmp_path)) for text in arguments)])


def test_weights_that_cannot_be_had(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(SourceError, match=r"the weights of 'no/model' cannot be had: .+ one of minilm, small-gpt2"):
        finetune.build_encoder(0, replace(tiny("sst2", tiny_models), model="no/model"))


def test_images_have_one_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="got --model, and ResNet-18 is trained on images; leave it out"):
        accuracy.main(["--task", "cifar10", "--data", str(tmp_path), "--model", "minilm"])


def test_the_hub_takes_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match="run: pip install datasets; or pass local files"):
        load_hub(HubData(name="nyu-mll/glue"))
