"""The configuration of DAF: one frozen object for all integrations."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from typing_extensions import Self

from daf_core.errors import ConfigError, shown
from daf_core.state_checks import MOST

Precision = Literal["auto", "exact", 8, 4, 2, 1]
MinPrecision = Literal[0, 1, 2, 4, 8]
Rounding = Literal["nearest", "stochastic"]
BackendName = Literal["auto", "reference"]
Packing = Literal["auto", "device", "workers"]
ChunkedLoss = Literal["auto", True, False]
BudgetScope = Literal["step", "activations"]

_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*([kmgtp]?b?|[kmgtp]ib|bytes?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class _Options:
    """Refuses what a generated constructor would with a bare TypeError: values without names, unknown options."""

    def __new__(cls, /, *values: object, **options: object) -> Self:
        if values:
            raise ConfigError(
                f"{cls.__name__} takes options by name alone, got {shown(values[0])}; name them, as in precision=4, or "
                "call DAFConfig.from_dict with a mapping, or DAFConfig.from_yaml with a file"
            )
        _check_names(options, cls)
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(_Options):
    """How much of each step is left when a model is trained elastically: what reduces the loss most for its cost.

    Blocks below the lowest one that a step trains build no graph: they take no time in backward and hold nothing for
    it. Of a model with adapters, all adapters of a block are trained or none; of one that is trained as a whole, single
    layers in blocks. What comes after the last block is always trained.

    Attributes:
        time: The mean time of a step, relative to one that trains everything. What a step leaves of it, those after it
            may use. Where neither this nor `memory` is given, it is 0.7 with adapters, and 0.45 where blocks are
            trained as a whole, whose backward passes are longer.
        memory: The bytes of saved activations, relative to those of a step that trains everything, which no step may
            exceed: what is near the input is never trained then.
        refresh: Steps after which it is measured anew what trains best.

    Raises:
        ConfigError: An option is unknown or a value is not allowed.
    """

    time: float | None = None
    memory: float | None = None
    refresh: int = 50

    def __post_init__(self) -> None:
        for name in ("time", "memory"):
            object.__setattr__(self, name, _share(f"elastic.{name}", getattr(self, name)))
        _check_steps("elastic.refresh", self.refresh)


@dataclass(frozen=True, kw_only=True)
class DAFConfig(_Options):
    """How activations are stored. All fields are keywords; `to_dict` and `from_dict` are inverse.

    Attributes:
        precision: Code bits of an activation element: 8, 4, 2 or 1 for all alike; "auto" chooses them for each place in
            the model by what its error does to the gradient: the fewest bytes under `max_gradient_error`, otherwise the
            least error within `memory_budget`, otherwise the least error in the bytes that 4 bits for all would take;
            "exact" stores nothing lossy, so that gradients are bit-identical to training without DAF, and only masks
            and integers shrink.
        max_gradient_error: Error of the gradient that is allowed, relative to its length, such as 0.05; None for no
            bound. It is measured by audits. Where `memory_budget` is too small for it, the budget is kept, and a
            warning says what the error is.
        audit_every: Steps between audits, which measure the error on an eighth of a batch; a few more take place at the
            beginning. None for no audits: "auto" then knows nothing of the gradient.
        rounding: "nearest", or "stochastic" for codes whose expectation is the value. Nearest gives the smaller
            gradient error below 5 bits, stochastic a slightly smaller one above.
        memory_budget: Bytes that a training step may take at once on each device beside the model, its gradients and
            the optimizer, as a number or a size such as "400MB"; "auto" follows the memory that is available; None
            sets no limit. Saved activations never hold more: the least important bits are dropped first, then
            activations move to `spill_dir` or, without one, from a GPU to pinned main memory, then
            `ActivationBudgetError` is raised.
        budget_covers: "step" for all that a step takes: trainers measure the model on a few rows of the first batch,
            and choose what to keep, to compress and to recompute, and into how many micro-batches to split a batch, so
            that a step is fastest within the budget; `PlanError` says if nothing is. "activations" for saved
            activations alone, which is all that an `ActivationEngine` by itself can limit.
        min_precision: Bits that neither "auto" nor the budget may take from an activation: 8, 4, 2, 1, or 0 for the
            means of its scaling groups alone. None stands for 0, and with a `spill_dir` for `precision` (8 for "auto"):
            spilling loses nothing. Of trainings without `memory_budget` only those with "auto" take it.
        spill_dir: Folder for a file that takes what does not fit in `memory_budget`, without which trainings refuse it;
            None for none.
        pool_growth: "adaptive", or the bytes by which the page pool grows, as a number or a size such as "100MB".
        seed: Selects the random numbers of stochastic rounding. Torch's generators are never touched.
        backend: "auto" for the kernels of the model's device, or plain torch operations and a warning where it has
            none; "reference" for these, slow, on any device.
        packing: Who packs: "device" for the thread that saves an activation, with torch's other threads, or with the
            kernels of its GPU; "workers" for a thread of DAF's own, while that one computes on, so that a tensor that
            is changed in place after it was saved is an error in backward, as without DAF. It packs what a GPU saves on
            the CPU, and keeps it in host memory. "auto" is "device" for a GPU, and on a CPU the faster of both, by
            measurement, where torch leaves cores idle. Bytes and gradients are the same.
        chunked_loss: Computes the loss of language models in chunks of logits, from the hidden states, so that logits
            never exist as a whole in training; loss and gradients differ by rounding alone, and who reads the logits
            before the optimizer's step gets them. "auto" does so where the model is recognized, a causal one of
            transformers with that library's own loss, and `precision` is not "exact"; True always, with an error where
            it is not recognized; False never. Trainers and `prepare` apply it; an `ActivationEngine` by itself does
            not.
        elastic: Trains in each step only what pays, within a share of a step's time or memory; an `ElasticConfig`, or a
            mapping of its fields such as ``{"time": 0.6}``. None trains everything in each step.
        plan_file: File of what a `memory_budget` for whole steps and `elastic` decide by measured times and free
            memory: a run follows what is in it, and adds what is not, so that runs with the same seed, data and machine
            give the same numbers, resumed ones too. It is made if it is missing. None measures in each run.

    Raises:
        ConfigError: An option is unknown or a value is not allowed.
    """

    precision: Precision = "auto"
    max_gradient_error: float | None = None
    audit_every: int | None = 100
    rounding: Rounding = "nearest"
    memory_budget: int | str | None = None
    budget_covers: BudgetScope = "step"
    min_precision: MinPrecision | None = None
    spill_dir: str | None = None
    pool_growth: int | str = "adaptive"
    seed: int = 0
    backend: BackendName = "auto"
    packing: Packing = "auto"
    chunked_loss: ChunkedLoss = "auto"
    elastic: ElasticConfig | None = None
    plan_file: str | None = None

    def __post_init__(self) -> None:
        _check_choice("precision", self.precision, get_args(Precision))
        _check_choice("rounding", self.rounding, get_args(Rounding))
        _check_choice("backend", self.backend, get_args(BackendName))
        _check_choice("packing", self.packing, get_args(Packing))
        _check_choice("chunked_loss", self.chunked_loss, get_args(ChunkedLoss))
        _check_choice("budget_covers", self.budget_covers, get_args(BudgetScope))
        _check_seed(self.seed)
        bound = _bound(self.max_gradient_error, self.precision, self.audit_every)
        object.__setattr__(self, "max_gradient_error", bound)
        if self.audit_every is not None:
            _check_steps("audit_every", self.audit_every, ", or None")
        _check_min_precision(self.min_precision, self.precision)
        if self.spill_dir is not None:
            object.__setattr__(self, "spill_dir", _spill_dir(self.spill_dir))
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_size("memory_budget", self.memory_budget, "auto"))
        object.__setattr__(self, "pool_growth", parse_size("pool_growth", self.pool_growth, "adaptive"))
        object.__setattr__(self, "elastic", _elastic(self.elastic))
        _check_plan_file(self.plan_file, self.plans_steps or self.elastic is not None)
        if self.plan_file is not None:
            object.__setattr__(self, "plan_file", os.fspath(self.plan_file))

    @property
    def plans_steps(self) -> bool:
        """Whether steps are planned: there is a budget that covers them."""
        return self.memory_budget is not None and self.budget_covers == "step"

    @property
    def kept_precision(self) -> int:
        """Bits that the budget may not take from an activation; 0 where `precision` is "exact"."""
        if self.precision == "exact":
            return 0
        most = 8 if self.precision == "auto" else self.precision
        least = most if self.spill_dir is not None else 0
        return least if self.min_precision is None else self.min_precision

    def ways_to_fit(self, spills: bool = True) -> tuple[str, ...]:
        """Returns what options may be changed where activations do not fit in the budget; `spills` says if they can."""
        ways = ["set spill_dir"] if spills and self.spill_dir is None else []
        if self.precision == "exact":
            ways.append("set precision to a number of bits")
        elif self.kept_precision:
            ways.append("set min_precision" if self.min_precision is None else "lower min_precision")
        return tuple(ways)

    @classmethod
    def from_dict(cls, options: object) -> DAFConfig:
        """Makes a configuration from a mapping with the fields as keys; missing ones take their defaults.

        Raises:
            ConfigError: `options` is no mapping, an option is unknown or its value is not allowed.
        """
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"a configuration is a mapping of options, got {type(options).__name__} {shown(options)}; "
                'give one such as {"precision": 4}'
            )
        named = cast("Mapping[Any, Any]", options)
        _check_names(named, cls)  # which need not be texts
        return cls(**named)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_yaml(cls, path: str | Path) -> DAFConfig:
        """Reads a YAML file whose top level is the mapping of options.

        Raises:
            ConfigError: The file is missing, is not YAML, or holds something else.
        """
        import yaml  # 20 ms that a program without a YAML file does not pay

        try:
            options = yaml.safe_load(Path(path).read_text())
        except Exception as error:  # PyYAML has an AttributeError for `!!timestamp x`, a KeyError for `!!bool x`, ...
            raise ConfigError(f"cannot read the configuration file {shown(str(path))}: {error}") from error
        return cls.from_dict({} if options is None else options)

    def to_yaml(self, path: str | Path) -> None:
        """Writes the options to a YAML file that `from_yaml` reads back."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))


def as_config(config: object) -> DAFConfig:
    """Returns a configuration as it is, or that of a mapping of its fields.

    Raises:
        ConfigError: It is something else, or an option of it is unknown or its value is not allowed.
    """
    if isinstance(config, DAFConfig):
        return config
    if isinstance(config, Mapping):
        return DAFConfig.from_dict(cast("Mapping[Any, Any]", config))
    given = shown(config) if isinstance(config, str | int | float | list | tuple | type) else type(config).__name__
    raise ConfigError(
        f"{given} is no configuration; give options by name, as in precision=4, or a DAFConfig, or a mapping "
        'such as {"precision": 4}; DAFConfig.from_yaml(path) reads a file'
    )


def parse_size(name: str, value: object, word: str | None = None) -> int | str:
    """Returns a size in bytes.

    Args:
        name: The option, for the error message.
        value: A positive integer, or a string such as "400MB", "1.5 GiB" or "800000".
        word: A string that is allowed beside sizes, and returned as it is.

    Raises:
        ConfigError: `value` is no size, or not positive.
    """
    import humanfriendly

    if word is not None and isinstance(value, str) and value == word:
        return word
    expected = (
        f'{name}={shown(value)} is not a size; give a positive number of bytes or a size such as "400MB" or "1.5GiB"'
        + (f', or "{word}"' if word else "")
    )
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(expected)
    try:
        if isinstance(value, str) and not _SIZE.fullmatch(value):
            raise humanfriendly.InvalidSize  # it takes any word by its first letter: "12 parsecs" for petabytes
        size = value if isinstance(value, int) else humanfriendly.parse_size(value)
    except (humanfriendly.InvalidSize, ValueError, OverflowError) as error:  # hundreds of digits are no float or int
        raise ConfigError(expected) from error
    if not 0 < size <= MOST:
        raise ConfigError(expected)
    return size


def _check_min_precision(least: int | None, precision: Precision) -> None:
    if least is None:
        return
    _check_choice("min_precision", least, (None, *get_args(MinPrecision)))
    if precision == "exact":
        raise ConfigError(
            f'min_precision={least} means nothing with precision="exact", which drops no bits; leave it out'
        )
    if precision != "auto" and least > precision:
        raise ConfigError(f"min_precision={least} is not allowed: it is above precision={precision}")


def _bound(bound: object, precision: Precision, audit_every: object) -> float | None:
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound <= 1:
        raise ConfigError(f"max_gradient_error={shown(bound)} is not allowed; give a number above 0, and 1 at most")
    if precision != "auto":
        raise ConfigError(
            f'max_gradient_error={bound} means nothing with precision={precision!r}; it needs precision="auto"'
        )
    if audit_every is None:
        raise ConfigError(f"max_gradient_error={bound} needs audits to measure the error; set audit_every")
    return float(bound)  # numpy's are floats too, and spread to figures that no checkpoint takes


def _check_steps(name: str, steps: object, otherwise: str = "") -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST:
        raise ConfigError(
            f"{name}={shown(steps)} is not allowed; give a number of steps from 1 to 2**63 - 1{otherwise}"
        )


def _spill_dir(folder: object) -> str:
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"spill_dir={shown(folder)} is not allowed; give the path of a folder")
    path = os.fsdecode(cast("str | os.PathLike[str]", folder))
    if not os.path.isdir(path):
        raise ConfigError(f"spill_dir={shown(path)} is no folder; make it, or name another")
    return path


def _check_plan_file(path: object, planned: bool) -> None:
    if path is None:
        return
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"plan_file={shown(path)} is not allowed; give the path of a file")
    if not planned:
        raise ConfigError(
            f"plan_file={shown(str(path))} means nothing where nothing is planned; set elastic, or a memory_budget "
            'with budget_covers="step", or leave it out'
        )


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ConfigError(f"seed={shown(seed)} is not allowed; give an integer from 0 to 2**64 - 1")


def _elastic(value: object) -> ElasticConfig | None:
    if value is None or isinstance(value, ElasticConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f'elastic={shown(value)} is not allowed; give a mapping such as {{"time": 0.6}}, or None')
    options = cast("Mapping[str, Any]", value)
    _check_names(options, ElasticConfig)
    return ElasticConfig(**options)


def _share(name: str, share: object) -> float | None:
    if share is None:
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(f"{name}={shown(share)} is not allowed; give a share above 0 and below 1")
    return float(share)


def _check_names(options: Mapping[Any, object], kind: type[_Options]) -> None:
    known, prefix = [field.name for field in fields(kind)], "elastic." if kind is ElasticConfig else ""
    for name in options:
        if name not in known:
            full = prefix + (name if isinstance(name, str) else shown(name))
            hint = _hint(name, options, known, prefix)
            raise ConfigError(f"unknown option {shown(full)}{hint} Allowed: {', '.join(known)}")


def _hint(name: object, options: Mapping[Any, object], known: list[str], prefix: str) -> str:
    if "daf_config" in options:
        return "; daf_config is a section of Accelerate's file: leave out that level, and give what is inside of it."
    inside = options.get(name)
    if isinstance(inside, Mapping) and any(option in known for option in cast("Mapping[Any, Any]", inside)):
        return f"; {name} is a heading above the options: leave out that level, and give what is inside of it."
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"; did you mean {prefix + close[0]!r}?" if close else "."


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # The type is compared too: True == 1 would pass for a precision of one bit.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ConfigError(f"{name}={shown(value)} is not allowed; allowed: {', '.join(map(repr, allowed))}")
