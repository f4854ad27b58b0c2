"""Where options come from: arguments go before the environment, and the environment before a configuration file."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast, get_type_hints

from daf_core.config import DAFConfig, as_config
from daf_core.errors import ConfigError, shown
from daf_integrations.environment import OPTIONS, SECTION, SWITCH, requested

Function = TypeVar("Function", bound=Callable[..., Any])

_OWNERS = (
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.trainer", "Trainer"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("accelerate.accelerator", "Accelerator"),
)
"""Classes, by module, whose options users give to DAF by mistake."""

_ON = ("1", "true", "on", "yes", "y", "t")


def configured(
    config: DAFConfig | Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
) -> DAFConfig:
    """Returns the configuration for a model.

    Args:
        config: A whole configuration, or a mapping of its fields; nothing else counts then.
        options: Fields of `DAFConfig`; those that are missing are taken from the environment where it switches DAF on
            (``ACCELERATE_USE_DAF=1``, with ``ACCELERATE_DAF_CONFIG`` as JSON), and are the defaults otherwise.

    Raises:
        ConfigError: Both are given, an option is unknown, a value is not allowed, or an option is without effect.
    """
    _check_owners(options or {})
    if config is None:
        from_environment = _own_options() if _switched_on() else {}
        chosen = DAFConfig.from_dict({**from_environment, **(options or {})})
    else:
        chosen = as_config(config)
        if options:
            given = f"{type(config).__name__} and {', '.join(options)}"
            raise ConfigError(f"give a DAFConfig or options, not both; got a {given}")
    _check_idle_options(chosen)
    return chosen


def naming_options(function: Function) -> Function:
    """Has the signature of a function with ``**options`` name the fields of `DAFConfig`, for command lines made of it.

    They have no default there: what is not given comes from elsewhere.
    """
    signature = inspect.signature(function)
    *others, options = signature.parameters.values()
    hints = {**get_type_hints(DAFConfig), "elastic": dict[str, Any] | None}
    named = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=SUPPRESS, annotation=hints[field.name])
        for field in fields(DAFConfig)
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*others, *named, options])
    return function


def export(section: object) -> None:
    """Hands the section of a configuration file on to the processes that are launched, below what they have.

    ``ACCELERATE_USE_DAF=0`` in the environment switches the section off.

    Raises:
        ConfigError: An option of the section or of the environment is unknown or its value is not allowed.
    """
    if not _switched_on() and os.environ.get(SWITCH):
        return
    options = _checked({} if section is None else section, f"{SECTION} in the Accelerate configuration")
    together = _checked({**options, **_own_options()}, f"{SECTION} with {OPTIONS} over it")
    os.environ[OPTIONS] = json.dumps(together)
    os.environ[SWITCH] = "true"


def options_in(text: str, source: str) -> object:
    """Returns what a text in JSON says.

    Raises:
        ConfigError: It is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # thousands of digits are the former, of brackets the latter
        raise ConfigError(
            f'{source}={shown(text)} is not JSON ({error}); give an object such as {{"precision": 4}}'
        ) from error


def _switched_on() -> bool:
    value = os.environ.get(SWITCH, "")
    if requested() and value.lower() not in _ON:
        raise ConfigError(f"{SWITCH}={shown(value)} is not allowed; set it to 1 or 0, or unset it")
    return requested()


def _own_options() -> dict[str, Any]:
    return _checked(options_in(os.environ.get(OPTIONS, "{}"), OPTIONS), OPTIONS)


def _check_owners(options: Mapping[str, Any]) -> None:
    """Refuses options of a trainer that the program has imported."""
    unknown = [name for name in options if name not in {field.name for field in fields(DAFConfig)}]
    for name, (module, kind) in itertools.product(unknown, _OWNERS):
        found = getattr(sys.modules.get(module), kind, None)
        if found is not None and name in inspect.signature(found).parameters:
            owner = f"{module.partition('.')[0]}.{kind}"
            raise ConfigError(
                f"unknown option {shown(name)}: it is an option of {owner}; give it there, as in {owner}({name}=...)"
            )


def _check_idle_options(config: DAFConfig) -> None:
    """Refuses options that change nothing, once those of all sources are together."""
    if config.rounding != DAFConfig.rounding and config.precision == "exact":
        raise ConfigError(f'rounding={config.rounding!r} means nothing with precision="exact"; leave it out')
    # Of what "auto" chooses, a least precision is a bound without a budget, too.
    with_budget = ("spill_dir", "budget_covers", *(() if config.precision == "auto" else ("min_precision",)))
    for name in with_budget if config.memory_budget is None else ():
        if getattr(config, name) != getattr(DAFConfig, name):
            raise ConfigError(
                f"{name}={shown(getattr(config, name))} means nothing without memory_budget; give one, such as "
                '"400MB" or "auto", or leave it out'
            )


def _checked(options: object, source: str) -> dict[str, Any]:
    """Returns options that make a configuration, as they are: what was left out may come from elsewhere."""
    try:
        DAFConfig.from_dict(options)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return dict(cast("Mapping[str, Any]", options))
