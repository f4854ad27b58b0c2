"""The command `accelerate launch`, a run that is killed, and two processes, with scripts that know nothing of DAF."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import daf_integrations as daf
from tests.integrations.small_net import SmallNet, loader

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ["-m", "accelerate.commands.launch"]
SCRIPT = "tests/integrations/accelerate_script.py"
ONE: dict[str, Any] = {"distributed_type": "NO", "num_processes": 1, "use_cpu": True, "mixed_precision": "no"}


@pytest.fixture(scope="module", autouse=True)
def entry_point() -> None:
    """Without it launched scripts train without DAF."""
    names = [point.name for point in entry_points(group="torch.backends")]
    assert "daf" in names, f"torch.backends has the entry points {names}, and not daf: reinstall with `make test`"


def start(*command: object, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program at the root of the repository."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def written(file: Path, **content: Any) -> Path:
    file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **content}))
    return file


def findings(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def test_the_example_is_compressed_by_its_configuration_file() -> None:
    small = ["--steps", 2, "--batch", 16, "--seq", 16]
    done = start(*LAUNCH, "--config_file", "examples/daf.yaml", "examples/finetune_accelerate.py", *small)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("DAF active via Accelerate: DAF stores saved activations in 4 bits")
    assert any(line.startswith("accuracy: ") for line in lines)
    [ratio] = [float(line.split("│")[2]) for line in lines if line.startswith("│ ratio")]
    assert ratio > 3
    assert "daf" not in (ROOT / "examples" / "finetune_accelerate.py").read_text().split('"""')[2].lower()


def test_a_bad_key_ends_the_launch_and_starts_no_script(tmp_path: Path) -> None:
    file = written(tmp_path / "bad.yaml", **ONE, daf_config={"precison": 4})
    done = start(*LAUNCH, "--config_file", file, SCRIPT, tmp_path, check=False)
    assert done.returncode != 0
    assert "unknown option 'precison'; did you mean 'precision'?" in done.stderr.splitlines()[-1]
    assert "CalledProcessError" not in done.stderr
    assert not (tmp_path / "rank0.json").exists()


def test_the_module_runs_a_script_without_the_entry_point(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nfrom accelerate import Accelerator\nimport beside\n"
        "model = Accelerator(cpu=True).prepare(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()))\n"
        "model(torch.ones(64, 512)).sum().backward()\n"
        "torch.optim.SGD(model.parameters()).step()\n"
        "print(__name__, sys.argv[1:])\n"
    )
    (tmp_path / "beside.py").touch()
    file = written(tmp_path / "plain.yaml", **ONE)
    command = [*LAUNCH, "--config_file", file, "-m", "daf_integrations.accelerate", script, "--lr", 1]
    done = start(*command, DAF_AUTOLOAD="0", ACCELERATE_DAF_CONFIG='{"precision": 8}')
    assert "DAF active via Accelerate: DAF stores saved activations in 8 bits" in done.stdout
    assert "__main__ ['--lr', '1']" in done.stdout
    assert "│ steps                       │ 1 " in done.stdout


def test_a_killed_run_resumes_to_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    daf = {"ACCELERATE_USE_DAF": "1", "ACCELERATE_DAF_CONFIG": "{}"}
    killed = start(SCRIPT, tmp_path, "--steps", 6, "--save-at", 3, "--killed", check=False, **daf)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    whole = findings(tmp_path)
    resumed = start(SCRIPT, tmp_path, "--steps", 6, "--resume-at", 3, **daf)
    assert findings(tmp_path)["losses"] == whole["losses"][3:]
    assert findings(tmp_path)["gradients"] == whole["gradients"]
    assert re.search(r"│ steps +│ 6 ", resumed.stdout)


def test_two_processes_have_the_same_gradients_and_the_bytes_of_one(tmp_path: Path) -> None:
    """By torchrun: on processors `accelerate launch` starts several processes only through MPI."""
    model = daf.prepare(SmallNet(), precision=4, audit_every=None)
    [batch] = loader(1)
    model(**batch)["loss"].backward()
    torch.optim.SGD(model.parameters()).step()
    expected = daf.metrics(model)["daf/held_mb"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, tmp_path, "--steps", 3]
    done = start(*command, ACCELERATE_USE_DAF="1", ACCELERATE_DAF_CONFIG='{"precision": 4}')
    ranks = [findings(tmp_path, rank) for rank in (0, 1)]
    assert [found["processes"] for found in ranks] == [2, 2]
    assert ranks[0]["gradients"] == ranks[1]["gradients"]
    assert ranks[0]["losses"] != ranks[1]["losses"]
    for found in ranks:
        assert found["held_mb"] == pytest.approx(expected, rel=0.01)
    assert done.stdout.count("DAF active via Accelerate") == 1
    assert done.stdout.count("saved activations    ") == 1


def test_elastic_training_in_two_processes_needs_the_configuration_alone(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, tmp_path, "--steps", 3]
    options = {"precision": "exact", "elastic": {"time": 0.9}}
    done = start(*command, ACCELERATE_USE_DAF="1", ACCELERATE_DAF_CONFIG=json.dumps(options))
    ranks = [findings(tmp_path, rank) for rank in (0, 1)]
    assert [found["processes"] for found in ranks] == [2, 2]
    assert ranks[0]["gradients"] == ranks[1]["gradients"]
    assert "elastic, 90% of a step's time" in done.stdout
