"""Predicates on a model, and the features that depend on the model alone: planned steps, second runs and audits."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from daf_core.autograd.torch_compile import COMPILED, is_compiled
from daf_core.distributed import several
from daf_core.snapshots.measurement import missing_values
from daf_core.snapshots.step import devices_of
from daf_core.unsupported.table import Context, Feature

SHARDING = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Names of the classes that shard a model; an import of the classes takes seconds."""

SHARDED = "{} spreads each parameter over several processes"

_REPLICATE = "torch.distributed._composable.replicate"

UNMEASURED = "DAF cannot measure the error of the gradient on a part of the batch: {}"


def is_named(module: nn.Module, names: set[str]) -> bool:
    """Whether a module's class or one of its bases has one of the names."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


def kind_of_first(condition: Callable[[nn.Module], object]) -> Callable[[Context], str | None]:
    """Returns a predicate: it names the class of the first module, the model included, that meets a condition."""
    return lambda context: next((type(each).__name__ for each in context.model.modules() if condition(each)), None)


def among_several(predicate: Callable[[Context], object]) -> Callable[[Context], object]:
    """Returns the predicate of a limitation that exists only among several processes."""
    return lambda context: several() and predicate(context)


def missing(context: Context) -> str | None:
    """Names a parameter that the first forward pass creates, with the remedy."""
    return missing_values(context.inner or context.model)


def sharded_tensors(context: Context) -> str | None:
    """Returns "DTensor" if the parameters are such tensors; an import of the class takes a second."""
    return "DTensor" if any(hasattr(each, "placements") for each in context.model.parameters()) else None


def sharded(context: Context) -> str | None:
    """Names the class that shards the model's parameters."""
    return kind_of_first(lambda each: is_named(each, SHARDING))(context) or sharded_tensors(context)


static_graph = kind_of_first(lambda each: isinstance(each, DistributedDataParallel) and each.static_graph)
"""Names the class of a DistributedDataParallel that expects the same graph in every step."""

_replicated = among_several(
    kind_of_first(lambda each: any(kind.__module__ == _REPLICATE for kind in type(each).__mro__))
)
"""Names the class of a module that torch's `replicate` has averaged over processes."""

compiled = kind_of_first(is_compiled)  # names the class of a module that torch.compile compiles

synchronized = among_several(kind_of_first(lambda each: isinstance(each, nn.SyncBatchNorm)))
"""Names the class of a normalization over several processes."""


def _communication_hook(context: Context) -> bool:
    wrappers = [each for each in context.model.modules() if isinstance(each, DistributedDataParallel)]
    return any(getattr(each, "_comm_hooks", None) for each in wrappers)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _compiled_unmeasured(context: Context) -> str | None:
    """Names a compiled module that no profile sees: profiles run the inner model, and a CPU's see no tensor inside."""
    inner = context.inner or context.model
    on_gpu = all(device.type == "cuda" for device in devices_of(inner))
    return kind_of_first(lambda each: is_compiled(each) and (not on_gpu or inner in set(each.modules())))(context)


RERUNS = Feature(
    (
        (  # torch has no public way to ask for these hooks
            lambda context: any(
                getattr(each, "_post_accumulate_grad_hooks", None) for each in context.model.parameters()
            ),
            "a hook on a parameter runs as soon as its gradient is there, and may change weights in backward",
        ),
        (among_several(sharded), f"{SHARDED}, which communicate in forward and backward"),
        (synchronized, "{} communicates in forward"),
        (among_several(kind_of_first(_is_sparse)), "{} has sparse gradients, which are not averaged here"),
        (
            among_several(_communication_hook),
            "a communication hook of DistributedDataParallel decides how gradients are averaged",
        ),
    ),
)

JOINED = (
    "torch's Join has processes without batches follow what DistributedDataParallel sends, and a step is run again in "
    "all processes, which tell each other"
)
"""Why no step of a training with uneven inputs is planned, once it has begun."""

_ALONE = "so no process can measure or run a step again on its own"

IN_BACKWARD = (
    "forward passes of the model run in backward, as for a cache of gradients, and what they keep is not planned"
)
"""Why a step is not planned, once that is seen."""

PLANS = Feature(
    (
        (among_several(sharded), f"{SHARDED}, which communicate in forward and backward, {_ALONE}"),
        (synchronized, f"{{}} communicates in forward, {_ALONE}"),
        (
            _replicated,
            "{} averages gradients in the passes that measure a step as well; use DistributedDataParallel in place of "
            "replicate",
        ),
        (
            static_graph,
            "{}(static_graph=True) takes the passes that measure a step for its own first ones; leave static_graph out",
        ),
        (missing, "{}"),
        (
            lambda context: len(devices_of(context.inner or context.model)) > 1,
            "its parameters are on several devices, and what a step takes is measured on one",
        ),
        (_compiled_unmeasured, "{} is compiled, and what a graph of torch.compile takes is not measured"),
    ),
    error=(
        "memory_budget covers whole steps here, and those of this training cannot be planned: {}. Set "
        'budget_covers="activations", which limits saved activations alone'
    ),
)

AUDITS = Feature(
    (
        (compiled, COMPILED),
        (sharded_tensors, f"{SHARDED}, which would have to measure together"),
        (
            kind_of_first(lambda each: is_named(each, {"DeepSpeedEngine"})),
            "{} counts each pass for a step, and processes would have to measure together",
        ),
    ),
    error=f"{UNMEASURED}. Training goes on without audits; audit_every=None turns them off",
)
