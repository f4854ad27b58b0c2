"""A file of the plans and times of a run, so that other runs repeat its decisions."""

from __future__ import annotations

import json
from bisect import insort_right
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn
from torch.nn.parameter import is_lazy

from daf_core import distributed
from daf_core.config import DAFConfig
from daf_core.errors import ConfigError
from daf_core.plan.cost.profile import Forecast
from daf_core.plan.policies import policy_named
from daf_core.plan.search.planner import Plan

FORMAT = 2

OPTIONS = ("precision", "memory_budget", "budget_covers", "min_precision", "spill_dir", "chunked_loss", "elastic")
"""Options that plans depend on. Others, such as `seed`, may differ between the runs that follow a file."""


class StepKind(NamedTuple):
    """What steps have in common that one plan serves.

    They have as many rows, of one range of lengths, which may be split or not, the same blocks without a graph, and the
    same parameters that the user trains, of which there is a digest.
    """

    rows: int
    bucket: int
    splits: bool
    without_graph: tuple[str, ...]
    trained: str


class NamedPlan(NamedTuple):
    """A plan, with the names of its blocks."""

    names: tuple[str, ...]
    plan: Plan


class _Entry(NamedTuple):
    since: tuple[int, int]  # the step, and the batch of it, from which on the plan was followed
    named: NamedPlan
    own: bool  # this run has made it


class PlanFile:
    """Gives a run the decisions of a file, and adds those that the run makes itself.

    A line of JSON says what the file was made for, and each after it a plan or the times of a measured step. Lines are
    only added, so that a run that is killed leaves all but the last one whole. Each of several processes has its own
    file, such as plan.rank1.json. It is made if it is missing. `step` returns the number of steps before this one, of a
    resumed run with those before.

    Raises:
        ConfigError: The file cannot be read and written, is damaged, or was made for another training.
    """

    def __init__(self, path: str, config: DAFConfig, model: nn.Module, step: Callable[[], int] = lambda: 0) -> None:
        rank, named = distributed.rank(), Path(path)
        self.path = named.with_name(f"{named.stem}.rank{rank}{named.suffix}") if rank else named
        self._step = step
        self._now = (-1, 0)
        self._modules = {name for name, _ in model.named_modules()}
        self._plans: dict[StepKind, list[_Entry]] = {}
        self._times: dict[int, dict[str, Any]] = {}
        header = {"plan_file": FORMAT, "made_for": _purpose(config, model)}
        for number, line in enumerate(self._lines(header)):
            try:
                self._take(json.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self._error(f"is damaged in line {number + 2}: {error!r}") from error

    def begin_batch(self) -> None:
        """Begins a batch; a step with accumulated gradients has several."""
        step, (before, batch) = self._step(), self._now
        self._now = step, batch + 1 if step == before else 0

    def plan(self, kind: StepKind) -> NamedPlan | None:
        """Returns the plan that the file has for this batch: the one followed at this step, or the first later one.

        None if this run decides.
        """
        entry = self._last(kind) or next(iter(self._plans.get(kind, ())), None)
        return None if entry is None or entry.own else entry.named

    def add_plan(self, kind: StepKind, named: NamedPlan) -> None:
        """Writes the plan that this run follows from this batch on, unless the run follows it already."""
        last = self._last(kind)
        if last is not None and last.named == named:
            return
        self._insert(kind, _Entry(self._now, named, True))
        step, batch = self._now
        self._write({"plan": {"step": step, "batch": batch, **kind._asdict(), **_plan_as_dict(named)}})

    def give_up(self, kind: StepKind) -> bool:
        """Drops the file's plan, which runs out of memory; returns False if this run decides already."""
        if self.plan(kind) is None:
            return False
        entries = self._plans[kind]
        until = max(self._now, entries[0].since)
        self._plans[kind] = [entry for entry in entries if entry.own or entry.since > until]
        return True

    def times(self, number: int, measured: dict[str, Any]) -> dict[str, Any]:
        """Returns what the file has for the measured step of this number, else what it took, which is noted.

        Raises:
            ConfigError: The file has a step of other blocks.
        """
        known = self._times.setdefault(number, measured)
        if known is measured:
            self._write({"times": {"measured": number, **measured}})
        elif _shape(known) != _shape(measured):
            raise self._error(f"has other values for measured step {number} than this training's")
        return known

    def _last(self, kind: StepKind) -> _Entry | None:
        entries = [entry for entry in self._plans.get(kind, ()) if entry.since <= self._now]
        return entries[-1] if entries else None

    def _insert(self, kind: StepKind, entry: _Entry) -> None:
        # Of two in the same batch the first did not hold.
        insort_right(self._plans.setdefault(kind, []), entry, key=lambda each: each.since)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "times" in line:
            times = dict(line["times"])
            self._times.setdefault(int(times.pop("measured")), times)
            return
        plan = line["plan"]
        named = _plan_from_dict(plan)
        if not self._modules.issuperset(named.names):
            raise ValueError(f"the model has no {min({*named.names} - self._modules)}")
        without_graph, trained = tuple(plan["without_graph"]), str(plan["trained"])
        kind = StepKind(int(plan["rows"]), int(plan["bucket"]), bool(plan["splits"]), without_graph, trained)
        self._insert(kind, _Entry((int(plan["step"]), int(plan["batch"])), named, False))

    def _lines(self, header: dict[str, Any]) -> list[str]:
        """Returns the whole lines after the first one; makes the file if it is missing or empty."""
        try:
            with self.path.open("a+", encoding="utf-8", newline="\n") as file:
                file.seek(0)
                text = file.read()
                if not text:
                    file.write(f"{json.dumps(header)}\n")
                    return []
                first, *others = text.split("\n")
                self._check(first, json.loads(json.dumps(header)))
                file.truncate(len(text[: text.rfind("\n") + 1].encode()))  # a run was killed as it wrote the last one
                return others[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read and written: {error}", "Name another file") from error

    def _check(self, first: str, header: dict[str, Any]) -> None:
        try:
            found, wanted = json.loads(first), header["made_for"]
            if found["plan_file"] != FORMAT:
                raise ValueError(f"format {found['plan_file']!r}; this version reads {FORMAT}")
            before: dict[str, Any] = found["made_for"]
            pairs = {name: (before.get(name), value) for name, value in wanted.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error(f"holds no plans of DAF: {error!r}") from error
        other = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
        if other:
            raise self._error(f"was made for another training: {'; '.join(other)}")

    def _write(self, line: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            raise self._error(f"cannot be written any more: {error}", "Name another file") from error

    def _error(self, what: str, advice: str = "Delete it, or name another file") -> ConfigError:
        return ConfigError(f"plan_file={str(self.path)!r} {what}. {advice}")


def open_plan_file(config: DAFConfig, model: nn.Module, step: Callable[[], int]) -> PlanFile | None:
    """Returns the file that `plan_file` names; None where it names none. See `PlanFile`."""
    return None if config.plan_file is None else PlanFile(config.plan_file, config, model, step)


def _purpose(config: DAFConfig, model: nn.Module) -> dict[str, Any]:
    options = config.to_dict()
    chosen = {name: options[name] for name in OPTIONS} | {"spill_dir": config.spill_dir is not None}
    shapes = [
        (name, [] if is_lazy(each) else [*each.shape], str(each.dtype), each.device.type, each.requires_grad)
        for name, each in model.named_parameters()
    ]
    digest = sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    trained = sum(1 for *_, requires_grad in shapes if requires_grad)
    parameters = f"{len(shapes)} on {shapes[0][3]}, {trained} of them trained, {digest}"
    return {"model": type(model).__name__, "parameters": parameters, "processes": distributed.count(), **chosen}


def _plan_as_dict(named: NamedPlan) -> dict[str, Any]:
    names, plan = named
    blocks = {name: policy.name for name, policy in zip(names, plan.blocks, strict=True)}
    return {**vars(plan), "forecast": asdict(plan.forecast), "outside": plan.outside.name, "blocks": blocks}


def _plan_from_dict(plan: Mapping[str, Any]) -> NamedPlan:
    """Returns the plan that `_plan_as_dict` was given; what it raises for something else, `PlanFile` catches."""
    blocks, forecast = cast("dict[str, str]", plan["blocks"]), plan["forecast"]
    sizes = [int(forecast[name]) for name in ("peak_bytes", "held_bytes", "kept_bytes")]
    return NamedPlan(
        tuple(blocks),
        Plan(
            parts=int(plan["parts"]),
            bits=None if plan["bits"] is None else int(plan["bits"]),
            outside=policy_named(plan["outside"]),
            blocks=tuple(map(policy_named, blocks.values())),
            forecast=Forecast(float(forecast["seconds"]), *sizes),
            activation_budget=int(plan["activation_budget"]),
        ),
    )


def _shape(times: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(value) if isinstance(value, list) else 0 for name, value in times.items()}
