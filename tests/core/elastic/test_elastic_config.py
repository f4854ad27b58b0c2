"""The options of elastic training."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from daf_core import ConfigError, DAFConfig
from daf_core.config import ElasticConfig

SHARE = "give a share above 0 and below 1$"
STEPS = r"give a number of steps from 1 to 2\*\*63 - 1$"

WRONG: list[tuple[Any, str]] = [
    *(
        ({name: share}, rf"^elastic\.{name}={re.escape(repr(share))} is not allowed; {SHARE}")
        for name in ("time", "memory")
        for share in (0, 1, 1.5, -0.1, math.nan, math.inf, True, False, "0.5", [0.5], {})
    ),
    *(
        ({"refresh": steps}, rf"^elastic\.refresh={re.escape(repr(steps))} is not allowed; {STEPS}")
        for steps in (0, -1, True, 1.0, None, "50")
    ),
    ({"tiem": 0.5}, r"^unknown option 'elastic\.tiem'; did you mean 'elastic\.time'\? Allowed: time, memory, refresh$"),
    ({"share": 0.5}, r"^unknown option 'elastic\.share' ?Allowed: time, memory, refresh$"),
    ({1: 0.5}, r"^unknown option 'elastic\.1' ?Allowed: time, memory, refresh$"),
    *(
        (value, rf'^elastic={re.escape(repr(value))} is not allowed; give a mapping such as {{"time": 0\.6}}, or None$')
        for value in (0.6, True, "time", [0.5], ("time", 0.5))
    ),
]


@pytest.mark.parametrize(("elastic", "said"), WRONG)
def test_wrong_values(elastic: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(" ?Allowed", ".*Allowed")):
        DAFConfig(elastic=elastic)
    with pytest.raises(ConfigError):
        DAFConfig.from_dict({"elastic": elastic})


GOOD: list[tuple[dict[str, Any] | None, ElasticConfig | None]] = [
    (None, None),
    ({}, ElasticConfig()),
    ({"time": 0.6}, ElasticConfig(time=0.6)),
    ({"memory": 0.5}, ElasticConfig(memory=0.5)),
    ({"time": 0.6, "memory": 0.25, "refresh": 7}, ElasticConfig(time=0.6, memory=0.25, refresh=7)),
]


@pytest.mark.parametrize(("elastic", "expected"), GOOD)
def test_round_trips(elastic: dict[str, Any] | None, expected: ElasticConfig | None, tmp_path: Path) -> None:
    config = DAFConfig(elastic=elastic)
    assert config.elastic == expected
    assert DAFConfig(elastic=expected) == config
    assert DAFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config.to_yaml(tmp_path / "daf.yaml")
    assert DAFConfig.from_yaml(tmp_path / "daf.yaml") == config
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(DAFConfig(elastic=expected))


def test_defaults() -> None:
    assert DAFConfig().elastic is None
    assert DAFConfig().to_dict()["elastic"] is None
    assert DAFConfig(elastic={}).to_dict()["elastic"] == {"time": None, "memory": None, "refresh": 50}
    memory = ElasticConfig(memory=0.5)
    assert (memory.time, memory.refresh) == (None, 50)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "daf.yaml").write_text("precision: 4\nelastic:\n  time: 0.7\n")
    assert DAFConfig.from_yaml(tmp_path / "daf.yaml") == DAFConfig(precision=4, elastic={"time": 0.7})
    (tmp_path / "daf.yaml").write_text("elastic: {time: 70%}\n")
    with pytest.raises(ConfigError, match=r"elastic\.time='70%' is not allowed"):
        DAFConfig.from_yaml(tmp_path / "daf.yaml")
