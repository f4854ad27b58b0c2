"""What torch runs when it is imported, through `daf_autoload`: hooks that cost little.

Standard library only, and never an exception: whatever is broken here, `import torch` works. The hooks let an
Accelerate configuration file have a section ``daf_config``, switch DAF on in Accelerate where the environment asks for
it, and make the strategy "daf" known to Lightning. ``DAF_AUTOLOAD=0`` leaves them out.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from logging import getLogger
from types import ModuleType
from typing import Any

from daf_integrations.environment import SECTION, autoload_allowed, requested

Action = Callable[[ModuleType], None]

log = getLogger("daf")


def register() -> None:
    """Installs the hooks, once; torch calls it at the end of its own import."""
    try:
        if not autoload_allowed():
            return
        if not any(isinstance(finder, ImportWatcher) for finder in sys.meta_path):
            watcher = ImportWatcher(_ACTIONS)
            sys.meta_path.insert(0, watcher)
            watcher.act_on_imported()
    except Exception as error:
        log.warning("DAF could not install its hooks, so no configuration file switches it on: %r", error)


class ImportWatcher(MetaPathFinder):
    """Acts on modules, given by their full names, right after their import; it finds none itself."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = dict(actions)

    def act_on_imported(self) -> None:
        """Acts on the modules whose import has ended, as some have before this was installed."""
        for name in list(self._actions):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is not None and not getattr(spec, "_initializing", False):
                self._act(name, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Returns the spec that the other finders give, with the action added; None for all other modules."""
        if not self._actions:
            return None
        # Where accelerate imports torch, its modules are half initialised when this is installed.
        self.act_on_imported()
        if fullname not in self._actions or fullname in sys.modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(fullname, spec.loader)
                return spec
        return None

    def _follow(self, name: str, loader: Any) -> None:
        """Has the loader, which stays the one it is, act after it has run the module."""
        run = loader.exec_module

        @functools.wraps(run)
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            self._act(name, module)

        loader.exec_module = exec_module

    def _act(self, name: str, module: ModuleType) -> None:
        action = self._actions.pop(name, None)
        try:
            if action is not None:
                action(module)
        except Exception as error:
            log.warning("DAF does not know this version of %s, and is not active there: %r", name, error)


def _accept_section(config_args: ModuleType) -> None:
    """Lets Accelerate's configuration files have a section for DAF, which launched processes get by environment."""
    process_config = config_args.BaseConfig.process_config

    @functools.wraps(process_config)
    def process(config_dict: Any) -> Any:
        if isinstance(config_dict, dict) and SECTION in config_dict:
            from daf_integrations.session.options import export

            export(config_dict.pop(SECTION))
        return process_config(config_dict)

    config_args.BaseConfig.process_config = staticmethod(process)


def _switch_on(accelerator_module: ModuleType) -> None:
    """Has the first Accelerator load DAF, where it was asked for; there a failure is an error, and not silent."""
    if not requested():
        return
    accelerator_class = accelerator_module.Accelerator
    initialize = accelerator_class.__init__

    @functools.wraps(initialize)
    def first_initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        from daf_integrations.accelerate.plugin import install

        install(accelerator_class)
        accelerator_class.__init__ = initialize
        initialize(self, *args, **kwargs)

    accelerator_class.__init__ = first_initialize


def _register_strategy(home: str, strategies: ModuleType) -> None:
    """Makes "daf" a strategy that Lightning knows by name; DAF is loaded when a Trainer asks for it."""

    def strategy(**options: Any) -> Any:
        return importlib.import_module(home).DAFStrategy(**options)

    registry = strategies.StrategyRegistry
    if "daf" not in registry:
        registry.register("daf", strategy, description="Stores saved activations in a few bits")


_ACTIONS: dict[str, Action] = {
    "accelerate.commands.config.config_args": _accept_section,
    "accelerate.accelerator": _switch_on,
    "lightning.pytorch.strategies": functools.partial(_register_strategy, "daf_integrations.lightning"),
    "pytorch_lightning.strategies": functools.partial(_register_strategy, "daf_integrations.pytorch_lightning"),
}
