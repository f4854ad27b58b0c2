"""Models, optimizers and first steps that elastic training does not work with, or saves nothing for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from daf_core.distributed import exchanging, joined, several
from daf_core.model.layer_drop import layer_drops
from daf_core.unsupported.models import SHARDED, compiled, kind_of_first, missing, sharded, static_graph
from daf_core.unsupported.table import Context, Feature

_ERROR = "elastic training is not possible here: {}"


class FirstStep(NamedTuple):
    """Names of all blocks, of the modules that recorded a graph, and of those that ran without recording one."""

    blocks: Sequence[str]
    recorded: Collection[str]
    unrecorded: Collection[str]


def _drops_layers(context: Context) -> tuple[str, float, str] | None:
    found = next(layer_drops(context.model), None)
    if found is None:
        return None
    own = "" if found.owner is found.module else "config."
    return own + found.name, found.rate, type(found.module).__name__


def _reentrant(module: nn.Module) -> bool:
    if getattr(module, "gradient_checkpointing", False) is not True:
        return False
    function: Any = getattr(module, "_gradient_checkpointing_func", None)
    told = getattr(function, "keywords", {}).get("use_reentrant")
    if told is None:  # torch's own is reentrant then
        return getattr(getattr(function, "func", function), "__module__", "") == "torch.utils.checkpoint"
    return bool(told)


def _moves_untrained(optimizers: Sequence[Any]) -> str | None:
    inner = [(getattr(each, "optimizer", each), each) for each in optimizers]  # in trainers' wrappers, too
    return next((type(each).__name__ for one, each in inner if isinstance(one, torch.optim.LBFGS)), None)


ELASTIC = Feature(
    (
        (missing, "{}"),
        (
            lambda context: (type(context.model).__name__, context.blocks) if context.blocks < 2 else None,
            "{} has {} blocks, such as the layers of a transformer or equal modules in an nn.ModuleList or "
            "nn.Sequential, and two are needed; leave out elastic",
        ),
        (
            lambda context: several() and not exchanging(context.model) and not sharded(context),
            "there are several processes, and the model is not in a DistributedDataParallel yet, so that each would "
            "choose by itself; wrap it first, and prepare it then",
        ),
        (
            _drops_layers,
            "{}={} of {} skips layers at random, and a step may train what is skipped; set it to 0",
        ),
        (sharded, f"{SHARDED}; use DistributedDataParallel, or leave out elastic"),
        (compiled, "{} is compiled, and would be again for each part that is trained; leave out torch.compile"),
        (
            lambda context: joined(context.model),
            "torch's Join has processes without batches follow what DistributedDataParallel sends, and what a step may "
            "train is sent as well; give all processes as many batches",
        ),
        (
            static_graph,
            "{}(static_graph=True) expects the same graph in every step; leave it out",
        ),
        (
            kind_of_first(lambda each: isinstance(each, DistributedDataParallel) and not each.find_unused_parameters),
            "{} waits for gradients of what is not trained in a step; give it find_unused_parameters=True "
            "(TrainingArguments: ddp_find_unused_parameters=True; Accelerate: "
            "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]; Lightning and Fabric: "
            "DDPStrategy(find_unused_parameters=True))",
        ),
        (
            kind_of_first(_reentrant),
            "{} recomputes in the reentrant way, in which blocks that get no gradient are not trained; set "
            'gradient_checkpointing_kwargs={{"use_reentrant": False}}',
        ),
    ),
    _ERROR,
)

ELASTIC_UNITS = Feature(
    (
        (
            lambda units: not units.is_choice,
            "nothing is trained in blocks of the model, or in one alone, so that there is nothing to choose from. "
            "Blocks are the layers of a transformer, or equal modules in an nn.ModuleList or nn.Sequential; leave out "
            "elastic",
        ),
    ),
    _ERROR,
)

ELASTIC_FIRST_STEP = Feature(
    (
        (
            lambda step: next(
                (each for each in step.blocks if each not in step.recorded and each in step.unrecorded), None
            ),
            "{} ran without recording a graph in the first step, though something in it is trained, as under "
            "torch.no_grad() or in a reentrant activation checkpoint; record it, use_reentrant=False, or leave out "
            "elastic",
        ),
        (
            lambda step: next((each for each in step.blocks if each not in {*step.recorded, *step.unrecorded}), None),
            "{} did not run in the first step, as layers that are skipped at random (layerdrop) or experts do; have "
            "all layers run, or leave out elastic",
        ),
    ),
    _ERROR,
)

ELASTIC_OPTIMIZERS = Feature(
    (
        (
            _moves_untrained,
            "{} moves what is not trained in a step, too, along its direction of before; use another optimizer, such "
            "as AdamW, or leave out elastic",
        ),
    ),
    _ERROR,
)
