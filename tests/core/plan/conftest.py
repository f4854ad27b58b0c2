"""Plans of tests follow from a clock that counts how often it is read: the same on every machine."""

from __future__ import annotations

import itertools

import pytest

from daf_core import timing


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every phase of a pass take as long, so that recomputation and micro-batches cost what they add in phases."""
    ticks = itertools.count()
    monkeypatch.setattr(timing, "synchronized_time", lambda: float(next(ticks)))
