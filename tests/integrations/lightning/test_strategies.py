"""Which strategy of Lightning DAFStrategy becomes, and what it is in several processes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies
import pytest
import pytorch_lightning.strategies
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, StrategyRegistry
from pytorch_lightning.cli import LightningCLI as OtherCLI

import daf_integrations
from daf_core import ConfigError, DAFConfig, UnsupportedDeviceError
from daf_integrations import DAFStrategy
from daf_integrations.lightning import strategy as daf_lightning
from tests.integrations.lightning_ddp_run import Watched, findings
from tests.integrations.lightning_runs import (
    PACKAGES,
    QUIET,
    STEPS,
    Classifier,
    OtherClassifier,
    fit,
    left_behind,
    strategy_of,
    trainer_for,
)
from tests.integrations.two_processes import run_in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*multi-threaded.*fork")

ROOT = Path(__file__).resolve().parents[3]


class OwnStrategy(SingleDeviceStrategy):
    """As users write them."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note, self.started = note, 0

    def on_train_start(self) -> None:
        super().on_train_start()
        self.started += 1


class TestChoice:
    @pytest.mark.parametrize("package", PACKAGES)
    @pytest.mark.parametrize(
        ("devices", "kind"), [(1, "SingleDeviceStrategy"), ("auto", "SingleDeviceStrategy"), (2, "DDPStrategy")]
    )
    @pytest.mark.parametrize("by_name", [True, False])
    def test_follows_the_devices(self, tmp_path: Path, package: str, devices: Any, kind: str, by_name: bool) -> None:
        strategies = {
            "lightning.pytorch": lightning.pytorch.strategies,
            "pytorch_lightning": pytorch_lightning.strategies,
        }
        strategy = "daf" if by_name else strategy_of(package)(precision=4)
        trainer = trainer_for(tmp_path, package, strategy=strategy, devices=devices, accelerator="auto")
        assert isinstance(trainer.strategy, getattr(strategies[package], kind))
        assert trainer.world_size == trainer.num_devices == (devices if devices == 2 else 1)
        assert trainer.strategy.root_device == torch.device("cpu")
        assert (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) == trainer.world_size

    def test_of_several_nodes_is_ddp(self, tmp_path: Path) -> None:
        trainer = trainer_for(tmp_path, strategy=DAFStrategy(), num_nodes=2, sync_batchnorm=True)
        assert isinstance(trainer.strategy, DDPStrategy)
        assert trainer.world_size == 2
        assert trainer.strategy._layer_sync is not None

    def test_of_a_base_is_that(self, tmp_path: Path) -> None:
        base = DDPStrategy(find_unused_parameters=True, start_method="spawn")
        trainer = trainer_for(tmp_path, strategy=DAFStrategy(base=base, precision=4), devices=2)
        assert isinstance(trainer.strategy, DDPStrategy)
        assert trainer.strategy._ddp_kwargs == {"find_unused_parameters": True}
        assert trainer.strategy.launcher._start_method == "spawn"
        assert type(base) is DDPStrategy
        assert base.accelerator is None, "the object that was given is left as it is"

    def test_of_a_base_keeps_its_hooks(self, tmp_path: Path) -> None:
        module, strategy = Classifier(), DAFStrategy(base=OwnStrategy("note"), precision=4)
        trainer = fit(tmp_path, module, strategy=strategy)
        assert isinstance(trainer.strategy, OwnStrategy)
        assert (trainer.strategy.note, trainer.strategy.started) == ("note", 1)
        assert strategy.last_step is not None
        assert strategy.last_step.ratio > 4
        assert left_behind(module, trainer) == []

    @pytest.mark.parametrize(
        "base", ["ddp", pytorch_lightning.strategies.DDPStrategy(), DAFStrategy()], ids=lambda base: type(base).__name__
    )
    def test_refuses_what_is_no_base(self, base: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"give a strategy object of lightning\.pytorch\.strategies that is not DAF's"
        ):
            DAFStrategy(base=base)

    @pytest.mark.parametrize("config", [{"precision": 4}, DAFConfig(precision=4)], ids=["mapping", "DAFConfig"])
    def test_takes_a_configuration(self, config: Any) -> None:
        assert DAFStrategy(config)._daf_config == DAFStrategy(precision=4)._daf_config == DAFConfig(precision=4)

    def test_refuses_options_that_are_none(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'precision'"):
            DAFStrategy(precison=4)

    def test_says_how_a_strategy_is_given(self) -> None:
        with pytest.raises(
            ConfigError, match=r"^a strategy to add DAF to is given by name: base=DDPStrategy\(\.\.\.\)$"
        ):
            DAFStrategy(DDPStrategy())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="FSDP finds the GPU that it needs")
    def test_of_fsdp_needs_a_gpu(self, tmp_path: Path) -> None:
        """Lightning's own check asks for exactly its class."""
        strategy = DAFStrategy(base=FSDPStrategy())
        assert isinstance(strategy, FSDPStrategy)
        with pytest.raises(UnsupportedDeviceError, match="DAFFSDPStrategy needs GPUs, and the device is cpu"):
            trainer_for(tmp_path, strategy=strategy)
        assert isinstance(strategy.precision_plugin, FSDPPrecision)


class TestPickling:
    @pytest.mark.parametrize(
        "base", [None, DDPStrategy(), FSDPStrategy(), OwnStrategy("note")], ids=lambda base: type(base).__name__
    )
    @pytest.mark.parametrize("clone", [lambda strategy: pickle.loads(pickle.dumps(strategy)), copy.deepcopy])
    def test_keeps_class_and_options(self, base: Any, clone: Any) -> None:
        """Launchers that start processes anew send the strategy."""
        strategy = DAFStrategy(base=base, precision=4)
        twin = clone(strategy)
        assert type(twin) is type(strategy)
        assert isinstance(twin, type(base)) or base is None
        assert twin._daf_config == strategy._daf_config


class TestRegistry:
    def test_has_daf_once(self) -> None:
        before = StrategyRegistry["daf"]
        daf_lightning.register(StrategyRegistry)
        assert StrategyRegistry["daf"] is before
        assert type(StrategyRegistry.get("daf")) is DAFStrategy

    def test_may_be_another(self) -> None:
        registry = type(StrategyRegistry)()
        daf_lightning.register(registry)
        assert registry.available_strategies() == ["daf"]

    def test_leaves_a_name_alone_that_is_taken(self) -> None:
        registry = type(StrategyRegistry)()
        registry.register("daf", SingleDeviceStrategy)
        daf_lightning.register(registry)
        assert type(registry.get("daf")) is SingleDeviceStrategy

    def test_packages_do_not_share_theirs(self) -> None:
        other = pytorch_lightning.strategies.StrategyRegistry.get("daf")
        assert isinstance(other, pytorch_lightning.strategies.Strategy)
        assert not isinstance(other, lightning.pytorch.strategies.Strategy)


def test_strategy_is_exported() -> None:
    assert daf_integrations.DAFStrategy is daf_lightning.DAFStrategy
    assert "DAFStrategy" in daf_integrations.__all__


OPTIONS: dict[str, dict[str, Any]] = {
    "as a mapping": {"config": {"precision": 4}},
    "by name": {"precision": 4},
    "several": {"precision": "exact", "memory_budget": "1GB", "audit_every": None, "elastic": {"time": 0.5}},
    "none": {},
}


def command_line(tmp_path: Path, init: dict[str, Any], home: str = "daf_integrations.lightning") -> Any:
    strategy = {"class_path": f"{home}.DAFStrategy", "init_args": init}
    (tmp_path / "run.yaml").write_text(json.dumps({"trainer": {**QUIET, "strategy": strategy}}))
    arguments = ["--config", str(tmp_path / "run.yaml")]
    cli, module = {
        "daf_integrations.lightning": (LightningCLI, Classifier),
        "daf_integrations.pytorch_lightning": (OtherCLI, OtherClassifier),
    }[home]
    return cli(module, run=False, seed_everything_default=False, args=arguments).trainer.strategy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # between Lightning and jsonargparse
class TestCommandLineOfLightning:
    @pytest.fixture(autouse=True)
    def no_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py"])

    @pytest.mark.parametrize("options", OPTIONS)
    def test_takes_it_by_its_path(self, tmp_path: Path, options: str) -> None:
        init = {**OPTIONS[options], "base": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}}
        strategy = command_line(tmp_path, init)
        assert isinstance(strategy, DDPStrategy)
        given = OPTIONS[options]
        assert strategy._daf_config == DAFConfig.from_dict(given.get("config", given))

    def test_of_the_other_package(self, tmp_path: Path) -> None:
        strategy = command_line(tmp_path, {"precision": 4}, "daf_integrations.pytorch_lightning")
        assert strategy._daf_config == DAFConfig(precision=4)

    def test_leaves_the_environment_what_is_not_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"precision": 8, "seed": 3}')
        assert command_line(tmp_path, {"precision": 4})._daf_config == DAFConfig(precision=4, seed=3)

    def test_names_what_is_wrong(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for init, message in (({"precison": 4}, "'precison' is not accepted"), ({"precision": 5}, "Got value: 5")):
            with pytest.raises(SystemExit):
                command_line(tmp_path, init)
            assert message in capsys.readouterr().err


class TestTwoProcesses:
    def test_have_the_same_gradients_and_the_bytes_of_one(self, tmp_path: Path) -> None:
        printed = run_in_two_processes("tests.integrations.lightning_ddp_run", tmp_path)
        plain, exact, lossy = (findings(tmp_path, name) for name in ("plain", "exact", "lossy"))
        for ranks in (plain, exact, lossy):
            assert len(ranks) == 2
            assert ranks[0]["world size"] == 2
            assert ranks[0]["gradients"] == ranks[1]["gradients"]
            assert len(ranks[0]["gradients"]) == STEPS
            assert ranks[0]["weights"] == ranks[1]["weights"]
            assert ranks[0]["left behind"] == ranks[1]["left behind"] == []
        assert exact[0]["gradients"] == plain[0]["gradients"]
        assert exact[0]["weights"] == plain[0]["weights"]
        assert lossy[0]["gradients"] != plain[0]["gradients"]
        assert lossy[0]["strategy"] == "DAFDDPStrategy"
        assert printed.count("┃ saved activations") == 2, "one table a run, of the first process"

        one = DAFStrategy(precision=4)
        fit(tmp_path, Watched(tmp_path / "one"), strategy=one)
        assert one.last_step is not None
        for rank in lossy:
            assert rank["held bytes"] == pytest.approx(one.last_step.held_bytes, rel=0.01)

    def test_may_be_forked(self, tmp_path: Path) -> None:
        strategy = DAFStrategy(base=DDPStrategy(start_method="fork"), precision=4)
        fit(tmp_path, Watched(tmp_path / "forked"), strategy=strategy, devices=2, max_steps=2)
        del os.environ["MASTER_PORT"]  # Lightning's, chosen for its own processes
        one, other = findings(tmp_path, "forked")
        assert one["world size"] == 2
        assert one["gradients"] == other["gradients"]
        assert one["held bytes"] == other["held bytes"] > 100_000
