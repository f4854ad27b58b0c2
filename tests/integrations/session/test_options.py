"""Where options come from: the script, the environment, Accelerate's configuration file, the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate.commands.config.config_args as config_args
import pytest
import yaml
from torch import nn
from torch.optim import SGD
from transformers import HfArgumentParser, TrainingArguments

from daf_core import ActivationEngine, ConfigError, DAFConfig
from daf_integrations import DAFArguments, DAFCallback, DAFStrategy, _autoload, environment, prepare
from daf_integrations.session.options import configured

FILE: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """Loads an Accelerate configuration file as `accelerate launch` does; what it exports is undone afterwards."""
    for name in (environment.SWITCH, environment.OPTIONS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    original = config_args.BaseConfig.process_config
    monkeypatch.setattr(config_args.BaseConfig, "process_config", staticmethod(original))
    if not hasattr(original, "__wrapped__"):
        _autoload._accept_section(config_args)

    def load(kind: str = "yaml", **content: Any) -> Any:
        file = tmp_path / f"accelerate.{kind}"
        file.write_text(json.dumps(content) if kind == "json" else yaml.safe_dump(content))
        return config_args.load_config_from_file(str(file))

    return load


class TestFile:
    @pytest.mark.parametrize("kind", ["yaml", "json"])
    def test_section_reaches_the_processes_that_are_launched(self, load: Load, kind: str) -> None:
        loaded = load(kind, **FILE, daf_config={"precision": 4, "memory_budget": "400MB"})
        assert not hasattr(loaded, "daf_config")
        assert os.environ["ACCELERATE_USE_DAF"] == "true"
        assert json.loads(os.environ["ACCELERATE_DAF_CONFIG"]) == {"precision": 4, "memory_budget": "400MB"}
        assert configured() == DAFConfig(precision=4, memory_budget="400MB")

    def test_an_empty_section_means_the_defaults(self, load: Load) -> None:
        load(**FILE, daf_config=None)
        assert os.environ["ACCELERATE_USE_DAF"] == "true"
        assert configured() == DAFConfig()

    def test_without_the_section_nothing_is_exported(self, load: Load) -> None:
        load(**FILE)
        assert "ACCELERATE_USE_DAF" not in os.environ

    def test_other_unknown_keys_are_still_errors(self, load: Load) -> None:
        with pytest.raises(ValueError, match=r"unknown keys \(\['dafconfig'\]\)"):
            load(**FILE, dafconfig={})

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ({"precison": 4}, "daf_config in the Accelerate configuration: unknown option 'precison'; did you mean"),
            ({"precision": 3}, "daf_config in the Accelerate configuration: precision=3 is not allowed"),
            ([4], "daf_config in the Accelerate configuration: a configuration is a mapping of options, got list"),
        ],
    )
    def test_errors_are_those_of_the_configuration(self, load: Load, section: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load(**FILE, daf_config=section)
        assert "ACCELERATE_USE_DAF" not in os.environ


class TestOrder:
    def test_environment_goes_before_the_file(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"precision": 2}')
        load(**FILE, daf_config={"precision": 4, "seed": 3})
        assert configured() == DAFConfig(precision=2, seed=3)

    def test_environment_can_switch_the_section_off(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "0")
        load(**FILE, daf_config={"precision": 4})
        assert "ACCELERATE_DAF_CONFIG" not in os.environ
        assert configured() == DAFConfig()

    def test_an_empty_switch_is_none(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "")
        load(**FILE, daf_config={"precision": 4})
        assert configured() == DAFConfig(precision=4)

    def test_together_they_must_make_sense(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"max_gradient_error": 0.05}')
        with pytest.raises(ConfigError, match="daf_config with ACCELERATE_DAF_CONFIG over it: max_gradient_error"):
            load(**FILE, daf_config={"precision": 4})

    def test_arguments_go_before_both(self, load: Load) -> None:
        load(**FILE, daf_config={"precision": 4, "seed": 3})
        assert configured(options={"precision": 8}) == DAFConfig(precision=8, seed=3)
        assert configured(DAFConfig(precision=8)) == DAFConfig(precision=8)

    def test_options_without_the_switch_do_not_count(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"precision": 2}')
        assert configured() == DAFConfig()

    def test_what_is_not_json_is_refused(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "yes")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", "precision=4")
        with pytest.raises(ConfigError, match="ACCELERATE_DAF_CONFIG='precision=4' is not JSON"):
            configured()

    @pytest.mark.parametrize("text", ["", "[" * 100_000, "9" * 5000], ids=["nothing", "brackets", "digits"])
    def test_what_no_parser_takes_is_refused_in_a_line(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", text)
        with pytest.raises(ConfigError, match=r"^ACCELERATE_DAF_CONFIG=.{1,400}give an object such as"):
            configured()

    @pytest.mark.parametrize("value", ["maybe", "2", " 1", "ja"])
    def test_a_switch_is_on_or_off(self, load: Load, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", value)
        for read in (configured, lambda: load(**FILE, daf_config={})):
            with pytest.raises(ConfigError, match=f"^ACCELERATE_USE_DAF='{value}' is not allowed; set it to 1 or 0"):
                read()


class TestTogether:
    @pytest.mark.parametrize("config", [4, "auto", "daf.yaml", [("precision", 4)], DAFConfig, True], ids=repr)
    def test_what_is_no_configuration_is_refused(self, load: Load, config: Any) -> None:
        for take in (configured, DAFCallback, DAFStrategy, lambda given: ActivationEngine(nn.Linear(1, 1), given)):
            with pytest.raises(ConfigError, match=r" is no configuration; give options by name, as in precision=4"):
                take(config)

    def test_an_object_is_refused_by_its_class(self, load: Load) -> None:
        """Its text may have many lines."""
        optimizer = SGD(nn.Linear(1, 1).parameters(), 0.1)
        with pytest.raises(ConfigError, match=r"^SGD is no configuration; give options by name, as in precision=4"):
            configured(optimizer)

    @pytest.mark.parametrize(
        ("option", "owner"),
        [
            ("learning_rate", "transformers.TrainingArguments"),
            ("per_device_train_batch_size", "transformers.TrainingArguments"),
            ("train_dataset", "transformers.Trainer"),
            ("max_epochs", "lightning.Trainer"),
            ("mixed_precision", "accelerate.Accelerator"),
        ],
    )
    def test_an_option_of_a_trainer_is_sent_there(self, load: Load, option: str, owner: str) -> None:
        """The error says what to type, whoever is given the option."""
        expected = rf"^unknown option '{option}': it is an option of {owner}; give it there, as in {owner}\({option}="
        for take in (DAFCallback, DAFStrategy, partial(prepare, nn.Linear(1, 1))):
            with pytest.raises(ConfigError, match=expected):
                take(**{option: 1})

    def test_a_mapping_is_a_configuration(self, load: Load) -> None:
        expected = DAFConfig(precision=4)
        for given in ({"precision": 4}, MappingProxyType({"precision": 4})):
            assert configured(given) == DAFCallback(given).config == expected
            assert ActivationEngine(nn.Linear(1, 1), given).config == expected

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"spill_dir": "."}, "spill_dir='.'"),
            ({"precision": "exact", "spill_dir": "."}, "spill_dir='.'"),
            ({"budget_covers": "activations"}, "budget_covers='activations'"),
            ({"precision": 4, "min_precision": 2}, "min_precision=2"),
            ({"precision": 4, "min_precision": 0}, "min_precision=0"),
        ],
    )
    def test_what_needs_a_budget_is_refused_without(self, load: Load, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=f"^{re.escape(named)} means nothing without memory_budget; give one"):
            configured(options=options)
        with pytest.raises(ConfigError, match="means nothing without memory_budget"):
            configured(DAFConfig(**options))
        assert configured(options={**options, "memory_budget": "1GB"}).memory_budget == 10**9

    def test_exact_values_are_not_rounded(self, load: Load) -> None:
        with pytest.raises(ConfigError, match=r"^rounding='stochastic' means nothing with precision=\"exact\"; leave"):
            configured(options={"rounding": "stochastic", "precision": "exact"})

    def test_a_budget_may_come_from_elsewhere(self, load: Load) -> None:
        load(**FILE, daf_config={"spill_dir": "."})
        assert configured(options={"memory_budget": "1GB"}).spill_dir == "."

    def test_a_least_precision_bounds_what_is_chosen(self, load: Load) -> None:
        assert configured(options={"min_precision": 2}).min_precision == 2


class TestCommandLine:
    def parsed(self, *arguments: str) -> DAFConfig:
        # DAFConfig itself is no dataclass for this parser: both have a seed, and a size is a number or a text.
        parser = HfArgumentParser((TrainingArguments, DAFArguments))
        training, ours = parser.parse_args_into_dataclasses(["--output_dir", "out", "--seed", "7", *arguments])
        assert training.seed == 7
        return ours.to_config()

    def test_takes_json_or_a_file(self, tmp_path: Path) -> None:
        wanted = DAFConfig(precision=4, memory_budget="40MB")
        wanted.to_yaml(tmp_path / "daf.yaml")
        (tmp_path / "daf.json").write_text(json.dumps(wanted.to_dict()))
        assert self.parsed("--daf_config", '{"precision": 4, "memory_budget": "40MB"}') == wanted
        assert self.parsed("--daf-config", str(tmp_path / "daf.yaml")) == wanted
        assert self.parsed("--daf_config", str(tmp_path / "daf.json")) == wanted

    def test_left_out_means_the_environment_or_the_defaults(self, load: Load) -> None:
        assert self.parsed() == DAFConfig()
        load(**FILE, daf_config={"precision": 4})
        assert self.parsed() == replace(DAFConfig(), precision=4)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"precison": 4}', "did you mean 'precision'"),
            ("{precision: 4}", "is not JSON"),
            ("missing.yaml", "cannot read the configuration file 'missing.yaml'"),
        ],
    )
    def test_errors(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.parsed("--daf_config", text)
