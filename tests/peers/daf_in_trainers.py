"""A pytest plugin that switches DAF on in every trainer that a test makes, and writes down how each test ended.

It is loaded by its own name: as a part of `tests` it would hide the package of that name which a peer's tests are in.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

SWITCH = "DAF_PEERS"
"""Environment variable: the peer and the precision, such as "transformers:exact"; not set for a run without DAF."""

RESULTS = "DAF_PEERS_RESULTS"
"""Environment variable: the file that gets a line of JSON for each test."""

_TIMES = ("pack_seconds", "worker_seconds", "unpack_seconds", "audit_seconds")


def pytest_configure() -> None:
    """Switches DAF on."""
    peer, _, precision = os.environ.get(SWITCH, "").partition(":")
    if peer:
        _SWITCHES[peer](precision)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes how the test went, and where setting up or tearing down did not."""
    if report.when == "call" or report.outcome != "passed":
        _note(report.nodeid, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Notes files that cannot be imported."""
    if report.outcome == "failed":
        _note(report.nodeid, report)


def _note(test: str, report: Any) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    # Of what was raised the first line: a failed assertion goes on with the values in it.
    lines = crash.message.splitlines()[:1] if crash else str(report.longrepr or "").strip().splitlines()
    with open(os.environ[RESULTS], "a") as file:
        print(json.dumps({"test": test, "outcome": report.outcome, "error": "".join(lines[-1:])}), file=file)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Has calls of a method go to `wrapper`, with the method before their arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, method, *args, **kwargs)

    setattr(owner, name, wrapped)


def _in_transformers(precision: str) -> None:
    from transformers import Trainer

    from daf_integrations import DAFCallback
    from daf_integrations.session.metrics import RunTotals

    def add(self: Any, method: Callable[..., Any], step: Any) -> None:
        # Its tests compare the states of two runs, logs among them; what DAF takes differs from run to run.
        method(self, dataclasses.replace(step, **dict.fromkeys(_TIMES, 0.0)))

    def initialize(self: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        self.add_callback(DAFCallback(precision=precision))

    _wrap(Trainer, "__init__", initialize)
    _wrap(RunTotals, "add", add)


def _in_accelerate(precision: str) -> None:
    os.environ["ACCELERATE_USE_DAF"] = "1"  # for the processes that tests start, too
    os.environ["ACCELERATE_DAF_CONFIG"] = json.dumps({"precision": precision})
    from accelerate import Accelerator

    from daf_integrations.accelerate.plugin import install

    install(Accelerator)


def _in_peft(precision: str) -> None:
    from peft import PeftModel

    import daf_integrations

    def initialize(self: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        if any(each.requires_grad and not each.is_meta for each in self.parameters()):
            daf_integrations.prepare(self, precision=precision)

    _wrap(PeftModel, "__init__", initialize)


def _in_lightning(precision: str) -> None:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer
    from torch import nn

    import daf_integrations
    from daf_integrations.lightning import DAFStrategy

    def initialize(self: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if kwargs.get("strategy", "auto") == "auto":
            kwargs["strategy"] = DAFStrategy(precision=precision)
        method(self, *args, **kwargs)

    def set_up(self: Any, method: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Module) and any(
            each.requires_grad and not each.is_meta for each in module.parameters()
        ):
            daf_integrations.prepare(module, precision=precision)
        return method(self, module, *args, **kwargs)

    _wrap(Trainer, "__init__", initialize)
    for name in ("setup", "setup_module"):
        _wrap(Fabric, name, set_up)


_SWITCHES: dict[str, Callable[[str], None]] = {
    "transformers": _in_transformers,
    "accelerate": _in_accelerate,
    "peft": _in_peft,
    "lightning": _in_lightning,
}
