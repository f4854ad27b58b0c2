"""Predicates on a model, and the features that depend on the model alone: planned steps, second runs and audits."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from daf_core.autograd.torch_private import COMPILED, is_compiled
from daf_core.distributed import several
from daf_core.snapshots.measurement import missing_values
from daf_core.snapshots.rng_and_buffers import devices_of
from daf_core.unsupported.table import Context, Feature

SHARDING = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Names of the classes that shard a model; an import of the classes takes seconds."""

SHARDED = "{} spreads each parameter over several processes"

UNMEASURED = "DAF cannot measure the error of the gradient on a part of the batch: {}"


def is_named(module: nn.Module, names: set[str]) -> bool:
    """Says whether a module's class or one of its bases has one of the names."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


def kind_of_first(model: nn.Module, condition: Callable[[nn.Module], object]) -> str | None:
    """Returns the class name of the first module, the model included, that meets a condition."""
    return next((type(module).__name__ for module in model.modules() if condition(module)), None)


def missing(context: Context) -> str | None:
    """Names a parameter that the first forward pass creates, with the remedy."""
    return missing_values(context.inner or context.model)


def sharded_tensors(context: Context) -> str | None:
    """Returns "DTensor" if the parameters are such tensors; an import of the class takes a second."""
    return "DTensor" if any(hasattr(each, "placements") for each in context.model.parameters()) else None


def sharded(context: Context) -> str | None:
    """Names the class that shards the model's parameters."""
    return kind_of_first(context.model, lambda each: is_named(each, SHARDING)) or sharded_tensors(context)


def compiled(context: Context) -> str | None:
    """Names the class of a module that torch.compile compiles."""
    return kind_of_first(context.model, is_compiled)


def _sharded_now(context: Context) -> str | None:
    return sharded(context) if several() else None


def _synchronized_norm(context: Context) -> str | None:
    return kind_of_first(context.model, lambda each: isinstance(each, nn.SyncBatchNorm)) if several() else None


def _sparse(context: Context) -> str | None:
    def is_sparse(module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

    return kind_of_first(context.model, is_sparse) if several() else None


def _communication_hook(context: Context) -> bool:
    wrappers = [each for each in context.model.modules() if isinstance(each, DistributedDataParallel)]
    return several() and any(getattr(each, "_comm_hooks", None) for each in wrappers)


def _gradient_hook(context: Context) -> bool:
    # Torch has no public way to ask for these hooks.
    return any(getattr(each, "_post_accumulate_grad_hooks", None) for each in context.model.parameters())


def _several_devices(context: Context) -> bool:
    return len(devices_of(context.inner or context.model)) > 1


def _compiled_unmeasured(context: Context) -> str | None:
    """Names a compiled module that no profile sees: profiles run the inner model, and a CPU's see no tensor inside."""
    inner = context.inner or context.model
    on_gpu = all(device.type == "cuda" for device in devices_of(inner))
    return kind_of_first(context.model, lambda each: is_compiled(each) and (not on_gpu or inner in set(each.modules())))


RERUNS = Feature(
    "a second run of a step",
    (
        (
            _gradient_hook,
            "a hook on a parameter runs as soon as its gradient is there, and may change weights in backward",
        ),
        (_sharded_now, f"{SHARDED}, which communicate in forward and backward"),
        (_synchronized_norm, "{} communicates in forward"),
        (_sparse, "{} has sparse gradients, which are not averaged here"),
        (_communication_hook, "a communication hook of DistributedDataParallel decides how gradients are averaged"),
    ),
)

_ALONE = "so no process can measure or run a step again on its own"

PLANS = Feature(
    "planned steps",
    (
        (_sharded_now, f"{SHARDED}, which communicate in forward and backward, {_ALONE}"),
        (_synchronized_norm, f"{{}} communicates in forward, {_ALONE}"),
        (missing, "{}"),
        (_several_devices, "its parameters are on several devices, and what a step takes is measured on one"),
        (_compiled_unmeasured, "{} is compiled, and what a graph of torch.compile takes is not measured"),
    ),
    error=(
        "memory_budget covers whole steps here, and those of this training cannot be planned: {}. Set "
        'budget_covers="activations", which limits saved activations alone'
    ),
)

AUDITS = Feature(
    "audits",
    ((compiled, COMPILED), (sharded_tensors, f"{SHARDED}, which would have to measure together")),
    error=f"{UNMEASURED}. Training goes on without audits; audit_every=None turns them off",
)
