"""What elastic training measures follows from a clock that counts how often it is read: the same on every machine."""

from __future__ import annotations

import itertools

import pytest

from daf_core import timing


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every phase of a step take as long."""
    ticks = itertools.count()
    monkeypatch.setattr(timing, "synchronized_time", lambda: float(next(ticks)))
