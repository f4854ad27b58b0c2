"""Tests of the benchmarks: their options, their arithmetic and one tiny run of each."""

import gzip
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from benchmarks import accuracy, budgets, elastic, memory, operators, overlap, training
from benchmarks.accuracy import Run
from benchmarks.finetune import ENCODER_PACKAGE, load_splits
from benchmarks.models import build_batch, build_model
from benchmarks.process_memory import SavedTensorCounter
from benchmarks.summary import (
    GradientComparison,
    compare_gradients,
    compare_lora_gradients,
    load_gradients,
    summarize,
)
from benchmarks.timing import paired_ratio
from benchmarks.worker import Measurement, Task, measure
from daf_core.plan.costs import RANDOM_STATES
from tests.integrations.elastic_runs import count_time

METHOD_KEYS = {
    "method",
    "raw_bytes",
    "held_bytes",
    "peak_rss_bytes",
    "step_seconds",
    "step_ratio",
    "gradient_error",
}
MACHINE_KEYS = {"cpu", "cores", "threads", "torch", "python", "allocator", "dtype"}
FLOAT_BYTES = 4
TINY_BATCH, TINY_SEQ = 8, 64  # large enough for DAF to compress what the model saves


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measurement(*, seconds: float = 1.0, raw: int = 100, held: int = 100) -> Measurement:
    return Measurement(
        raw_bytes=raw,
        held_bytes=held,
        pack_seconds=0.0,
        unpack_seconds=0.0,
        setup_rss_bytes=10,
        peak_rss_bytes=1000,
        step_seconds=seconds,
        allocator="system",
    )


def tiny_task(method: str, *, dtype: Literal["fp32", "bf16"] = "fp32", gradients: str = "") -> Task:
    return Task(
        method=method,
        model="tiny",
        batch=TINY_BATCH,
        seq=TINY_SEQ,
        image=32,
        dtype=dtype,
        steps=1,
        threads=1,
        lora_dropout=0.1,
        gradients=gradients,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "invalid choice: 'bert'"),
        (["--batch", "0"], "got '0'; allowed is a whole number, 1 or more"),
        (["--rounds", "two"], "got 'two'; allowed is a whole number, 1 or more"),
        (["--threads", "100000"], "got '100000'; allowed is a whole number, 1 to"),
        (["--model", "tiny", "--seq", "65"], "got 65; tiny takes 2 to 64; pass a smaller one"),
        (["--image", "8"], "allowed is a whole number, 32 or more"),
        (["--lora-dropout", "1"], "got '1'; allowed is a number from 0 to below 1"),
        (["--methods", "plain,daf-3bit"], "got 'daf-3bit'; allowed are plain, checkpoint, daf-auto"),
        (["--methods", "daf-4bit"], "got 'daf-4bit' without 'plain'"),
        (["--methods", "plain,plain"], "repeats a method; name each one once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_training_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no-such-folder"], "got 'no-such-folder', which is no folder"),
        (["--methods", "plain,checkpoint"], "got 'checkpoint'; allowed are plain, daf-auto"),
        (["--seeds", "0"], "got '0'; allowed is a whole number, 1 or more"),
    ],
)
def test_accuracy_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_accuracy_needs_splits(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl\.gz and dev\.jsonl\.gz"):
        load_splits(tmp_path)


def test_rounds_rotate() -> None:
    assert [training.rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_ratio_is_the_median_of_pairs() -> None:
    assert paired_ratio([2.0, 3.0, 40.0], [1.0, 2.0, 10.0]) == 2.0


@pytest.mark.parametrize(("values", "baseline"), [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_needs_pairs(values: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="pass one of each for every round"):
        paired_ratio(values, baseline)


def test_gradient_error_is_relative_over_all_parameters() -> None:
    expected = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    found = {"b": torch.tensor([[4.0]]), "a": torch.tensor([0.0])}
    compared = compare_gradients(found, expected)
    assert (compared.error, compared.cosine) == pytest.approx((3 / 5, 4 / 5))
    assert not compared.identical
    assert compare_gradients(expected, expected) == GradientComparison(error=0.0, cosine=1.0, identical=True)


def test_adapters_have_an_error_of_their_own() -> None:
    expected = {"layer.lora_A.weight": torch.ones(4), "classifier.weight": torch.full((4,), 1000.0)}
    found = expected | {"layer.lora_A.weight": torch.zeros(4)}
    compared = compare_lora_gradients(found, expected)
    assert compared is not None
    assert compared.error == 1.0
    assert compare_gradients(found, expected).error == pytest.approx(1e-3, rel=1e-3)
    assert compare_lora_gradients({"weight": torch.ones(1)}, {"weight": torch.ones(1)}) is None


@pytest.mark.parametrize(
    ("found", "message"), [({"b": torch.ones(1)}, r"\['a', 'b'\]"), ({"a": torch.ones(1)}, "gradient is zero")]
)
def test_gradients_must_be_comparable(found: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_gradients(found, {"a": torch.zeros(1)})


def test_checkpoint_has_the_raw_bytes_of_plain() -> None:
    plain = [measurement(seconds=1.0), measurement(seconds=2.0)]
    rounds = [measurement(seconds=2.0, raw=7, held=7), measurement(seconds=3.0, raw=7, held=7)]
    gradients = GradientComparison(error=0.0, cosine=1.0, identical=True)
    result = summarize("checkpoint", rounds, plain, gradients, None)
    assert (result.raw_bytes, result.held_bytes, result.step_seconds, result.step_ratio) == (100, 7, 2.5, 1.75)


def test_accuracy_summary() -> None:
    reached = {"plain": [0.8, 0.7], "daf-4bit": [0.7, 0.76]}
    runs = [
        Run(method=method, seed=seed, accuracy={"dev": value}, seconds=1.0, figures={})
        for method, values in reached.items()
        for seed, value in enumerate(values)
    ]
    later = Run(method="plain", seed=7, accuracy={"dev": 0.1}, seconds=1.0, figures={})
    plain, coded = accuracy.summarize([*runs, later])
    assert plain.seeds == coded.seeds == [0, 1]
    assert (plain.mean, plain.mean_difference, plain.difference_deviation) == pytest.approx((0.75, 0, 0))
    assert (coded.mean, coded.mean_difference) == pytest.approx((0.73, -0.02))
    assert (coded.deviation, coded.difference_deviation) == pytest.approx((0.0424, 0.1131), abs=1e-4)
    assert "| daf-4bit | 70.00 | 76.00 | 73.00 | 4.24 | -2.00 | 11.31 |" in accuracy.markdown_report([plain, coded])
    other = Run(method="daf-2bit", seed=7, accuracy={"dev": 0.1}, seconds=1.0, figures={})
    assert accuracy.summarize([*runs, later, other]) == []  # and what was measured can still be written


def test_counter_takes_each_storage_once_and_no_weights() -> None:
    layer = nn.Linear(6, 4)
    inputs = torch.randn(8, 6, requires_grad=True)  # else the weight would not be saved
    with SavedTensorCounter(layer) as counter:
        outputs = layer(inputs)  # saves the inputs and the weight
        (outputs.exp() + layer(inputs.view(8, 6))).sum()  # saves its own outputs, and the inputs again
    assert counter.bytes == (8 * 6 + 8 * 4) * FLOAT_BYTES


def test_counter_leaves_casts_of_weights_out() -> None:
    layer = nn.Linear(6, 4)
    inputs = torch.randn(8, 6, requires_grad=True)  # else the weight would not be saved
    with SavedTensorCounter(layer) as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        layer(inputs)  # saves the inputs and the weight, both in two bytes
    assert counter.bytes == 8 * 6 * FLOAT_BYTES // 2


def test_every_adapter_has_a_gradient() -> None:
    model = build_model("tiny", lora_dropout=0.1)
    model(**build_batch("tiny", batch=2, seq=16, image=32)).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained)


def test_methods_that_lose_nothing_give_identical_gradients(tmp_path: Path) -> None:
    files = {method: tmp_path / f"{method}.pt" for method in ("plain", "checkpoint", "daf-exact")}
    measured = {method: measure(tiny_task(method, gradients=str(file))) for method, file in files.items()}
    plain, *others = (load_gradients(file) for file in files.values())
    assert all(compare_gradients(gradients, plain).identical for gradients in others)
    assert measured["checkpoint"].held_bytes < measured["plain"].held_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_daf_counts_the_bytes_that_plain_saves(dtype: Literal["fp32", "bf16"]) -> None:
    plain, coded = (measure(tiny_task(method, dtype=dtype)) for method in ("plain", "daf-4bit"))
    assert coded.raw_bytes == pytest.approx(plain.raw_bytes, rel=0.01)


def test_training_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    shape = ["--model", "tiny", "--batch", str(TINY_BATCH), "--seq", str(TINY_SEQ)]
    training.main(
        [*shape, "--methods", "plain,daf-4bit", "--rounds", "1", "--steps", "1", "--threads", "1", "--json", str(file)]
    )
    report = json.loads(file.read_text())
    plain, coded = report["methods"]
    assert plain.keys() >= METHOD_KEYS
    assert plain.keys() == coded.keys()
    assert (plain["method"], plain["step_ratio"], plain["gradient_error"]) == ("plain", 1.0, 0.0)
    assert coded["held_bytes"] < coded["raw_bytes"]
    assert 0 < coded["gradient_error"] < coded["lora_gradient_error"] < 1
    assert report["machine"].keys() == MACHINE_KEYS
    assert report["settings"]["methods"] == ["plain", "daf-4bit"]
    assert report["settings"]["device"] == "cpu"
    assert not {"peak_device_bytes", "loaded_device_bytes"} & plain.keys()


def test_a_budget_is_part_of_a_methods_name(tmp_path: Path) -> None:
    files = {method: tmp_path / f"{method}.pt" for method in ("daf-4bit", "daf-4bit@300KB", "daf-4bit@300KB+spill")}
    measured = {method: measure(tiny_task(method, gradients=str(file))) for method, file in files.items()}
    free, dropped, spilled = measured.values()
    assert dropped.held_bytes <= 300_000 < free.held_bytes
    assert (dropped.dropped_bytes > 0, dropped.spilled_bytes) == (True, 0)
    assert (spilled.dropped_bytes, spilled.spilled_bytes > 0) == (0, True)
    loaded = [load_gradients(file) for file in files.values()]
    assert compare_gradients(loaded[2], loaded[0]).identical
    assert not compare_gradients(loaded[1], loaded[0]).identical


def test_stress_finds_no_fragmentation() -> None:
    stressed = memory.stress(400)
    assert stressed.encodes > 200
    assert 0.95 < stressed.least_payload <= stressed.mean_payload < 1
    assert stressed.refused_with_room == 0


def test_lowering_a_precision_gives_up_planes_and_moves_nothing() -> None:
    assert memory.lowering_seconds(rounds=1) > 0


def write_split(file: Path, rows: int) -> None:
    sentences = [{"sentence": f"a {'good' if row % 2 else 'bad'} film", "label": row % 2} for row in range(rows)]
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(sentence) + "\n" for sentence in sentences)


@pytest.mark.skipif(find_spec(ENCODER_PACKAGE) is None, reason=f"{ENCODER_PACKAGE} is not installed")
def test_memory_writes_its_figures(tmp_path: Path) -> None:
    for task in ("sst2", "mrpc"):
        (tmp_path / task).mkdir()
        for split in ("train", "dev"):
            write_split(tmp_path / task / f"{split}.jsonl.gz", rows=96)
    report, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    short = ["--actions", "300", "--steps", "2", "--data", str(tmp_path)]
    memory.main([*short, "--json", str(report), "--picture", str(picture)])
    growth = json.loads(report.read_text())["growth"]
    assert [(trace["task"], trace["growth"], trace["budget"] is None) for trace in growth] == [
        (task, step, free) for task in ("sst2", "mrpc") for free in (True, False) for step in ("adaptive", "100MB")
    ]
    assert all(trace["dropped_planes"] == 0 or trace["budget"] for trace in growth)
    assert picture.stat().st_size > 0


@pytest.mark.skipif(find_spec(ENCODER_PACKAGE) is None, reason=f"{ENCODER_PACKAGE} is not installed")
def test_accuracy_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)
    for split in ("train", "dev", "test"):
        write_split(tmp_path / f"{split}.jsonl.gz", rows=40)
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "markdown")}
    outputs = [text for kind, file in files.items() for text in (f"--{kind}", str(file))]
    short = ["--data", str(tmp_path), "--seeds", "1", "--epochs", "1", "--threads", "1"]
    accuracy.main([*short, "--methods", "plain,daf-exact", *outputs])
    report = json.loads(files["json"].read_text())
    plain, exact = (run["accuracy"] for run in report["runs"])
    assert plain == exact
    assert list(plain) == ["dev", "test", "dev+test"]
    assert report["machine"].keys() == MACHINE_KEYS
    assert files["markdown"].read_text().count("| daf-exact |") == len(plain)
    accuracy.main([*short, "--methods", "plain,daf-exact", "--first-seed", "1", *outputs])
    assert [(run["method"], run["seed"]) for run in json.loads(files["json"].read_text())["runs"][2:]] == [
        ("plain", 1),
        ("daf-exact", 1),
    ]
    before = files["json"].read_bytes()
    accuracy.main([*short[:2], "--seeds", "2", *short[4:], "--methods", "plain,daf-exact", *outputs])
    assert files["json"].read_bytes() == before, "runs that the file has are not repeated"
    with pytest.raises(SystemExit, match="pass another file"):
        accuracy.main([*short, "--train-rows", "8", *outputs])
    shares = tmp_path / "shares.json"
    accuracy.main([*short, "--methods", "plain,elastic@0.8,random@.8,top-half@0.8", "--json", str(shares)])
    for run in json.loads(shares.read_text())["runs"][1:]:
        assert 0 < run["figures"]["daf/elastic_depth"] < 6


def test_hidden_share() -> None:
    assert overlap.hidden_share(1.2, 1.05) == pytest.approx(0.75)


def test_operators_measures_a_step(tmp_path: Path) -> None:
    output = tmp_path / "operators.json"
    operators.main(["--models", "tiny", "--rounds", "1", "--threads", "1", "--json", str(output)])
    (result,) = json.loads(output.read_text())["operators"]
    assert result["rewrites"] == {"attention-dropout": 2}
    assert 0 < result["held_bytes"] < result["plain_held_bytes"]
    assert result["held_bytes"] <= result["peak_bytes"] < result["plain_peak_bytes"]
    assert 0 < result["gradient_error"] < 2e-6


def test_operators_shows_what_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    operators.main(["--models", "tiny", "--threads", "1", "--census"])
    shown = capsys.readouterr().out
    assert "GELUActivation" in shown
    assert "NativeLayerNorm" in shown


def test_overlap_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_take_cores", lambda count: None)
    output = tmp_path / "overlap.json"
    size = ["--model", "tiny", "--batch", str(TINY_BATCH), "--seq", str(TINY_SEQ)]
    overlap.main([*size, "--rounds", "2", "--precisions", "8,4", "--json", str(output)])
    report = json.loads(output.read_text())
    assert report["machine"].keys() >= MACHINE_KEYS
    assert [result["precision"] for result in report["overlap"]] == [8, 4]
    for result in report["overlap"]:
        assert {name: len(taken) for name, taken in result["rounds"].items()} == {"plain": 2, "device": 2, "workers": 2}


def test_overlap_refuses_unknown_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--precisions", "8,3"])
    assert "got '3'; allowed are 8, 4, 2, 1" in capsys.readouterr().err


def test_budgets_are_kept(tmp_path: Path) -> None:
    output, table = tmp_path / "budgets.json", tmp_path / "budgets.md"
    short = ["--model", "tiny", "--rounds", "1", "--threads", "1", "--budgets", "25,least"]
    budgets.main([*short, "--json", str(output), "--markdown", str(table)])
    report = json.loads(output.read_text())
    assert report["machine"].keys() == MACHINE_KEYS
    plain, checkpoint, quarter, least = report["models"]["tiny"]
    assert plain["gradient_error"] == checkpoint["gradient_error"] == 0
    assert quarter["budget_bytes"] == plain["peak_bytes"] // 4
    assert 0 < least["budget_bytes"] < quarter["budget_bytes"]
    for row in (quarter, least):
        assert row["peak_bytes"] <= row["budget_bytes"] + RANDOM_STATES
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.25)
        assert 0 < row["lora_gradient_error"] < 1
        assert len(row["blocks"]) == 2
    assert "| 25% |" in table.read_text()


def test_elastic_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_time(monkeypatch)  # on a loaded machine no step may be as short as is asked
    output = tmp_path / "elastic.json"
    elastic.main(["--model", "tiny", "--rounds", "1", "--steps", "12", "--threads", "1", "--json", str(output)])
    report = json.loads(output.read_text())
    for cut in report["cuts"]:
        assert cut["held_bytes"] <= cut["predicted_bytes"] * 1.05
    bytes_of = {(share["kind"], share["precision"]): share["mean_bytes"] for share in report["shares"]}
    assert bytes_of["lora", "4 bits, elastic"] < min(bytes_of["lora", "4 bits"], bytes_of["lora", "exact, elastic"])
    assert bytes_of["whole", "exact, elastic"] < bytes_of["whole", "exact"]
    assert [share["time"] for share in report["shares"]] == [None, 0.6, None, 0.6, None, 0.45]


@pytest.mark.parametrize("budget", ["0", "101", "half"])
def test_budgets_refuse_what_is_no_budget(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        budgets.main(["--budgets", budget])
    assert f"got '{budget}'; allowed are percentages above 0 and up to 100" in capsys.readouterr().err
