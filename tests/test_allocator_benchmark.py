"""Tests of the benchmark of allocators; the process that it measures is tested with `daf bench`."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocators
from daf_integrations.cli.bench.worker import Measurement

MEASURED = dict.fromkeys((field.name for field in fields(Measurement)), 0) | {
    "raw_bytes": 2_000_000,
    "peak_rss_bytes": 3_000_000,
}


class Processes:
    """Stands in for `run_process`: notes what is started, and returns what it would measure."""

    def __init__(self) -> None:
        self.started: list[tuple[str, dict[str, str]]] = []

    def run(self, module: str, task: dict[str, Any], _name: str, _folder: Path, env: dict[str, str]) -> dict[str, Any]:
        assert module == "daf_integrations.cli.bench.worker"
        self.started.append((task["method"], env))
        return MEASURED | {"step_seconds": 2.0 if "LD_PRELOAD" in env else 4.0}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    stand_in = Processes()
    monkeypatch.setattr(allocators, "run_process", stand_in.run)
    return stand_in


def test_every_method_runs_under_every_setting_and_no_other(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(allocators, "LIBRARIES", {"tcmalloc": lambda: "libtcmalloc.so", "mimalloc": lambda: None})
    file = tmp_path / "allocators.json"
    allocators.main(
        ["--model", "tiny", "--seq", "16", "--methods", "plain,daf-4bit", "--rounds", "2", "--json", str(file)]
    )
    read = [(method, variables_of(env)) for method, env in processes.started]
    named = list(allocators.settings().values())
    first = [(method, each) for method in ("plain", "daf-4bit") for each in named]
    assert read[: len(first)] == first
    assert sorted(map(str, read[len(first) :])) == sorted(map(str, first))
    assert read[len(first)] == ("plain", named[1]), "another setting begins each round"
    assert {"LD_PRELOAD": "libtcmalloc.so"} in named
    assert "mimalloc" not in allocators.settings()
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    assert [(each["method"], each["peak_rss_bytes"]) for each in results[:1]] == [("plain", 3_000_000)]
    ratios = {each["setting"]: each["step_ratio"] for each in results if each["method"] == "daf-4bit"}
    assert (ratios["glibc"], ratios["tcmalloc"]) == (1.0, 0.5)
    assert "3.0" in capsys.readouterr().out


def test_chosen_allocators_run_alone_and_others_are_refused(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocators, "LIBRARIES", {"mimalloc": lambda: "libmimalloc.so"})
    small = ["--model", "tiny", "--methods", "plain", "--rounds", "1", "--json", str(tmp_path / "allocators.json")]
    allocators.main([*small, "--allocators", "glibc,mimalloc"])
    assert [variables_of(env) for _, env in processes.started] == [{}, {"LD_PRELOAD": "libmimalloc.so"}]
    with pytest.raises(SystemExit):
        allocators.main([*small, "--allocators", "tcmalloc"])
    assert "tcmalloc is not installed; allowed are glibc, " in capsys.readouterr().err


def variables_of(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))}
