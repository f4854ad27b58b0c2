"""What is asked to give memory back that nobody uses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from daf_core.memory.system import release

GLIBC, MIMALLOC, TCMALLOC = ("malloc_trim", 0), ("mi_collect", True), ("MallocExtension_ReleaseFreeMemory",)


@pytest.mark.parametrize(
    ("there", "asked"),
    [([], []), ([GLIBC], [GLIBC]), ([GLIBC, MIMALLOC], [MIMALLOC]), ([GLIBC, TCMALLOC], [TCMALLOC])],
    ids=["none", "glibc", "mimalloc", "tcmalloc"],
)
def test_the_allocator_that_serves_the_process_is_asked(
    monkeypatch: pytest.MonkeyPatch, there: list[tuple[object, ...]], asked: list[tuple[object, ...]]
) -> None:
    calls: list[tuple[object, ...]] = []
    symbols = {str(name): lambda *given, name=name: calls.append((name, *given)) for name, *_ in there}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**symbols))
    release.release_free_memory()
    assert calls == asked


def test_windows_has_none_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "os", SimpleNamespace(name="nt"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: "/" in name)  # as ctypes looks at a name there
    release.release_free_memory()
