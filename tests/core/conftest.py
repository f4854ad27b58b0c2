"""The engine's tests run on one thread of torch's, and with one of DAF's own where they ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from daf_core.saved_tensors.pending import PackJob
from tests.core import pressure
from tests.core.paces import PACES


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, whose spinning makes them crawl on a loaded machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=PACES)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing in the background that is fast and slow."""
    PACES[request.param](monkeypatch)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[PackJob]:
    """What is packed in the background from now on."""
    flights: list[PackJob] = []
    create = PackJob.__init__

    def record(flight: PackJob, *arguments: Any) -> None:
        create(flight, *arguments)
        flights.append(flight)

    monkeypatch.setattr(PackJob, "__init__", record)
    return flights


@pytest.fixture(autouse=True, scope="module")
def own_budgets() -> None:
    """Has a module measure its models itself: some replace the devices that others measure on."""
    pressure.peak_of.cache_clear()
    pressure.least_budget.cache_clear()
