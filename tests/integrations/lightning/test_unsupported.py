"""Each limitation in Lightning has a strategy, module or batch that trips it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from daf_core.unsupported.table import FEATURES, Feature
from daf_integrations.lightning.unsupported import (
    LIGHTNING_AUDITS,
    LIGHTNING_ELASTIC,
    LIGHTNING_PLANS,
    LightningContext,
)
from tests.core.unsupported.conformance import check_limitations, check_works


class Sharding(SimpleNamespace):
    """Stands for a strategy that shards."""


def context(*, automatic: bool = True, sharded: bool = False, compiled: bool = False, batch: Any = None) -> Any:
    module = SimpleNamespace(automatic_optimization=automatic, _compiler_ctx={} if compiled else None)
    return LightningContext(Sharding(model=None if sharded else module), module, batch or [torch.zeros(2, 2)])


MANUAL = (lambda: context(automatic=False), "")
SHARDED = (lambda: context(sharded=True), "Sharding spreads each parameter over several processes")
CASES = [
    (LIGHTNING_AUDITS, [MANUAL, SHARDED, (lambda: context(batch=["text"]), "type list has no tensors")]),
    (LIGHTNING_PLANS, [MANUAL, SHARDED, (lambda: context(compiled=True), "SimpleNamespace is compiled")]),
    (LIGHTNING_ELASTIC, [MANUAL]),
]


@pytest.mark.parametrize(("feature", "trips"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_each_limitation(feature: Feature, trips: list[Any]) -> None:
    check_works(feature, context())
    check_limitations(feature, trips)


def test_every_feature_is_here() -> None:
    named = [feature.name for feature, _ in CASES]
    assert sorted(name for name in FEATURES if "Lightning" in name) == sorted(named)
