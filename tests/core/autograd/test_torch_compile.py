import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from daf_core.autograd import torch_compile
from daf_core.autograd.torch_compile import has_compiled_anything


def _library() -> ModuleType:
    """Returns a module as it is after its import, with a compiled function behind another one."""
    compiled = torch.compile(lambda values: values + 1, dynamic=False)

    def dequantize(values: Tensor) -> Tensor:
        return compiled(values)

    def calls_itself(number: int) -> int:
        return calls_itself(number - 1) if number else missing

    for missing in range(0):  # a variable without a value
        assert missing
    library = ModuleType("a_library")
    vars(library).update(dequantize=dequantize, calls_itself=calls_itself)
    return library


def test_what_a_library_compiles_when_it_is_imported_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setitem(sys.modules, "a_library", _library())
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
