"""Each limitation in Lightning has a strategy, module or batch that trips it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import daf_integrations
from daf_core.unsupported.table import Feature
from daf_integrations.lightning.unsupported import (
    LIGHTNING_AUDITS,
    LIGHTNING_ELASTIC,
    LIGHTNING_PLANS,
    LightningContext,
)
from tests.core.unsupported.conformance import check_limitations, check_works, features_in


class Sharding(SimpleNamespace):
    """Stands for a strategy that shards."""


def context(*, automatic: bool = True, sharded: bool = False, compiled: bool = False, batch: Any = None) -> Any:
    module = SimpleNamespace(automatic_optimization=automatic, _compiler_ctx={} if compiled else None)
    return LightningContext(Sharding(model=None if sharded else module), module, batch or [torch.zeros(2, 2)])


MANUAL = (lambda: context(automatic=False), "")
SHARDED = (lambda: context(sharded=True), "Sharding spreads each parameter over several processes")
CASES = {
    "LIGHTNING_AUDITS": (
        LIGHTNING_AUDITS,
        [MANUAL, SHARDED, (lambda: context(batch=["text"]), "type list has no tensors")],
    ),
    "LIGHTNING_PLANS": (
        LIGHTNING_PLANS,
        [MANUAL, SHARDED, (lambda: context(compiled=True), "SimpleNamespace is compiled")],
    ),
    "LIGHTNING_ELASTIC": (LIGHTNING_ELASTIC, [MANUAL]),
}


@pytest.mark.parametrize(("feature", "trips"), CASES.values(), ids=CASES)
def test_each_limitation(feature: Feature, trips: list[Any]) -> None:
    check_works(feature, context())
    check_limitations(feature, trips)


def test_every_feature_is_here() -> None:
    assert features_in(Path(daf_integrations.__file__).parent) == CASES.keys()
