"""What of a training would take the gain of elastic training back, or break it: found as early as can be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from logging import getLogger
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from daf_core.autograd.torch_private import is_compiled
from daf_core.distributed import SHARDED, exchanging, several
from daf_core.elastic.units import Calls, Units
from daf_core.errors import ConfigError
from daf_core.model.blocks import Block
from daf_core.snapshots.measurement import missing_values

log = getLogger("daf")

LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Options of models of transformers."""


def refuse_training(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Checks how a model is called.

    Args:
        model: The model as it is called.
        blocks: Its blocks.

    Raises:
        ConfigError: It cannot be trained elastically.
    """
    _refuse(_reasons(model, blocks))


def refuse_units(units: Units) -> None:
    """Checks that there is something to choose from.

    Raises:
        ConfigError: There is not.
    """
    _refuse(_missing(units))


def is_choice(units: Units) -> bool:
    """Says whether there is something to choose from."""
    return next(_missing(units), None) is None


def refuse_uncalled(units: Units, calls: Calls, unrecorded: Collection[str]) -> None:
    """Checks that all blocks run and record: what is skipped now and then cannot be left to train alone.

    Args:
        units: What of the model is trained.
        calls: How its modules were called in the first step.
        unrecorded: Names of those that ran without recording a graph.

    Raises:
        ConfigError: One did not run, or in vain.
    """
    uncalled = [block.name for block in units.blocks if block.name not in calls]
    _refuse(
        f"{name} ran without recording a graph in the first step, though something in it is trained, as under "
        "torch.no_grad() or in a reentrant activation checkpoint; record it, use_reentrant=False, or leave out elastic"
        if name in unrecorded
        else f"{name} did not run in the first step, as layers that are skipped at random (layerdrop) or experts do; "
        "have all layers run, or leave out elastic"
        for name in uncalled
    )


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Checks that optimizers pass over what has no gradient.

    Raises:
        ConfigError: One does not.
    """
    _refuse(
        f"{type(one).__name__} moves what is not trained in a step, too, along its direction of before; use another "
        "optimizer, such as AdamW, or leave out elastic"
        for one in optimizers
        if isinstance(getattr(one, "optimizer", one), torch.optim.LBFGS)  # in trainers' wrappers, too
    )


def name_deepest(units: Units) -> None:
    """Names what is trained below the first block of a model with adapters: the user may not expect it to wait."""
    deepest = [unit.name for unit in units.units if unit.outside and unit.stage == 0]
    if deepest and not units.whole:
        log.warning(
            "%s comes before the first block: whatever trains it builds a graph through the whole model. Elastic "
            "training trains it only in steps that train everything",
            ", ".join(deepest),
        )


def _refuse(reasons: Iterator[str]) -> None:
    reason = next(reasons, None)
    if reason is not None:
        raise ConfigError(f"elastic training is not possible here: {reason}")


def _missing(units: Units) -> Iterator[str]:
    if len({unit.stage for unit in units.units}) < 2 and not (units.units and units.always):
        yield (
            "nothing is trained in blocks of the model, or in one alone, so that there is nothing to choose from. "
            "Blocks are the layers of a transformer, or equal modules in an nn.ModuleList or nn.Sequential; leave out "
            "elastic"
        )


def _reasons(model: nn.Module, blocks: Sequence[Block]) -> Iterator[str]:
    if (missing := missing_values(model)) is not None:
        yield missing
    if len(blocks) < 2:
        yield (
            f"{type(model).__name__} has {len(blocks)} blocks, such as the layers of a transformer or equal modules in "
            "an nn.ModuleList or nn.Sequential, and two are needed; leave out elastic"
        )
    if several() and not exchanging(model):
        yield (
            "there are several processes, and the model is not in a DistributedDataParallel yet, so that each would "
            "choose by itself; wrap it first, and prepare it then"
        )
    for module in model.modules():
        kind = type(module).__name__
        config = getattr(module, "config", None)
        for name in LAYER_DROPS:
            share = getattr(config, name, 0.0)
            if share:
                yield (
                    f"config.{name}={share} of {kind} skips layers at random, and a step may train what is skipped; "
                    "set it to 0"
                )
        if {each.__name__ for each in type(module).__mro__} & SHARDED:
            yield (
                f"{kind} spreads parameters over processes by whether they are trained when it is made; use "
                "DistributedDataParallel, or leave out elastic"
            )
        if is_compiled(module):
            yield f"{kind} is compiled, and would be again for each part that is trained; leave out torch.compile"
        if isinstance(module, DistributedDataParallel):
            if getattr(module, "static_graph", False):
                yield "DistributedDataParallel(static_graph=True) expects the same graph in every step; leave it out"
            elif not module.find_unused_parameters:
                yield (
                    "DistributedDataParallel waits for gradients of what is not trained in a step; give it "
                    "find_unused_parameters=True (TrainingArguments: ddp_find_unused_parameters=True; Accelerate: "
                    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]; Lightning and "
                    "Fabric: DDPStrategy(find_unused_parameters=True))"
                )
        if _reentrant(module):
            yield (
                f"{kind} recomputes in the reentrant way, in which blocks that get no gradient are not trained; set "
                'gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        yield "parameters are spread over processes (DTensor); use DistributedDataParallel, or leave out elastic"


def _reentrant(module: nn.Module) -> bool:
    if getattr(module, "gradient_checkpointing", False) is not True:
        return False
    function: Any = getattr(module, "_gradient_checkpointing_func", None)
    told = getattr(function, "keywords", {}).get("use_reentrant")
    if told is None:  # torch's own is reentrant then
        return getattr(getattr(function, "func", function), "__module__", "") == "torch.utils.checkpoint"
    return bool(told)
