"""Steps of several processes that may be run again: all together, and without communication inside."""

# pyright: reportPrivateUsage=false
# Torch has no public way to ask which DistributedDataParallel is running, or whether its inputs are joined.

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 << 20  # gradients that are averaged in one go, as in DistributedDataParallel


def several() -> bool:
    """Says whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def count() -> int:
    """Returns how many processes there are."""
    return dist.get_world_size() if several() else 1


def rank() -> int:
    """Returns the number of this one of several processes; 0 where it is the only one."""
    return dist.get_rank() if several() else 0


def any_rank_failed(model: nn.Module, failed: bool) -> bool:
    """Says in all processes that train a model together whether one has failed; each has to call it."""
    if not exchanging(model):
        return failed
    group = _group_of(model)
    flag = torch.tensor([failed], dtype=torch.int32, device=_device(group))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag.item())


@contextmanager
def unsynchronized(model: nn.Module) -> Generator[None]:
    """Keeps DistributedDataParallel from communicating inside, in forward and backward.

    For all steps of a run or none: buffers are brought in line by `reduce_gradients` or by the next forward pass.
    """
    with ExitStack() as stack:
        for wrapper in _wrappers(model):
            stack.enter_context(wrapper.no_sync())
            wrapper.require_forward_param_sync = False  # of buffers, which `reduce_gradients` has seen to
        yield


@contextmanager
def apart(model: nn.Module) -> Generator[None]:
    """Keeps DistributedDataParallel from communicating in passes inside, and from leaving anything out after them."""
    before = [(wrapper, wrapper.require_forward_param_sync) for wrapper in _wrappers(model)]
    try:
        with unsynchronized(model):
            yield
    finally:
        for wrapper, synchronizes in before:
            wrapper.require_forward_param_sync = synchronizes


def exchanging(model: nn.Module) -> bool:
    """Says whether several processes train the model together: not without DistributedDataParallel."""
    return several() and bool(_wrappers(model))


def joined(model: nn.Module) -> bool:
    """Says whether the model runs in torch's `Join`, where a process that has no more batches follows the others.

    It follows what DistributedDataParallel sends alone, and nothing else may be sent. Torch does not say when the model
    leaves it: what was in one counts as being there.
    """
    return any(wrapper._join_config.enable for wrapper in _wrappers(model))


def called(model: nn.Module) -> nn.Module:
    """Returns the DistributedDataParallel whose forward is running; the model where none is."""
    running = DistributedDataParallel._get_active_ddp_module()
    return model if running is None else running


def exchanges_gradients(model: nn.Module) -> bool:
    """Says whether DistributedDataParallel would average gradients in the next backward pass: not in its `no_sync`."""
    return all(wrapper.require_backward_grad_sync for wrapper in _wrappers(model))


def reduce_gradients(model: nn.Module) -> None:
    """Averages gradients over processes as DistributedDataParallel would have, after passes in `unsynchronized`.

    A gradient that no process has stays None; one that only some have counts as zero in the others. Where
    DistributedDataParallel takes care of buffers, all processes get those of the first one.
    """
    for wrapper in _wrappers(model):
        named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
        group: Any = wrapper.process_group
        _average([tensor for name, tensor in named if tensor.requires_grad and name not in ignored], group)
        if wrapper.broadcast_buffers:
            source = dist.get_global_rank(group, 0)
            for name, buffer in wrapper.module.named_buffers():
                if name not in ignored:
                    dist.broadcast(buffer, source, group)


def broadcast(value: Any, model: nn.Module) -> Any:
    """Returns the value that the first of the processes gives which train a model together."""
    if not exchanging(model):
        return value
    group = _group_of(model)
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group, _device(group))
    return values[0]


def _group_of(model: nn.Module) -> Any:
    return _wrappers(model)[0].process_group


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _device(group: ProcessGroup | None) -> torch.device:
    """Returns a device that the group's processes can exchange tensors of: the CPU if possible."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if "cpu" in backends:
        return torch.device("cpu")
    kind = next(iter(backends))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _average(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    known = [parameter.grad is not None for parameter in parameters]
    present = torch.tensor(known, dtype=torch.int32, device=_device(group))
    dist.all_reduce(present, dist.ReduceOp.MAX, group)
    with torch.no_grad():
        found = [_gradient(parameter) for parameter, known in zip(parameters, present.tolist(), strict=True) if known]
        for bucket in _buckets(found):
            flat = torch.cat([gradient.flatten() for gradient in bucket]).mul_(1 / dist.get_world_size(group))
            dist.all_reduce(flat, group=group)
            for gradient, mean in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients of one type and device, in order, up to `BUCKET_BYTES` unless one alone is larger."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        kind = gradient.dtype, gradient.device
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(each.nbytes for each in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield open_buckets.pop(kind)
            bucket = open_buckets[kind] = []
        bucket.append(gradient)
    yield from open_buckets.values()
