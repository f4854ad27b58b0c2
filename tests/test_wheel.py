"""An installed DAF: what a wheel consists of, and that it works beside nothing but what it requires."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "daf_kernels": ROOT / "kernels" / "daf_kernels",
    "daf_core": ROOT / "daf_core",
    "daf_integrations": ROOT / "daf_integrations",
}
TRAINERS = ["transformers", "peft", "accelerate", "lightning", "pytorch_lightning"]
STEP = """
import daf_core, daf_integrations, daf_kernels, importlib.util, json, torch
model = daf_integrations.prepare(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()), backend="reference")
model(torch.randn(64, 256)).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
found = [name for name in {trainers} if importlib.util.find_spec(name)]
print(json.dumps([found, daf_integrations.metrics(model)["daf/ratio"]]))
"""

EDITABLE = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
IMPORT_TORCH = """
import logging, site, sys
site.addsitedir("INSTALLED")  # the finder of an editable install
logging.basicConfig()
import torch
print(torch.ones(1).item(), "daf_integrations._autoload" in sys.modules)
"""

Alone = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the repository: setuptools leaves working files beside the sources."""
    copy, output = copy_into(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", output, copy)
    (built,) = output.glob("*.whl")
    return built


def copy_into(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "build", "dist", "shared", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "daf", ignore=ignored))


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return installed_alone(wheel, tmp_path_factory)


def installed_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns what runs Python where nothing but a wheel and what it requires can be imported."""
    installed, required, folder = (tmp_path_factory.mktemp(name) for name in ("installed", "required", "folder"))
    pip("install", "--target", installed, wheel)
    (metadata,) = installed.glob("*.dist-info")
    for package in required_by(Distribution.at(metadata)).values():
        link(package, required)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(installed), str(required)])
        command = [sys.executable, "-S", *(str(word).replace("INSTALLED", str(installed)) for word in arguments)]
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


def pip(*arguments: object) -> None:
    """Runs pip without a network."""
    command = [sys.executable, "-m", "pip", arguments[0], "--no-index", "--no-deps", *arguments[1:]]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def required_by(package: Distribution, found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """The distributions that one needs to work, without its extras, and those that these need."""
    found = {} if found is None else found
    for requirement in map(Requirement, package.requires or []):
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if needed and requirement.name not in found:
            found[requirement.name] = distribution(requirement.name)
            required_by(found[requirement.name], found)
    return found


def link(package: Distribution, folder: Path) -> None:
    """Makes a distribution importable from a folder."""
    tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
    assert tops, f"{package.name} does not say which files it has"
    for top in tops:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(package.locate_file(top))).resolve())


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_the_three_packages_and_nothing_else(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in files_in(wheel)}
    assert {name for name in top if not name.endswith((".dist-info", ".data"))} == set(PACKAGES)
    assert [name.partition("/")[2] for name in files_in(wheel) if ".data/" in name] == ["purelib/daf_autoload.py"]


def test_wheel_has_every_source_and_type_marker(wheel: Path) -> None:
    wanted = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in [*folder.rglob("*.py"), folder / "py.typed"]
    }
    assert len(wanted) > 100
    assert wanted <= files_in(wheel)


def test_wheel_is_described_by_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    assert "\nName: daf-training\n" in metadata, "another project has the name daf on the index"
    assert "Description-Content-Type: text/markdown" in metadata
    assert (ROOT / "README.md").read_text().splitlines()[0] in metadata


def test_wheel_alone_trains(alone: Alone) -> None:
    done = alone("-c", STEP.format(trainers=TRAINERS))
    assert done.returncode == 0, done.stderr
    found, ratio = json.loads(done.stdout.splitlines()[-1])
    assert found == []
    assert ratio > 2


def test_the_version_is_that_of_the_wheel(alone: Alone) -> None:
    done = alone("INSTALLED/bin/daf", "--version")
    assert done.stdout == f"{version('daf-training')}\n", done.stderr


def test_doctor_of_a_wheel_alone_says_what_is_missing_and_what_to_type(alone: Alone) -> None:
    done = alone("INSTALLED/bin/daf", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for name in ("transformers", "peft", "accelerate", "lightning"):
        assert f"{name} is missing" in done.stdout
        assert f"pip install '{name}>=" in done.stdout
    assert "DAF is ready." in done.stdout


def test_plans_for_models_name_the_extra_that_a_wheel_alone_lacks(alone: Alone) -> None:
    done = alone("INSTALLED/bin/daf", "plan", "gpt2")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: a Hugging Face model needs transformers, which is not installed")
    assert "[hf]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_torch_is_imported_when_the_folder_of_an_editable_install_is_gone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = copy_into(tmp_path / "source")
    command = [sys.executable, "-W", "ignore", "-c", EDITABLE, tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    alone = installed_alone(built, tmp_path_factory)
    there = alone("-c", IMPORT_TORCH)
    assert there.stdout.split() == ["1.0", "True"], there.stderr
    shutil.rmtree(source)
    gone = alone("-c", IMPORT_TORCH)
    assert gone.stdout.split() == ["1.0", "False"], gone.stderr
    assert "DAF is installed and cannot be loaded" in gone.stderr
