"""The configuration: every wrong value is refused with what was given, what is allowed and what to do."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daf_core import ActivationBudgetError, ConfigError, DAFConfig, DAFError, ElasticConfig
from daf_core.config import parse_size
from daf_core.errors import PlanError, enough, shown

PRECISIONS = r"allowed: 'auto', 'exact', 8, 4, 2, 1$"
NAMES = (
    "precision, max_gradient_error, audit_every, rounding, memory_budget, budget_covers, min_precision, spill_dir, "
    "pool_growth, seed, backend, packing, chunked_loss, elastic, plan_file"
)
SEED = r"give an integer from 0 to 2\*\*64 - 1$"
SIZE = r'is not a size; give a positive number of bytes or a size such as "400MB" or "1\.5GiB", or'
LEAST = r"allowed: None, 0, 1, 2, 4, 8$"
BOUND = "give a number above 0, and 1 at most$"
STEPS = r"give a number of steps from 1 to 2\*\*63 - 1, or None$"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"precision": 3}, rf"^precision=3 is not allowed; {PRECISIONS}"),
    ({"precision": 16}, rf"^precision=16 .*{PRECISIONS}"),
    ({"precision": 0}, rf"^precision=0 .*{PRECISIONS}"),
    ({"precision": "4"}, rf"^precision='4' .*{PRECISIONS}"),
    ({"precision": True}, rf"^precision=True .*{PRECISIONS}"),
    ({"precision": 4.0}, rf"^precision=4\.0 .*{PRECISIONS}"),
    ({"precision": None}, rf"^precision=None .*{PRECISIONS}"),
    ({"precision": "Exact"}, rf"^precision='Exact' .*{PRECISIONS}"),
    ({"precision": [4]}, rf"^precision=\[4\] .*{PRECISIONS}"),
    ({"precision": "Auto"}, rf"^precision='Auto' .*{PRECISIONS}"),
    *(
        ({"max_gradient_error": bound}, rf"^max_gradient_error={re.escape(repr(bound))} is not allowed; {BOUND}")
        for bound in (0, 0.0, -0.1, 1.01, 2, math.nan, math.inf, -math.inf, True, False, "0.05", "", [0.05], {})
    ),
    *(
        ({"audit_every": steps}, rf"^audit_every={re.escape(repr(steps))} is not allowed; {STEPS}")
        for steps in (0, -1, True, False, 1.0, 0.5, math.inf, "100", "", [100], {})
    ),
    ({"rounding": "up"}, r"^rounding='up' is not allowed; allowed: 'nearest', 'stochastic'$"),
    ({"rounding": None}, r"^rounding=None .*'nearest', 'stochastic'$"),
    ({"backend": "cuda"}, r"^backend='cuda' is not allowed; allowed: 'auto', 'reference'$"),
    ({"packing": "gpu"}, r"^packing='gpu' is not allowed; allowed: 'auto', 'device', 'workers'$"),
    ({"chunked_loss": "yes"}, r"^chunked_loss='yes' is not allowed; allowed: 'auto', True, False$"),
    ({"chunked_loss": 1}, r"^chunked_loss=1 is not allowed; allowed: 'auto', True, False$"),
    ({"chunked_loss": None}, r"^chunked_loss=None is not allowed; allowed: 'auto', True, False$"),
    ({"seed": -1}, rf"^seed=-1 is not allowed; {SEED}"),
    ({"seed": 2**64}, rf"^seed=18446744073709551616 .*{SEED}"),
    ({"seed": True}, rf"^seed=True .*{SEED}"),
    ({"seed": 1.5}, rf"^seed=1\.5 .*{SEED}"),
    ({"seed": "0"}, rf"^seed='0' .*{SEED}"),
    ({"seed": None}, rf"^seed=None .*{SEED}"),
    *(
        ({"memory_budget": size}, rf'^memory_budget=.* {SIZE} "auto"$')
        for size in (
            0, -5, "0", "-5", "0.4", "", "MB", "12 parsecs", "400 megapixels", "4 MB 2", "1e3", "nan", "inf", True, 0.5,
            4e8, [400], {}, b"400MB", "400,000,000", "Auto", "adaptive",
        )
    ),
    *(
        ({"pool_growth": size}, rf'^pool_growth=.* {SIZE} "adaptive"$')
        for size in (0, -1, None, "", "auto", True, 1.5, "12 parsecs", [1])
    ),
    ({"min_precision": 3}, rf"^min_precision=3 is not allowed; {LEAST}"),
    ({"min_precision": 16}, rf"^min_precision=16 .*{LEAST}"),
    ({"min_precision": -1}, rf"^min_precision=-1 .*{LEAST}"),
    ({"min_precision": True}, rf"^min_precision=True .*{LEAST}"),
    ({"min_precision": False}, rf"^min_precision=False .*{LEAST}"),
    ({"min_precision": 2.0}, rf"^min_precision=2\.0 .*{LEAST}"),
    ({"min_precision": "2"}, rf"^min_precision='2' .*{LEAST}"),
    ({"min_precision": "exact"}, rf"^min_precision='exact' .*{LEAST}"),
    ({"precision": 4, "min_precision": 8}, r"^min_precision=8 is not allowed: it is above precision=4$"),
    ({"precision": 1, "min_precision": 2}, r"^min_precision=2 is not allowed: it is above precision=1$"),
    ({"spill_dir": "/no/such/folder"}, r"^spill_dir='/no/such/folder' is no folder; make it, or name another$"),
    ({"spill_dir": ""}, r"^spill_dir='' is no folder; make it, or name another$"),
    ({"spill_dir": __file__}, r"^spill_dir='.*test_config\.py' is no folder; make it, or name another$"),
    ({"spill_dir": 4}, r"^spill_dir=4 is not allowed; give the path of a folder$"),
    ({"spill_dir": True}, r"^spill_dir=True is not allowed; give the path of a folder$"),
    ({"spill_dir": ["x"]}, r"^spill_dir=\['x'\] is not allowed; give the path of a folder$"),
    ({"plan_file": 3, "memory_budget": 1}, r"^plan_file=3 is not allowed; give the path of a file$"),
    ({"plan_file": "p.json"}, r"^plan_file='p\.json' means nothing where nothing is planned; set elastic, or a"),
    ({"plan_file": "p", "memory_budget": 1, "budget_covers": "activations"}, r"^plan_file='p' means nothing "),
    ({"precison": 4}, rf"^unknown option 'precison'; did you mean 'precision'\? Allowed: {NAMES}$"),
    ({"max_gradient_eror": 0.1}, r"^unknown option 'max_gradient_eror'; did you mean 'max_gradient_error'\? Allowed: "),
    ({"budget": 4}, rf"^unknown option 'budget'.* Allowed: {NAMES}$"),
    ({"zzz": 4}, rf"^unknown option 'zzz'\. Allowed: {NAMES}$"),
    *(
        ({**options, "daf_config": {"precision": 4}}, r"^unknown option .*; daf_config is a section of .* Allowed:")
        for options in ({}, {"compute_environment": "LOCAL_MACHINE"})
    ),
    *(
        ({name: {"precision": 4}}, rf"^unknown option '{name}'; {name} is a heading above the options: leave")
        for name in ("daf", "config", "training")
    ),
    ({"daf": {"zzz": 4}}, rf"^unknown option 'daf'\. Allowed: {NAMES}$"),
    *(
        ({"memory_budget": size}, rf'^memory_budget=\S{{1,210}} {SIZE} "auto"$')
        for size in (2**63, 10**400, "9" * 400, "9" * 310 + "PB", "9" * 5000)
    ),
    ({"audit_every": 10**400}, rf"^audit_every=\d+\.\.\.\d+ is not allowed; {STEPS}"),
    ({"seed": 10**400}, rf"^seed=\d+\.\.\.\d+ is not allowed; {SEED}"),
    ({"spill_dir": "/tmp/\0"}, r"^spill_dir='/tmp/\\x00' is no folder; make it, or name another$"),
    ({"precision": [[[[4]]] * 99]}, r"^precision=\[\[.{1,99}\]\] is not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: shown(value) if type(value) is dict else "")
@pytest.mark.parametrize("way", ["keywords", "mapping", "replace", "yaml"])
def test_wrong_values_are_refused(options: dict[str, Any], message: str, way: str, tmp_path: Path) -> None:
    """However it is given, the message is the same."""
    with pytest.raises(ConfigError, match=message):
        _configure(options, way, tmp_path / "daf.yaml")


def _configure(options: dict[str, Any], way: str, path: Path) -> DAFConfig:
    import yaml

    if way == "keywords":
        return DAFConfig(**options)
    if way == "mapping":
        return DAFConfig.from_dict(options)
    if way == "replace":
        if not options.keys() <= DAFConfig().to_dict().keys():
            return DAFConfig(**options)  # dataclasses has its own error for unknown fields
        return dataclasses.replace(DAFConfig(), **options)
    path.write_text(yaml.safe_dump(options))
    return DAFConfig.from_yaml(path)


def test_errors_of_options_are_value_errors() -> None:
    """Callers that know nothing of DAF catch them too."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, DAFError)


SIZES: dict[Any, int] = {
    1: 1,
    800_000: 800_000,
    "800000": 800_000,
    "400MB": 400_000_000,
    "400 mb": 400_000_000,
    " 400MB ": 400_000_000,
    "1.5 GiB": 1_610_612_736,
    "1.5GB": 1_500_000_000,
    "2K": 2000,
    "2KiB": 2048,
    "1 TB": 10**12,
    "10 bytes": 10,
    "1 byte": 1,
    "7B": 7,
}


@pytest.mark.parametrize(("given_size", "size"), SIZES.items(), ids=repr)
def test_sizes(given_size: Any, size: int) -> None:
    """Numbers, decimal and binary units; kept as numbers, so that equal budgets are equal configurations."""
    config = DAFConfig(memory_budget=given_size, pool_growth=given_size)
    assert config.memory_budget == config.pool_growth == size
    assert config == DAFConfig(memory_budget=size, pool_growth=size)


def test_no_budget() -> None:
    """None means that there is no limit, and is the default; words are kept."""
    assert DAFConfig().memory_budget is None
    assert DAFConfig().pool_growth == "adaptive"
    assert DAFConfig(memory_budget="auto").memory_budget == "auto"


KEPT: list[tuple[Any, Any, bool, int]] = [
    (4, None, False, 0),
    (4, None, True, 4),
    (8, None, True, 8),
    (1, None, True, 1),
    (4, 0, True, 0),
    (4, 2, True, 2),
    (4, 2, False, 2),
    (4, 4, False, 4),
    (8, 1, False, 1),
    ("exact", None, False, 0),
    ("exact", None, True, 0),
    ("auto", None, False, 0),
    ("auto", None, True, 8),  # whatever a site gets, it keeps
    ("auto", 0, True, 0),
    ("auto", 2, True, 2),
    ("auto", 2, False, 2),
    ("auto", 8, False, 8),
    ("auto", 8, True, 8),
]


@pytest.mark.parametrize(("precision", "least", "spills", "kept"), KEPT)
def test_kept_precision(precision: Any, least: Any, spills: bool, kept: int, tmp_path: Path) -> None:
    """Without a word about it the budget may take every plane, or none where it can spill."""
    folder = str(tmp_path) if spills else None
    assert DAFConfig(precision=precision, min_precision=least, spill_dir=folder).kept_precision == kept


@pytest.mark.parametrize("bound", [0.05, 1])
@pytest.mark.parametrize("precision", ["exact", 8, 4, 2, 1])
def test_error_bound_needs_a_precision_that_can_follow(precision: Any, bound: float) -> None:
    """A precision that is given leaves nothing to choose: the bound would be without effect."""
    message = f'^max_gradient_error={bound} means nothing with precision={precision!r}; it needs precision="auto"$'
    with pytest.raises(ConfigError, match=message):
        DAFConfig(precision=precision, max_gradient_error=bound)


def test_error_bound_needs_audits() -> None:
    """Nothing else measures what is bounded."""
    message = r"^max_gradient_error=0\.05 needs audits to measure the error; set audit_every$"
    with pytest.raises(ConfigError, match=message):
        DAFConfig(max_gradient_error=0.05, audit_every=None)


@pytest.mark.parametrize("precision", ["auto", "exact", 8, 4, 2, 1])
@pytest.mark.parametrize("steps", [None, 1, 100, 10**9])
def test_audits_go_with_every_precision(precision: Any, steps: int | None) -> None:
    """They measure also where nothing is steered, and can be turned off."""
    assert DAFConfig(precision=precision, audit_every=steps).audit_every == steps


@pytest.mark.parametrize("bound", [1e-9, 0.05, 1.0, 1])
@pytest.mark.parametrize("budget", [None, "400MB", "auto"])
def test_error_bounds_that_are_allowed(bound: float, budget: str | None) -> None:
    """Above 0 and up to the gradient's length, with a memory budget and without."""
    assert DAFConfig(max_gradient_error=bound, memory_budget=budget).max_gradient_error == bound


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    """Figures that are made of them stand in checkpoints, which take no numpy."""
    config = DAFConfig(
        max_gradient_error=np.float64(0.05), elastic={"time": np.float64(0.5), "memory": np.float64(0.25)}
    )
    assert isinstance(config.elastic, ElasticConfig)
    found = config.max_gradient_error, config.elastic.time, config.elastic.memory
    assert [(type(number), number) for number in found] == [(float, 0.05), (float, 0.5), (float, 0.25)]


def test_precision_is_chosen_by_default() -> None:
    """For the least error, as nothing says which error is allowed; audits tell what it is."""
    config = DAFConfig()
    assert (config.precision, config.max_gradient_error, config.audit_every) == ("auto", None, 100)


@pytest.mark.parametrize("least", [0, 1, 8])
def test_exact_has_no_least_precision(least: Any) -> None:
    """Nothing is dropped there: the option would be without effect."""
    message = f'^min_precision={least} means nothing with precision="exact", which drops no bits; leave it out$'
    with pytest.raises(ConfigError, match=message):
        DAFConfig(precision="exact", min_precision=least)


def test_spill_folder_is_kept_as_text(tmp_path: Path) -> None:
    """A path object gives the same configuration as its text, which JSON and YAML can hold."""
    config = DAFConfig(spill_dir=tmp_path)
    assert config == DAFConfig(spill_dir=str(tmp_path))
    assert config.to_dict()["spill_dir"] == str(tmp_path)
    config.to_yaml(tmp_path / "daf.yaml")
    assert DAFConfig.from_yaml(tmp_path / "daf.yaml") == config


OPTIONS: dict[str, Any] = {
    "audit_every": st.none() | st.integers(1, 10**6),
    "rounding": st.sampled_from(["nearest", "stochastic"]),
    "memory_budget": st.none() | st.integers(1, 2**50) | st.sampled_from(["400MB", "1.5GiB", "auto"]),
    "spill_dir": st.sampled_from([None, "."]),
    "pool_growth": st.integers(1, 2**50) | st.sampled_from(["adaptive", "100MB"]),
    "seed": st.integers(0, 2**64 - 1),
    "backend": st.sampled_from(["auto", "reference"]),
    "packing": st.sampled_from(["auto", "device", "workers"]),
    "chunked_loss": st.sampled_from(["auto", True, False]),
}
AUDITED = {"audit_every": st.integers(1, 10**6), "max_gradient_error": st.floats(0, 1, exclude_min=True)}
configs = st.one_of(
    st.builds(DAFConfig, precision=st.sampled_from(["auto", "exact", 8, 4, 2, 1]), **OPTIONS),
    st.builds(
        DAFConfig, precision=st.sampled_from(["auto", 8, 4, 2]), min_precision=st.sampled_from([0, 1, 2]), **OPTIONS
    ),
    st.builds(DAFConfig, min_precision=st.sampled_from([None, 0, 4, 8]), **{**OPTIONS, **AUDITED}),
)


@given(configs)
def test_round_trips(config: DAFConfig) -> None:
    """Mappings, JSON, pickles and copies give an equal configuration."""
    import json

    assert DAFConfig.from_dict(config.to_dict()) == config
    assert DAFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.copy(config) == copy.deepcopy(config) == config
    assert hash(DAFConfig.from_dict(config.to_dict())) == hash(config)


@given(config=configs)
def test_yaml_round_trip(config: DAFConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `to_yaml` writes, `from_yaml` reads."""
    path = tmp_path_factory.mktemp("config") / "daf.yaml"
    config.to_yaml(path)
    assert DAFConfig.from_yaml(path) == DAFConfig.from_yaml(str(path)) == config


def test_missing_options_take_their_defaults(tmp_path: Path) -> None:
    """An empty mapping and an empty file are the default configuration."""
    path = tmp_path / "daf.yaml"
    path.write_text("# nothing yet\n")
    assert DAFConfig.from_dict({}) == DAFConfig.from_yaml(path) == DAFConfig()
    path.write_text("precision: 8\nmemory_budget: 400MB\n")
    assert DAFConfig.from_yaml(path) == DAFConfig(precision=8, memory_budget=400_000_000)


@pytest.mark.parametrize("options", [None, 4, "precision: 4", [("precision", 4)], DAFConfig()], ids=repr)
def test_mapping_is_required(options: object) -> None:
    """Anything else is named by its type."""
    with pytest.raises(ConfigError, match=f"a configuration is a mapping of options, got {type(options).__name__}"):
        DAFConfig.from_dict(options)


@pytest.mark.parametrize("key", [4, True, None, ("precision",)], ids=repr)
def test_keys_that_are_no_names(key: object) -> None:
    """A key that is no string is an unknown option like any other."""
    with pytest.raises(ConfigError, match=r"unknown option .*Allowed: precision"):
        DAFConfig.from_dict({key: 4})


WRONG_FILES = {
    "list": b"- precision",
    "empty-list": b"[]",
    "false": b"false",
    "zero": b"0",
    "empty-string": b"''",
    "text": b"precision 4",
    "broken": b"precision: [4",
    "not-text": b"\xff\xfe\x00\x01",
    "boolean-key": b"on: 4",
    "deep": b"[" * 5000,
    "digits": b"seed: " + b"9" * 5000,
    "date": b"seed: 2001-99-99",
    "tags": b"seed: !!timestamp x",
}


@pytest.mark.parametrize("content", WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_files(content: bytes, tmp_path: Path) -> None:
    """A file that holds something else is refused, not taken for the defaults."""
    path = tmp_path / "daf.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mapping of options|cannot read the configuration file|unknown option"):
        DAFConfig.from_yaml(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """So is a folder in its place."""
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read the configuration file '{path}'"):
            DAFConfig.from_yaml(path)


@pytest.mark.parametrize("path", ["a\0b", 4, None, b"x"], ids=repr)
def test_what_is_no_path_is_named(path: Any) -> None:
    """Such a file cannot exist."""
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        DAFConfig.from_yaml(path)


@pytest.mark.parametrize("value", [4, {"precision": 4}, "daf.yaml", DAFConfig()], ids=repr)
@pytest.mark.parametrize("kind", [DAFConfig, ElasticConfig])
def test_options_have_names(kind: Any, value: object) -> None:
    """A value without one is refused with what to write."""
    with pytest.raises(ConfigError, match=rf"^{kind.__name__} takes options by name alone, got .*precision=4"):
        kind(value)


class Unprintable:
    """Has no `repr`."""

    def __repr__(self) -> str:
        raise RuntimeError


numbers = st.integers() | st.floats() | st.booleans().map(lambda negative: (-1 if negative else 1) * 10**5000)
scalars = numbers | st.none() | st.booleans() | st.text(max_size=9) | st.binary(max_size=9) | st.builds(Unprintable)
words = st.sampled_from(["auto", "exact", "400MB", "9" * 400, ".", "a\0b", "adaptive", "activations", "device"])
values = st.recursive(
    scalars | words | st.sampled_from([8, 4, 2, 1, 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3),
)
names = st.sampled_from([*DAFConfig().to_dict(), "time", "refresh", "daf_config", "self", "cls"]) | st.text(max_size=9)


@given(st.dictionaries(names, values, max_size=4) | values)
def test_whatever_is_given_is_a_configuration_or_an_error_of_it(options: Any) -> None:
    """No bare error of Python's comes out, and the message is short enough to read."""
    ways: list[Callable[[], object]] = [lambda: DAFConfig.from_dict(options), lambda: DAFConfig(options)]
    if isinstance(options, dict) and all(isinstance(name, str) for name in options):
        ways += [lambda: DAFConfig(**options), lambda: ElasticConfig(**options)]
    for make in ways:
        assert len(_complaint(make)) < 1000


@pytest.mark.parametrize("value", [Unprintable(), 10**5000, [Unprintable()]], ids=["object", "number", "list"])
@pytest.mark.parametrize("name", DAFConfig().to_dict())
def test_an_option_that_cannot_be_printed_is_refused_by_name(name: str, value: Any) -> None:
    said = _complaint(lambda: DAFConfig.from_dict({name: value}))
    assert name in said
    assert len(said) < 1000


def _complaint(make: Callable[[], object]) -> str:
    try:
        make()
    except ConfigError as error:
        return str(error)
    return ""


@given(text=st.text(max_size=40) | values.map(shown))
def test_whatever_a_file_holds_is_a_configuration_or_an_error_of_it(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PyYAML has errors of many kinds."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, errors="replace")
    with contextlib.suppress(ConfigError):
        DAFConfig.from_yaml(path)


def test_configuration_is_frozen() -> None:
    """A running engine's options cannot change under it."""
    config = DAFConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.precision = 8


@given(st.integers(min_value=1, max_value=10**15))
@example(2010)
def test_a_size_that_is_named_is_enough(size: int) -> None:
    named = parse_size("memory_budget", enough(size))
    assert isinstance(named, int)
    assert size <= named <= max(1.01 * size, size + 10)


def test_errors_name_budgets_that_are_enough() -> None:
    assert "takes 1.28 MB at least" in str(PlanError(1_000_000, 1_271_000, "everything"))
    assert "activations need 1.28 MB with" in str(ActivationBudgetError(1_271_000, 1_000_000))


def test_plan_error_survives_pickling() -> None:
    error = PlanError(1_000_000, 1_271_000, "everything", 500_000)
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == str(error)
    assert (found.allowed, found.least, found.tried, found.copies) == (1_000_000, 1_271_000, "everything", 500_000)


def test_budget_error_survives_pickling() -> None:
    """Launchers send the errors of their workers on."""
    error = pickle.loads(pickle.dumps(ActivationBudgetError(3_000_000, 1_000_000, ["set spill_dir"])))
    assert (error.needed, error.allowed) == (3_000_000, 1_000_000)
    text = str(error)
    assert text.startswith("saved activations need 3 MB with everything dropped and spilled that may be, and ")
    assert "memory_budget allows 1 MB. Raise memory_budget, set spill_dir, or train on smaller " in text
