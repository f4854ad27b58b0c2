import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from daf_core.autograd import torch_compile
from daf_core.autograd.torch_compile import has_compiled_anything

LIBRARY = """
import functools, torch

def compile_if_possible(function):
    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def wrapper(*arguments):
        return compiled(*arguments)

    return wrapper

@compile_if_possible
def dequantize(values):
    return values + 1

def make():
    def calls_itself(number):
        return calls_itself(number) if number else missing

    if False:
        missing = 0
    return calls_itself

calls_itself = make()
"""


def test_what_a_library_compiles_when_it_is_imported_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    library = ModuleType("a_library")
    exec(LIBRARY, vars(library))
    monkeypatch.setitem(sys.modules, "a_library", library)
    assert has_compiled_anything()
    monkeypatch.setattr(torch_compile, "COMPILED_ON_IMPORT", ("a_library",))
    assert not has_compiled_anything()
    compiled = torch.compile(nn.Linear(2, 2))
    assert has_compiled_anything()
    del compiled
    torch.compiler.reset()
    assert not has_compiled_anything()


def test_bitsandbytes_does_not_count() -> None:
    pytest.importorskip("bitsandbytes")
    script = (
        "import bitsandbytes, torch; from daf_core.autograd.torch_compile import has_compiled_anything as compiled; "
        "assert not compiled(); torch.compile(torch.nn.Linear(2, 2)); assert compiled()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
