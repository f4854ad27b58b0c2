"""How kernels are launched on a GPU: slowly once, then by what was compiled, which must fit what it is called with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels_compile.sweep import ROOT, environment

Found = dict[str, Any]


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def found(request: pytest.FixtureRequest, triton_cache: Path) -> Found:
    """What `tests.kernels_compile.launches` found, and the name of the GPU."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels_compile.launches", request.param],
        cwd=ROOT,
        env=environment(TRITON_CACHE_DIR=str(triton_cache)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return {**json.loads(run.stdout), "target": request.param}


def test_the_second_launch_is_the_first_without_triton_looking_at_it(found: Found) -> None:
    values = found["values"]
    expected = {
        "grid": [2, 1, 1],
        "stream": 100,
        "function": 1,
        "arguments": [values["address"], values["table"], 4096, 0, 8, 12, False],
    }
    assert found["first"] == {"slow": 1, "launches": [expected]}
    assert found["second"] == {"slow": 0, "launches": [expected]}


def test_a_prepared_launch_is_the_same(found: Found) -> None:
    """With addresses instead of tensors, and without a look at them."""
    values, (first,) = found["values"], found["first"]["launches"]
    (given,) = found["prepared"]["launches"]
    assert found["prepared"]["slow"] == 0
    assert given == first
    assert given["arguments"][:2] == [values["address"], values["table"]]


def test_constants_come_in_the_order_that_the_kernel_names_them(found: Found) -> None:
    (first,), (second,) = found["other kernel"]["launches"], found["other kernel again"]["launches"]
    assert found["other kernel again"]["slow"] == 0
    assert first["function"] == second["function"]
    assert first["arguments"][3:] == second["arguments"][3:] == [64, 64, 64, 64]
    assert len(second["arguments"]) == len(found["values"]["names"])


@pytest.mark.parametrize("number", [0, 1, 16, 2**31 + 5])
def test_integers_lead_to_no_other_code(number: int, found: Found) -> None:
    (given,) = found[f"number {number}"]["launches"]
    assert found[f"number {number}"]["slow"] == 0
    assert given["function"] == 1
    assert given["arguments"][2:4] == [number, number]


def test_code_assumes_nothing_of_integers(found: Found) -> None:
    """The code that is kept was compiled for 4096 elements: 16 divides them, and must not divide all others."""
    assert found["codes"]
    for code in found["codes"]:
        pointers = {name for name, kind in code["types"].items() if kind.startswith("*")}
        assert set(code["assumed"]) <= pointers
        assert {kind for name, kind in code["types"].items() if name not in pointers} == {"i64", "constexpr"}


@pytest.mark.parametrize("change", ["unaligned", "type", "constant", "device"])
def test_other_code_for_what_code_depends_on(change: str, found: Found) -> None:
    (given,) = found[change]["launches"]
    assert found[change]["slow"] == 1
    assert given["function"] > 1
    assert found["none of them"]["slow"] == 0
    assert found["none of them"]["launches"] == found["first"]["launches"]


def test_unaligned_elements_are_not_taken_for_aligned_ones(found: Found) -> None:
    aligned, unaligned = found["codes"][:2]
    assert "tt.divisibility" in aligned["assumed"]["values"]
    assert "tt.divisibility" not in unaligned["assumed"].get("values", [])


def test_each_device_has_its_own_code_and_stream(found: Found) -> None:
    (first,), (again,) = found["device"]["launches"], found["device again"]["launches"]
    assert found["device again"]["slow"] == 0
    assert first == again
    assert first["stream"] == 101


def test_tensors_of_2_gb_are_not_addressed_by_32_bits(found: Found) -> None:
    """Which Triton does on AMD's GPUs, where it knows that a tensor is smaller."""
    assert found["far"]["slow"] == 1
    near, far = ("tt.pointer_range" in found["codes"][index]["assumed"]["values"] for index in (0, 5))
    assert near == (found["target"] == "gfx942")
    assert not far


def test_a_program_has_as_many_threads_on_any_gpu(found: Found) -> None:
    assert {code["warps"] for code in found["codes"]} == ({4} if found["target"] == "sm_90" else {2})


def test_no_programs_are_no_launch(found: Found) -> None:
    assert found["no programs"] == {"slow": 0, "launches": []}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", [(2, 16384, 0, False)]),
        ("few", [(3, 18432, 0, True)]),
        ("end", [(1, 2048, 0, True)]),
        ("most of few", [(192, 191 * 8192 + 2048, 0, True)]),
        ("many", [(192, 192 * 8192 + 2048, 0, False), (1, 192 * 8192 + 2048, 192, True)]),
        ("many full", [(193, 193 * 8192, 0, False)]),
    ],
)
def test_full_programs_and_the_end(name: str, expected: list[tuple[int, ...]], found: Found) -> None:
    """Programs, elements, number of the first program, and whether elements are asked whether they exist.

    A few programs with an end are one launch.
    """
    launches = [(given["grid"][0], given["arguments"]) for given in found[name]["launches"]]
    assert [(programs, *given[2:4], given[-1]) for programs, given in launches] == expected
    assert [given[4:6] for _, given in launches] == [[32, 12]] * len(expected)
