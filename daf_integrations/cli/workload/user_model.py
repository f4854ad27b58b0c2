"""A model and a batch that a function in a file of the user's makes, for `daf bench`, `daf plan` and `daf profile`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from daf_core.errors import ModelError

CONTRACT = (
    "it is called with the rows of a batch and their length, and returns (model, batch): an nn.Module that is called "
    "with the batch as keywords and returns its loss, and a dictionary of tensors with that many rows"
)

MODULE = "__daf_model__"
"""Name of a file as a module; that of the file may be one of another module."""

UserModel = tuple[nn.Module, dict[str, Tensor]]


def names_function(model: str) -> bool:
    """Says whether a model is named as FILE.py:FUNCTION."""
    return model.rpartition(":")[0].endswith(".py")


def make(name: str, rows: int, length: int) -> UserModel:
    """Calls a function that is named as FILE.py:FUNCTION.

    Raises:
        ModelError: There is no such function, it fails, or returns something else.
    """
    file, _, function = name.rpartition(":")
    try:
        made = _function(Path(file), function)(rows, length)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__}: {error}; {CONTRACT}") from error
    return _checked(name, made, rows)


def _function(file: Path, name: str) -> Callable[[int, int], object]:
    if not file.is_file():
        raise ModelError(f"there is no file {str(file)!r}; give MODEL as FILE.py:FUNCTION")
    spec = spec_from_file_location(MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look their module up there
    sys.path.insert(0, str(file.resolve().parent))  # as if Python ran the file
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [each for each, value in vars(module).items() if callable(value) and not isinstance(value, type)]
        there = ", ".join(functions) or "none"
        raise ModelError(f"{file} has no function {name!r}; functions in it: {there}. {CONTRACT}")
    return found


def _checked(name: str, made: object, rows: int) -> UserModel:
    parts = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
    if len(parts) != 2 or not isinstance(parts[0], nn.Module) or not isinstance(parts[1], Mapping):
        raise ModelError(f"{name} returned {_kind(made)}; {CONTRACT}")
    batch = dict(cast("Mapping[str, Any]", parts[1]))
    wrong = [key for key, value in batch.items() if not (isinstance(value, Tensor) and value.shape[:1] == (rows,))]
    if wrong or not batch:
        raise ModelError(
            f"{name} returned a batch of {rows} rows in which {wrong[0]!r} is {_kind(batch[wrong[0]])}; {CONTRACT}"
            if wrong
            else f"{name} returned an empty batch; {CONTRACT}"
        )
    return parts[0], batch


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        kinds = ", ".join(_kind(part) for part in cast("tuple[object, ...]", value))
        return f"({kinds})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
