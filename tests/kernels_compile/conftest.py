"""Where compiled kernels are kept."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder for what Triton compiles, beside pytest's own files: the next run compiles what has changed."""
    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    return cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
