"""Tests of the benchmarks: their options, their arithmetic and one tiny run of each."""

import gzip
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, budgets, elastic, fits, long_text, memory, operators, overlap, scaling
from benchmarks.accuracy import Run
from benchmarks.finetune import ENCODER_PACKAGE, load_splits
from benchmarks.zoo.models import build_batch, build_model
from daf_core.plan.policies import RANDOM_STATES
from tests.integrations.elastic_runs import count_time

MACHINE_KEYS = {"cpu", "cores", "threads", "torch", "python", "allocator", "dtype"}
TINY_BATCH, TINY_SEQ = 8, 64  # large enough for DAF to compress what the model saves


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no-such-folder"], "got 'no-such-folder', which is no folder"),
        (["--methods", "plain,daf-3bit"], "got 'daf-3bit'; allowed are plain, checkpoint"),
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
    assert accuracy.summarize([other]) == []  # plain comes last


def test_every_adapter_has_a_gradient() -> None:
    model = build_model("tiny", lora_dropout=0.1)
    model(**build_batch("tiny", batch=2, seq=16, image=32)).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained)


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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # TRL's, of its own interface
def test_preferences_compares_trainings(tmp_path: Path) -> None:
    preferences = pytest.importorskip("benchmarks.preferences", reason="its trainers are those of TRL")
    output = tmp_path / "preferences.json"
    preferences.main(["--trainers", "dpo", "--steps", "3", "--threads", "1", "--json", str(output)])
    plain, exact, auto = json.loads(output.read_text())["results"]
    assert exact["equal"]
    assert plain["mean"] == exact["mean"] == pytest.approx(0.69, abs=0.01)
    assert not auto["equal"]
    assert auto["held_bytes"] < exact["held_bytes"] <= exact["raw_bytes"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's and peft's, of names that transformers has changed
def test_vocabulary_compares_losses(tmp_path: Path) -> None:
    vocabulary = pytest.importorskip("benchmarks.vocabulary", reason="some of its methods are TRL's")
    output = tmp_path / "vocabulary.json"
    small = ["--layers", "2", "--width", "64", "--vocabulary", "2000", "--tokens", "128", "--rounds", "1"]
    vocabulary.main([*small, "--threads", "1", "--json", str(output)])
    costs = {cost["method"]: cost for cost in json.loads(output.read_text())["results"]}
    assert costs.keys() == vocabulary.CONTESTANTS.keys()
    for name, cost in costs.items():
        most = 0.3 if "daf-auto" in name else 1e-5
        assert cost["gradient_error"] < most, name
    assert costs["daf-auto"]["gradient_error"] > 0
    for name in ("checkpoint", "offload", "chunked loss", "daf-auto"):
        assert costs[name]["peak_bytes"] < costs["plain"]["peak_bytes"], name


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


def test_scaling_writes_its_figures(tmp_path: Path) -> None:
    files = {"json": tmp_path / "all.json", "markdown": tmp_path / "all.md", "picture": tmp_path / "all.png"}
    outputs = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    scaling.main(["--axes", "layers", "--largest", "4", "--width", "64", "--rounds", "1", "--threads", "1", *outputs])
    points = json.loads(files["json"].read_text())["points"]
    assert [(point["size"]["layers"], point["method"]) for point in points] == [
        (layers, method) for layers in (2, 4) for method in scaling.METHODS
    ]
    held = {(point["size"]["layers"], point["method"]): point["held_bytes"] for point in points}
    assert held[4, "daf-4bit"] < held[4, "daf-exact"] < held[4, "plain"]
    assert held[4, "plain"] > held[2, "plain"]
    assert "| layers | plain s | plain MB | daf-exact time |" in files["markdown"].read_text()
    assert files["picture"].read_bytes().startswith(b"\x89PNG")


def test_a_long_row_keeps_a_plan_that_was_made_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 4000}
    monkeypatch.setattr(long_text, "CONFIGURATION", long_text.CONFIGURATION | small)
    target = tmp_path / "long.json"
    long_text.main(["--tokens", "2048", "--budget", "80MB", "--plain", "--threads", "1", "--json", str(target)])
    within, plain = json.loads(target.read_text())["steps"]
    assert within["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert within["tensor_bytes"] <= within["planned_bytes"] * 1.05
    assert within["planned_bytes"] < 80e6 < plain["tensor_bytes"]


def test_fits_compares_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "METHODS", {"plain": "plain"})
    target = tmp_path / "fits.json"
    fits.main(["--models", "gpt2", "--batch", "2", "--length", "16", "--json", str(target)])
    found = json.loads(target.read_text())["compared"]
    assert [(each["model"], each["lora_rank"]) for each in found] == [("gpt2", fits.RANK), ("gpt2", None)]
    # Logits and their gradient, and gradients and what the optimizer computes of the largest weight.
    assert found[0]["predicted_bytes"] > 2 * 2 * 16 * 8000 * 4
    assert found[1]["predicted_bytes"] > 8000 * 128 * 4 * 3
