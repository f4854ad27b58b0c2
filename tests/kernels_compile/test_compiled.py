"""Each kernel compiles for GPUs that are not there, to code that is fast and rounds as it must."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.kernels_compile.cases import CHOSEN, Case, all_cases, chosen
from tests.kernels_compile.checks import complaints
from tests.kernels_compile.sweep import ROOT, TARGETS, environment

GOOD = {
    **{"registers": 40, "stack": 0, "spilled": 0},
    **{"row_loads": 8, "row_stores": 8, "fused": 0, "elements": 64.0, "inexact": []},
}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, triton_cache: Path) -> Callable[[str], Results]:
    """What was found of all chosen cases for a target, compiled when it is first asked for."""
    folder, variables = tmp_path_factory.mktemp("compiled"), environment(TRITON_CACHE_DIR=str(triton_cache))

    @lru_cache
    def results(target: str) -> Results:
        file = folder / f"{target}.json"
        command = [sys.executable, "-m", "tests.kernels_compile.sweep", "--chosen", "--target", target, "--json", file]
        run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        assert file.is_file(), run.stderr
        return json.loads(file.read_text())

    return results


@pytest.mark.parametrize(("target", "case"), [(target, case) for target in TARGETS for case in chosen(target)], ids=str)
def test_kernel_is_compiled_well(target: str, case: Case, compiled: Callable[[str], Results]) -> None:
    assert compiled(target)[str(case)]["complaints"] == []


def test_every_kernel_is_among_the_chosen() -> None:
    assert set(CHOSEN) <= set(all_cases())
    assert {case.kernel for case in CHOSEN} == {case.kernel for case in all_cases()} == set(kernels_of_the_package())


def kernels_of_the_package() -> list[str]:
    """Names of the functions that launch.py may launch."""
    folder = ROOT / "kernels" / "daf_kernels" / "triton"
    sources = [path.read_text() for path in Path(folder).glob("*.py")]
    parts = [part for source in sources for part in source.split("\n@kernel\ndef ")[1:]]
    return [part.partition("(")[0] for part in parts]


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("encode_fused", {"stack": 8}),
        ("encode_fused", {"spilled": 8}),
        ("encode_fused", {"registers": 169}),
        ("encode_fused", {"row_loads": 7}),
        ("encode_slopes", {"fused": 1}),
        ("decode_fused", {"fused": 65}),
        ("decode_mask", {"row_stores": 7}),
        ("range_fused", {"inexact": ["div.full.f32"]}),
    ],
)
def test_what_is_wrong_is_noticed(kernel: str, wrong: dict[str, object]) -> None:
    case = Case(kernel, "bf16")
    assert complaints(case, GOOD) == []
    assert len(complaints(case, {**GOOD, **wrong})) == 1


def test_the_end_needs_no_vectors_and_has_the_gpu_for_itself() -> None:
    end = Case("encode_fused", "bf16", end=True)
    assert complaints(end, {**GOOD, "row_loads": 0, "registers": 200, "spilled": 9}) == []
    assert len(complaints(end, {**GOOD, "stack": 9})) == 1
