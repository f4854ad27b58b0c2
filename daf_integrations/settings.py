"""Where options come from: arguments go before the environment, and the environment before a configuration file."""

from __future__ import annotations

import inspect
import json
import os
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast, get_type_hints

from daf_core.config import DAFConfig
from daf_core.errors import ConfigError
from daf_integrations._autoload import OPTIONS, SECTION, SWITCH, requested

Function = TypeVar("Function", bound=Callable[..., Any])


def configured(config: DAFConfig | None = None, options: Mapping[str, Any] | None = None) -> DAFConfig:
    """Returns the configuration for a model.

    Args:
        config: A whole configuration; nothing else counts then.
        options: Fields of `DAFConfig`; those that are missing are taken from the environment where it switches DAF on
            (``ACCELERATE_USE_DAF=1``, with ``ACCELERATE_DAF_CONFIG`` as JSON), and are the defaults otherwise.

    Raises:
        ConfigError: Both are given, an option is unknown or a value is not allowed.
    """
    if config is None:
        return DAFConfig.from_dict({**environment_options(), **(options or {})})
    if options:
        raise ConfigError(f"give a DAFConfig or options, not both; got a DAFConfig and {', '.join(options)}")
    return config


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


def environment_options() -> dict[str, Any]:
    """Returns the options of the environment; {} where it does not switch DAF on.

    Raises:
        ConfigError: They are no JSON object, or an option or a value is not allowed.
    """
    return _own_options() if requested() else {}


def export(section: object) -> None:
    """Hands the section of a configuration file on to the processes that are launched, below what they have.

    ``ACCELERATE_USE_DAF=0`` in the environment switches the section off.

    Raises:
        ConfigError: An option of the section or of the environment is unknown or its value is not allowed.
    """
    if SWITCH in os.environ and not requested():
        return
    options = _checked({} if section is None else section, f"{SECTION} in the Accelerate configuration")
    together = _checked({**options, **_own_options()}, f"{SECTION} with {OPTIONS} over it")
    os.environ[OPTIONS] = json.dumps(together)
    os.environ[SWITCH] = "true"


def _own_options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS, "{}")
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{OPTIONS}={text!r} is not JSON ({error}); give an object such as {{"precision": 4}}'
        ) from error
    return _checked(options, OPTIONS)


def _checked(options: object, source: str) -> dict[str, Any]:
    """Returns options that make a configuration, as they are: what was left out may come from elsewhere."""
    try:
        DAFConfig.from_dict(options)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return dict(cast("Mapping[str, Any]", options))
