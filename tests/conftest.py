"""What every test is held to, and the data sets that some need."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
# Read when torch is first imported. Otherwise threads that wait for each other spin, and where several processes share
# the cores a backward pass of four small layers takes 200 ms in place of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which torch does not do

from hypothesis import settings

from daf_core.autograd.torch_compile import _met, has_compiled_anything
from daf_core.saved_tensors import background_choice

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("daf")

# What third parties write into the environment when they are first imported, or by design while a test runs.
FOREIGN_VARIABLES = {
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",  # scikit-learn
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning
    "TORCHINDUCTOR_CACHE_DIR",  # transformers, through torch._inductor
    "TRITON_CACHE_DIR",  # torch._inductor, when it compiles for a GPU
    "TRITON_PTXAS_PATH",  # the same
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch._inductor, when it compiles
}

torch.set_num_threads(2)
# A first call compiles a kernel, and a loaded machine is slow: neither is a failure.
settings.register_profile("daf", deadline=None)
settings.load_profile("daf")


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    """Fails a test that leaves a saved-tensor hook, an environment variable, another default dtype or log level behind.

    What was left is undone first, so that the next test starts clean.
    """
    environment, dtype, level = dict(os.environ), torch.get_default_dtype(), LOG.level
    assert _hooks() is None, "a saved-tensor hook was installed before this test began"
    yield
    _forget_graphs()
    leaks = [*_undo_hooks(), *_undo_environment(environment), *_undo_dtype(dtype), *_undo_log_level(level)]
    assert not leaks, f"this test left behind: {', '.join(leaks)}"


def _forget_graphs() -> None:
    """Has torch.compile forget what a test compiled: afterwards every engine would look for compiled modules."""
    if has_compiled_anything():
        torch.compiler.reset()
    _met.graph = False


@pytest.fixture(autouse=True, scope="session")
def full_collection_at_the_end() -> Iterator[None]:
    """Lets the interpreter collect at its end what `quick_collection` has spared; some libraries complain otherwise."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Has Triton's interpreter replace the functions of `triton.language` once a kernel, not for each function called.

    Inside of a kernel they are replaced already, and to look at all of them again took a third of the tests' time.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton; there it takes longer
        return
    replace, language = interpreter._patch_lang, interpreter.tl
    known = {id(module): module.range for module in (language, language.core)}

    @functools.cache
    def modules_of(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if id(value) in known]

    def replace_once(function: Any) -> Any:
        as_they_were = any(module.range is known[id(module)] for module in modules_of(function))
        return replace(function) if as_they_were else interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


@pytest.fixture(autouse=True, scope="module")
def quick_collection() -> None:
    """Spares the garbage collector the objects that a module's tests begin with, such as the imported libraries.

    Many tests and trainers collect garbage several times, and one look at those objects takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``packing="auto"`` the same on every machine; the background is tested where a test asks for it."""
    monkeypatch.setattr(background_choice, "idle_cores", lambda: 0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the data sets: $DAF_DATA_DIR, or shared/data beside the repository."""
    folder = Path(os.environ.get("DAF_DATA_DIR") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}: point DAF_DATA_DIR at them")
    return folder


def _hooks() -> object:
    """The innermost pair of saved-tensor hooks of this thread, None if there is none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _undo_hooks() -> list[str]:
    count = 0
    while _hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return [f"{count} saved-tensor hook(s)"] if count else []


def _undo_environment(before: dict[str, str]) -> list[str]:
    names = (before.keys() | os.environ.keys()) - FOREIGN_VARIABLES
    changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return [f"${name}" for name in changed]


def _undo_dtype(before: torch.dtype) -> list[str]:
    after = torch.get_default_dtype()
    torch.set_default_dtype(before)
    return [] if after is before else [f"default dtype {after}"]


def _undo_log_level(before: int) -> list[str]:
    after = LOG.level
    LOG.setLevel(before)
    return [] if after == before else [f"log level {after}"]
