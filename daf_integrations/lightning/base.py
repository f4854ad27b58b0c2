"""DAF in a strategy of Lightning, for both of Lightning's packages."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# A strategy becomes another one where devices are known, and Lightning lets strategies take part in that under private
# names alone.

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from tqdm.auto import tqdm
from typing_extensions import override

from daf_core import AuditError, ConfigError, DAFConfig, StepStatistics, UnsupportedDeviceError
from daf_core.unsupported.table import check_supported, unsupported_reasons
from daf_integrations.lightning.dry_run import loss_in, output_without_trace
from daf_integrations.lightning.split_step import run_split
from daf_integrations.lightning.unsupported import (
    LIGHTNING_AUDITS,
    LIGHTNING_ELASTIC,
    LIGHTNING_PLANS,
    LightningContext,
)
from daf_integrations.session.options import configured, naming_options
from daf_integrations.session.saved_state import parts_of
from daf_integrations.session.session import DAFSession

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
else:  # a strategy of either package comes after these in the bases of a class
    SingleDeviceStrategy = Strategy = object

NAME = "daf"  # the strategy's name: ``Trainer(strategy="daf")``
CHECKPOINT_KEY = "daf"  # key of a checkpoint that holds the totals and what the engine has learned, as plain values


class CompressingStrategy(Strategy):
    """Compresses what the forward pass and the loss save in `training_step`, and adds DAF's state to checkpoints."""

    _daf_package: str
    _daf_config: DAFConfig
    _daf_session: DAFSession
    _daf_restored: dict[str, Any] | None
    _daf_reporter: Callback | None

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
        if session.runner is not None:
            return run_split(self, module, session.run_step, self._compressed_step, *args, **kwargs)
        output = self._compressed_step(*args, **kwargs)
        if not module.automatic_optimization:
            session.after_optimizer()
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().backward(*args, **kwargs)
        self._daf_session.after_backward()
        return output

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._training.automatic_optimization:
            self._daf_session.after_optimizer()
        return output

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._detach()
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
        self._daf_reporter = _reporter(importlib.import_module(self._daf_package).Callback, self._daf_session)
        self._training.trainer.callbacks.insert(0, self._daf_reporter)  # before the progress bar, which shows the log
        self._say(self._daf_session.start_line())

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._detach()
        self._say(self._daf_session.report())

    @override
    def teardown(self) -> None:
        self._detach()
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
            parts_of(state, self._daf_config)  # a damaged one is an error before anything is loaded
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

    def _compressed_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self._training

        def loss_of(rows: Any) -> torch.Tensor:
            output = output_without_trace(self, module, rows, *args, **kwargs)
            if (loss := loss_in(output)) is None:
                raise AuditError(f"training_step returned no loss for a part of the batch, but {output!r}")
            return loss

        reasons = unsupported_reasons(LIGHTNING_AUDITS, LightningContext(self, module, batch))
        with self._daf_session.forward(batch, loss_of, next(iter(reasons), None)) as forward:
            forward.show(output := super().training_step(batch, *args, **kwargs))
        return output

    def _detach(self) -> None:
        self._daf_session.detach()
        if self._daf_reporter is not None:
            self._training.trainer.callbacks.remove(self._daf_reporter)
            self._daf_reporter = None

    def _say(self, text: str) -> None:
        if self.is_global_zero:
            tqdm.write(text)

    def _turn_into(self, base: Strategy) -> None:
        """Becomes a strategy of the class of `base`, with DAF: the Trainer keeps the object that it was given."""
        own = {name: value for name, value in vars(self).items() if name.startswith("_daf_")}
        vars(self).clear()
        self.__class__ = compressing(type(base))
        vars(self).update(vars(base) | own)


class ChoosingStrategy(CompressingStrategy, SingleDeviceStrategy):
    """Compresses the activations of a training run; nothing else in the script changes.

    It is a strategy for one device, or DDP for several: the Trainer's `accelerator`, `devices` and `num_nodes` decide.
    It covers `LightningModule.training_step`, that is the forward pass and the loss. Each optimizer step logs
    the figures of ``docs/reference/figures.md``. Audits call `training_step` once more, with a part of the batch, and
    keep what it logs and counts out of logs and metrics. With manual optimization there are none.

    Example:
        >>> Trainer(strategy=DAFStrategy(precision=4)).fit(module, data)

    Args:
        config: A configuration, or a mapping of its fields, instead of options.
        base: A strategy of the same package to add DAF to, such as ``DDPStrategy(gradient_as_bucket_view=True)``;
            the object itself is left as it is.
        options: The fields of `DAFConfig`, such as ``precision=4``.

    Raises:
        ConfigError: An option is unknown, its value is not allowed or without effect, both a configuration and options
            are given, or `base` is no strategy of this package of Lightning, or one of DAF's.
    """

    _strategies: ClassVar[Any]

    # The Trainer fills these in where a strategy has them.
    parallel_devices: Any = None
    cluster_environment: Any = None
    num_nodes: int = 1
    _layer_sync: Any = None

    def __init__(
        self, config: DAFConfig | dict[str, Any] | None = None, base: Strategy | None = None, **options: Any
    ) -> None:
        kinds = self._strategies.Strategy
        if isinstance(config, kinds):
            raise ConfigError(f"a strategy to add DAF to is given by name: base={type(config).__name__}(...)")
        self._strategies.SingleDeviceStrategy.__init__(self)
        self._daf_package = self._strategies.__name__.rpartition(".")[0]
        self._daf_config = configured(config, options)
        self._daf_session = DAFSession(self._daf_config)
        self._daf_restored = self._daf_reporter = None
        if base is None:
            return
        if not isinstance(base, kinds) or isinstance(base, CompressingStrategy):
            raise ConfigError(
                f"base={base!r} is not allowed; give a strategy object of {self._strategies.__name__} that is not "
                "DAF's own, such as DDPStrategy(), or leave it out"
            )
        self._turn_into(base)

    @override
    def _configure_launcher(self) -> None:
        devices = self.parallel_devices
        if self.num_nodes == 1 and len(devices) == 1:
            self._root_device = devices[0]
            super()._configure_launcher()
            return
        nodes, layer_sync = self.num_nodes, self._layer_sync
        reducer: dict[str, Any] = {} if self._daf_config.elastic is None else {"find_unused_parameters": True}
        self._turn_into(
            self._strategies.DDPStrategy(
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


def strategy_for(strategies: Any, home: str) -> tuple[type[ChoosingStrategy], Callable[..., None]]:
    """Returns `DAFStrategy` for the strategies of one of Lightning's packages, and what registers it there.

    The module of the name `home` exports both.
    """

    def __init__(self: Any, config: Any = None, base: Any = None, **options: Any) -> None:
        ChoosingStrategy.__init__(self, config, base, **options)

    # LightningCLI builds the strategy from these types.
    __init__.__annotations__ = {"config": DAFConfig | dict[str, Any] | None, "base": strategies.Strategy | None}
    contents = {
        "__init__": naming_options(__init__),
        "__doc__": ChoosingStrategy.__doc__,
        "__module__": home,
        "_strategies": strategies,
    }
    made = type("DAFStrategy", (ChoosingStrategy, strategies.SingleDeviceStrategy), contents)

    def register(registry: Any = strategies.StrategyRegistry) -> None:
        """Makes ``Trainer(strategy="daf")`` work, in a registry of strategies that does not know the name."""
        if NAME not in registry:
            registry.register(NAME, made, description="Saved activations in a few bits, on one device or several")

    register()
    return made, register


def _reporter(callback: type[Callback], session: DAFSession) -> Callback:
    """Returns a callback that logs the session's figures and prepares the steps of optimizers."""

    def on_before_optimizer_step(_self: object, _trainer: Trainer, _module: LightningModule, optimizer: Any) -> None:
        session.before_optimizer([optimizer])

    def on_train_batch_end(_self: object, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.barebones:
            return
        for name, value in session.take_metrics().items():
            # On the CPU: a copy to a GPU costs more. Where training_step takes an iterator, log needs the batch's size.
            scalar = torch.tensor(value, device="cpu")
            module.log(name, scalar, prog_bar=name == "daf/ratio", on_step=True, on_epoch=False, batch_size=1)

    hooks = {"on_before_optimizer_step": on_before_optimizer_step, "on_train_batch_end": on_train_batch_end}
    return type("Reporter", (callback,), {**hooks, "__module__": __name__})()


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
