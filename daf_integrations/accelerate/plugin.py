"""Accelerate: a section ``daf_config`` in its configuration file, and scripts that know nothing of DAF.

A configuration file with, beside what Accelerate writes there, the fields of `DAFConfig`::

    daf_config:
      precision: 4
      memory_budget: 400MB

is used with the command that Accelerate has: ``accelerate launch --config_file daf.yaml train.py``. Without a file,
``ACCELERATE_USE_DAF=1`` switches DAF on, with ``ACCELERATE_DAF_CONFIG`` for options as a JSON object; an option there
goes before the same one of the file, and an argument of `daf_integrations.prepare` before both.
``ACCELERATE_USE_DAF=0`` switches the file's section off.

Accelerate has no extension point for this: an entry point that torch calls when it is imported hooks
`BaseConfig.process_config`, `Accelerator.prepare` and `Accelerator.prepare_model`. Where entry points of torch are
switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` or ``DAF_AUTOLOAD=0``), the same without the section is::

    accelerate launch -m daf_integrations.accelerate train.py [arguments of train.py]

Every model with something to train that goes through `Accelerator.prepare` is compressed as `daf_integrations.prepare`
says; see there for what is covered. The main process prints a line at the beginning, and the table of the run when it
exits: scripts need not call `Accelerator.end_training`. `Accelerator.save_state` adds a file for each process with what
DAF has learned, which `Accelerator.load_state` reads where there is one: checkpoints load with and without DAF.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from daf_core import StateError
from daf_integrations.environment import SWITCH
from daf_integrations.loop.training import Training, training_of
from daf_integrations.session.options import configured
from daf_integrations.session.saved_state import parts_of

MARK = "_daf_compresses"

STATES = "daf_states_{}.json"  # the file of a process in the folder of a checkpoint

_saved: weakref.WeakSet[Any] = weakref.WeakSet()  # Accelerators whose checkpoints hold what DAF has learned

_announced: weakref.WeakSet[Training] = weakref.WeakSet()  # trainings whose line at the beginning was printed


def install(accelerator_class: Any) -> None:
    """Has every `accelerate.Accelerator` compress the models it prepares; a second call does nothing.

    Raises:
        ConfigError: An option of the environment is unknown or its value is not allowed.
    """
    configured()
    if hasattr(accelerator_class.prepare, MARK):
        return
    accelerator_class.prepare = _compressing(accelerator_class.prepare)
    accelerator_class.prepare_model = _compressing_model(accelerator_class.prepare_model)


def _compressing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the results: DeepSpeed, Megatron and FSDP2 go past `prepare_model`."""

    @functools.wraps(prepare)
    def compressing(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        for part in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(part, nn.Module):
                _compress(self, part)
        return prepared

    setattr(compressing, MARK, True)
    return compressing


def _compressing_model(prepare_model: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(prepare_model)
    def compressing(
        self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        _allow_unused_parameters(self)
        prepared = prepare_model(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if not evaluation_mode:
            _compress(self, prepared)
        return prepared

    return compressing


def _allow_unused_parameters(accelerator: Any) -> None:
    """Has DistributedDataParallel not wait for gradients of what a step of elastic training does not train."""
    if configured().elastic is None:
        return
    if accelerator.ddp_handler is None:
        from accelerate import DistributedDataParallelKwargs

        accelerator.ddp_handler = DistributedDataParallelKwargs()
    accelerator.ddp_handler.find_unused_parameters = True


def _compress(accelerator: Any, model: nn.Module) -> None:
    """Compresses a model that has something to train, unless the script has prepared it."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    training = training_of(model)
    if training is not None and training.outer is not model and training.outer is not training.model:
        training.stop()  # wrapped anew, as for a second call of Trainer.train
        training = None
    if training is None:
        training = Training(model, configured())
    if training not in _announced:
        _announced.add(training)
        _announce(accelerator, training)


def _announce(accelerator: Any, training: Training) -> None:
    training.exit_summary.shown = accelerator.is_main_process
    if accelerator.is_main_process:
        print(f"DAF active via Accelerate: {training.exit_summary.title}", flush=True)
    if accelerator not in _saved:
        _saved.add(accelerator)
        accelerator.register_save_state_pre_hook(functools.partial(_save, accelerator.process_index))
        accelerator.register_load_state_pre_hook(functools.partial(_load, accelerator.process_index))


def _save(process: int, models: list[nn.Module], _weights: object, folder: str) -> None:
    found = [training_of(model) for model in models]
    states = [None if training is None else training.session.state() for training in found]
    Path(folder, STATES.format(process)).write_text(json.dumps(states))


def _load(process: int, models: list[nn.Module], folder: str) -> None:
    file = Path(folder, STATES.format(process))
    if not file.is_file():  # of a run without DAF, or with fewer processes
        return
    found = [(training_of(model), state) for model, state in zip(models, _states_in(file), strict=False)]
    saved = [(training, state) for training, state in found if training is not None and state is not None]
    for training, state in saved:
        parts_of(state, training.session.config)  # of several models, all are looked at before one is changed
    for training, state in saved:
        training.load_state(state)


def _states_in(file: Path) -> list[Any]:
    try:
        states: Any = json.loads(file.read_text())
        if not isinstance(states, list):
            raise TypeError(f"it is a {type(states).__name__}")
    except (RecursionError, TypeError, ValueError) as error:
        raise StateError(
            f"{str(file)!r} holds no saved states of DAF ({error}); remove it to go on without what was learned"
        ) from error
    return cast("list[Any]", states)


def main(arguments: list[str]) -> None:
    """Runs a script as `python` would, with DAF in every Accelerator."""
    if not arguments:
        sys.exit("usage: accelerate launch -m daf_integrations.accelerate train.py [arguments of train.py]")
    os.environ[SWITCH] = "true"
    from accelerate import Accelerator

    install(Accelerator)
    script = Path(arguments[0])
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
