"""What of a model or batch makes a step in parts another step: what a look at them tells, without running the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from daf_core.batch.rows import named_tensors, rows_of

PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen", "seq_idx"}
"""Keys by which attention kernels are told where the texts of a packed row begin."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
AUXILIARY = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff")
"""What configurations of models with experts call their number, and the weight of the loss that balances them."""


def obstacle(model: nn.Module, batch: Any) -> str | None:
    """Says why a step on the batch cannot run in parts; None where nothing speaks against it.

    What a loss does with rows, as contrastive ones do, is seen by `infer_reduction.infer_reduction` alone.

    Args:
        model: The model as it is called.
        batch: The step's batch.
    """
    return next(_of_model(model), None) or next(_of_batch(batch), None)


def _of_model(model: nn.Module) -> Iterator[str]:
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        yield "DeepSpeed takes each backward pass for an accumulation step of its own"
    for name, module in model.named_modules():
        # The flags of a model in evaluation mode do not tell which layers stay frozen when it trains.
        batch_norm = isinstance(module, _BatchNorm)
        if batch_norm and (module.training or not model.training or module.running_mean is None):
            yield f"{type(module).__name__} {name!r} normalizes by the mean and variance of the rows that it is given"
    for module in model.modules():
        if _balances_experts(vars(module).get("config")):
            yield (
                "the router's auxiliary loss is a product of means over the whole batch, so parts have another; "
                "output_router_logits=False leaves it out"
            )


def _balances_experts(config: Any) -> bool:
    """Says whether the loss has a term for the balance of experts; where that is optional, the logits tell."""
    experts = any(isinstance(count := getattr(config, name, None), int) and count > 1 for name in EXPERTS)
    coefficients = [value for name in AUXILIARY if (value := getattr(config, name, None)) is not None]
    asked = getattr(config, "output_router_logits", None)
    if not experts or not (coefficients or asked):
        return False
    return asked is not False and (not coefficients or any(coefficients))


def _of_batch(batch: Any) -> Iterator[str]:
    rows = rows_of(batch)
    if rows is None:
        yield f"a batch of type {type(batch).__name__} has no tensors in mappings, lists or tuples, to be cut"
        return
    packed = sorted(PACKED & set(_keys(batch)))
    if packed:
        yield f"the batch is packed: {packed[0]} says where its texts begin, and parts begin elsewhere"
    if rows == 1 and any(name.rpartition(".")[2] == "position_ids" and _restart(t) for name, t in named_tensors(batch)):
        yield "the batch is packed: its texts are in one row, where position_ids begin anew"
    if rows < 2:
        yield f"the batch has {rows} row"
    for name, tensor in named_tensors(batch):
        if tensor.dim() > 1 and tensor.shape[0] not in (1, rows):
            yield f"{name} has {tensor.shape[0]} rows and the batch {rows}: which belong together is unknown"
    yield from _ambiguous(batch, rows)


def _keys(batch: Any) -> Iterator[str]:
    if isinstance(batch, Mapping | list | tuple):
        yield from (str(key) for key in batch) if isinstance(batch, Mapping) else ()
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _keys(value)


def _restart(positions: Tensor) -> bool:
    return bool((positions.flatten()[1:] < positions.flatten()[:-1]).any())


def _ambiguous(batch: Any, rows: int, outermost: bool = True) -> Iterator[str]:
    """Finds lists with as many tensors as the batch has rows, of which some have as many rows themselves."""
    listed = batch if isinstance(batch, list) and len(batch) == rows and not outermost else []
    if any(isinstance(value, Tensor) and value.dim() and value.shape[0] == rows for value in listed):
        yield f"it is unknown whether a list of {rows} tensors in the batch has one for each of its {rows} rows"
    if isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _ambiguous(value, rows, outermost=False)
