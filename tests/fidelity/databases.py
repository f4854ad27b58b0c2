"""Torch's databases of its own operators and modules, with larger inputs than its own tests take."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

SIZES = {"S": 12, "M": 16, "L": 24}
"""Lengths of the dimensions of most samples, in place of 5, 10 and 20: 128 elements in two of them."""


def operators() -> list[Any]:
    """Returns torch's operators, each as an OpInfo."""
    _allow_import()
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def modules() -> list[Any]:
    """Returns torch's modules, each as a ModuleInfo."""
    _allow_import()
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


@contextmanager
def larger_samples() -> Generator[None]:
    """Has samples that are made inside be larger."""
    homes = [module for name, module in list(sys.modules.items()) if name.startswith("torch.testing._internal")]
    patches = [
        patch.object(home, name, size)
        for home in homes
        for name, size in SIZES.items()
        if isinstance(getattr(home, name, None), int)
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _allow_import() -> None:
    """Stands in for a package that torch's databases import, and that only torch's tests of printed text use."""
    try:
        import expecttest  # noqa: F401  # only whether it is there counts
    except ImportError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
