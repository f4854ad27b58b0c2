"""What DAF adds to a strategy of Lightning, whichever it is, in both of Lightning's packages."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# A strategy becomes another one where devices are known, and Lightning lets strategies take part in that under private
# names alone.

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from tqdm.auto import tqdm
from typing_extensions import override

from daf_core import ConfigError, DAFConfig, StepStatistics, UnsupportedDeviceError
from daf_core.unsupported.table import check_supported, unsupported_reasons
from daf_integrations.lightning.dry_run import loss_aside
from daf_integrations.lightning.split_step import StepInParts
from daf_integrations.lightning.unsupported import (
    LIGHTNING_AUDITS,
    LIGHTNING_ELASTIC,
    LIGHTNING_PLANS,
    LightningContext,
)
from daf_integrations.session.options import configured
from daf_integrations.session.saved_state import SavedState
from daf_integrations.session.session import DAFSession

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
else:  # a strategy of either package comes after these in the bases of a class
    SingleDeviceStrategy = Strategy = object

NAME = "daf"
"""The strategy's name: ``Trainer(strategy="daf")``."""

CHECKPOINT_KEY = "daf"
"""Where a checkpoint holds the totals and what the engine has learned, as plain values."""


class CompressingStrategy(Strategy):
    """Compresses what the forward pass and the loss save in `training_step`, and adds DAF's state to checkpoints."""

    _daf_config: DAFConfig
    _daf_session: DAFSession
    _daf_restored: dict[str, Any] | None
    _daf_reporter: Callback
    _daf_callbacks: list[Callback]

    @property
    def last_step(self) -> StepStatistics | None:
        """Statistics of the last optimizer step; None before the first."""
        return self._daf_session.last_step

    def take_metrics(self) -> dict[str, float]:
        """Returns the figures of the steps since the last call; {} if there were none."""
        return self._daf_session.take_metrics()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        session, module = self._daf_session, self._training
        session.begin_step()
        if session.runner is not None:
            return StepInParts(self, module, session.runner, self._compressed_step)(*args, **kwargs)
        output = self._compressed_step(*args, **kwargs)
        if not module.automatic_optimization:
            session.finish_step()
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().backward(*args, **kwargs)
        self._daf_session.finish_backward()
        self._daf_session.unfreeze()
        return output

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._training.automatic_optimization:
            self._daf_session.finish_step()
        return output

    def before_update(self, optimizer: Any) -> None:
        """Is called between backward and the step of this optimizer."""
        self._daf_session.before_update([optimizer])

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._leave()
        restored, self._daf_restored = self._daf_restored, None
        self._daf_session = DAFSession(self._daf_config, "LightningModule.training_step")
        if restored:
            self._daf_session.load_state(restored)
        context = LightningContext(self, self._training)
        if self._daf_config.plans_steps:
            check_supported(LIGHTNING_PLANS, context)
        if self._daf_config.elastic is not None:
            check_supported(LIGHTNING_ELASTIC, context)
        self._daf_session.attach(self._training, self.model)
        self._daf_callbacks = self._training.trainer.callbacks
        self._daf_callbacks.insert(0, self._daf_reporter)  # before the progress bar, which shows what is logged
        self._say(self._daf_session.start_line())

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._leave()
        self._say(self._daf_session.report())

    @override
    def teardown(self) -> None:
        self._leave()
        self._daf_restored = None  # of what is evaluated, nothing is resumed
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "optimizer_states" in checkpoint:  # one that holds weights alone is no place to resume from
            checkpoint = {**checkpoint, CHECKPOINT_KEY: self._daf_session.state()}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        state = checkpoint.pop(CHECKPOINT_KEY, None)
        # Lightning may load one before it has attached the module.
        trainer = getattr(self.lightning_module, "_trainer", None)
        if state is not None and (trainer is None or trainer.state.fn == "fit"):
            SavedState.of(state, self._daf_config)  # a damaged one is an error before anything is loaded
            self._daf_restored = state
        return checkpoint

    @override
    def _configure_launcher(self) -> None:
        # Lightning's own check is for objects of exactly the class FSDPStrategy.
        if getattr(self, "strategy_name", None) == "fsdp" and self.root_device.type != "cuda":
            raise UnsupportedDeviceError(
                f"{type(self).__name__} needs GPUs, and the device is {self.root_device}: set accelerator='gpu', or "
                "use DAFStrategy() without base, which takes DDP for several devices"
            )
        super()._configure_launcher()

    @property
    def _training(self) -> LightningModule:
        return cast("LightningModule", self.lightning_module)

    def _compressed_step(self, *args: Any, **kwargs: Any) -> Any:
        self._audit(self._training, *args, **kwargs)
        with self._daf_session.scope():
            return super().training_step(*args, **kwargs)

    def _audit(self, module: LightningModule, batch: Any, *rest: Any, **options: Any) -> None:
        for reason in unsupported_reasons(LIGHTNING_AUDITS, LightningContext(self, module, batch)):
            self._daf_session.give_up_audits(reason)
            return
        self._daf_session.audit(module, batch, lambda rows: loss_aside(self, module, rows, *rest, **options))

    def _leave(self) -> None:
        """Removes everything from the model and the trainer."""
        self._daf_session.detach()
        if self._daf_reporter in self._daf_callbacks:
            self._daf_callbacks.remove(self._daf_reporter)
        self._daf_callbacks = []

    def _say(self, text: str) -> None:
        if self.is_global_zero:
            tqdm.write(text)

    def _become(self, base: Strategy) -> None:
        """Goes on as a strategy of the class of `base`, with what that has, and with DAF."""
        own = {name: value for name, value in vars(self).items() if name.startswith("_daf_")}
        vars(self).clear()
        self.__class__ = compressing(type(base))
        vars(self).update(vars(base) | own)


class ChoosingStrategy(CompressingStrategy, SingleDeviceStrategy):
    """One device, or DDP for several: decided when a Trainer has found the devices, unless a base is given."""

    _several: ClassVar[type[DDPStrategy]]
    _kinds: ClassVar[type[Strategy]]

    # The Trainer fills these in where a strategy has them.
    parallel_devices: Any = None
    cluster_environment: Any = None
    num_nodes: int = 1
    _layer_sync: Any = None

    def _begin(
        self,
        config: DAFConfig | Mapping[str, Any] | None,
        options: dict[str, Any],
        base: Strategy | None,
        reporter: Callback,
    ) -> None:
        """Takes the arguments.

        Raises:
            ConfigError: An option is unknown, its value is not allowed or without effect, both a configuration and
                options are given, or `base` is no strategy of this package of Lightning, or one of DAF's.
        """
        if isinstance(config, self._kinds):
            raise ConfigError(f"a strategy to add DAF to is given by name: base={type(config).__name__}(...)")
        self._daf_config = configured(config, options)
        self._daf_session = DAFSession(self._daf_config)
        self._daf_restored = None
        self._daf_reporter = reporter
        self._daf_callbacks = []
        if base is None:
            return
        if not isinstance(base, self._kinds) or isinstance(base, CompressingStrategy):
            package = self._kinds.__module__.rpartition(".")[0]
            raise ConfigError(
                f"base={base!r} is not allowed; give a strategy object of {package} that is not DAF's own, such as "
                "DDPStrategy(), or leave it out"
            )
        self._become(base)

    @override
    def _configure_launcher(self) -> None:
        devices = self.parallel_devices
        if self.num_nodes == 1 and len(devices) == 1:
            self._root_device = devices[0]
            super()._configure_launcher()
            return
        nodes, layer_sync = self.num_nodes, self._layer_sync
        reducer: dict[str, Any] = {} if self._daf_config.elastic is None else {"find_unused_parameters": True}
        self._become(
            self._several(
                accelerator=self._accelerator,
                parallel_devices=devices,
                cluster_environment=self.cluster_environment,
                checkpoint_io=self._checkpoint_io,
                precision_plugin=self._precision_plugin,
                start_method="fork" if hasattr(sys, "ps1") else "popen",  # as for strategy="auto" in a notebook
                **reducer,
            )
        )
        distributed = cast("DDPStrategy", self)
        distributed.num_nodes, distributed._layer_sync = nodes, layer_sync
        distributed.set_world_ranks()
        distributed._configure_launcher()


def announce_update(trainer: Trainer, optimizer: Any) -> None:
    """Tells a strategy that backward is over and this optimizer is about to step."""
    cast("CompressingStrategy", trainer.strategy).before_update(optimizer)


def report_metrics(trainer: Trainer, module: LightningModule) -> None:
    """Logs the figures of the optimizer step that a batch ended, if it did."""
    strategy = cast("CompressingStrategy", trainer.strategy)
    if trainer.barebones:
        return
    for name, value in strategy.take_metrics().items():
        # On the CPU, as a copy to a GPU would cost more; the size is asked for where training_step takes an iterator.
        scalar = torch.tensor(value)
        module.log(name, scalar, prog_bar=name == "daf/ratio", on_step=True, on_epoch=False, batch_size=1)


def register(registry: Any, strategy: type[Strategy]) -> None:
    """Registers a strategy under DAF's name in one of Lightning's registries, unless the name is known there."""
    if NAME not in registry:
        registry.register(NAME, strategy, description="Saved activations in a few bits, on one device or several")


@functools.cache
def compressing(kind: type[Strategy]) -> type[CompressingStrategy]:
    """Returns a strategy class like `kind`, with DAF."""
    contents = {"__doc__": f"{kind.__name__}, with DAF.", "__module__": __name__, "__reduce__": _reduce}
    return type(f"DAF{kind.__name__}", (CompressingStrategy, kind), contents)


def _reduce(strategy: CompressingStrategy) -> tuple[Any, ...]:
    """Pickles by the class that DAF was added to: launchers send strategies to processes that know nothing of ours."""
    return _empty, (type(strategy).__bases__[-1],), strategy.__getstate__()


def _empty(kind: type[Strategy]) -> CompressingStrategy:
    new = compressing(kind)
    return new.__new__(new)
