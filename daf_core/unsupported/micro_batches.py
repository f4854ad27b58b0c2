"""Models and batches with which a step in micro-batches is another step, as far as a look at them tells.

A loss that compares rows, as contrastive ones do, is found by `daf_core.batch.infer_reduction` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from daf_core.batch.rows import has_rows, named_tensors, rows_of
from daf_core.unsupported.models import is_named, kind_of_first
from daf_core.unsupported.table import Context, Feature

PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen", "seq_idx"}
"""Keys by which attention kernels are told where the texts of a packed row begin."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
AUXILIARY = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff")
"""Fields of configurations for the number of experts, and for the weight of the loss that balances them."""

NO_ROWS = "a batch of type {} has no tensors in mappings, lists or tuples, to be cut"


def without_rows(batch: Any) -> str | None:
    """Returns the type of a batch that has no tensors."""
    return None if has_rows(batch) else type(batch).__name__


def _batch_statistics(context: Context) -> tuple[str, str] | None:
    # The flags of a model in evaluation mode do not tell which layers stay frozen in training.
    def uses(norm: _BatchNorm) -> bool:
        return norm.training or not context.model.training or norm.running_mean is None

    norms = [(name, each) for name, each in context.model.named_modules() if isinstance(each, _BatchNorm)]
    return next(((type(each).__name__, name) for name, each in norms if uses(each)), None)


def _balances_experts(module: nn.Module) -> bool:
    """Whether the loss has a term for the balance of experts; where it is optional, the logits tell."""
    config: Any = vars(module).get("config")
    experts = any(isinstance(count := getattr(config, name, None), int) and count > 1 for name in EXPERTS)
    coefficients = [value for name in AUXILIARY if (value := getattr(config, name, None)) is not None]
    asked = getattr(config, "output_router_logits", None)
    if not experts or not (coefficients or asked):
        return False
    return asked is not False and (not coefficients or any(coefficients))


def _keys(batch: Any) -> Iterator[str]:
    yield from (str(key) for key in batch) if isinstance(batch, Mapping) else ()
    for value in _values(batch):
        yield from _keys(value)


def _values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()


def _positions_restart(context: Context) -> bool:
    if rows_of(context.batch) != 1:
        return False
    named = [each.flatten() for name, each in named_tensors(context.batch) if name.rpartition(".")[2] == "position_ids"]
    return any(bool((each[1:] < each[:-1]).any()) for each in named)


def _other_rows(context: Context) -> tuple[str, int, int] | None:
    rows = rows_of(context.batch) or 0
    named = ((name, each) for name, each in named_tensors(context.batch) if each.dim() > 1)
    return next(((name, each.shape[0], rows) for name, each in named if each.shape[0] not in (1, rows)), None)


def _ambiguous(context: Context) -> int:
    """Returns the number of rows if a list has as many tensors, of which some have as many rows themselves."""
    rows = rows_of(context.batch) or 0

    def is_found(batch: Any) -> bool:
        listed = batch if isinstance(batch, list) and len(batch) == rows and batch is not context.batch else []
        each_whole = any(isinstance(value, Tensor) and value.dim() and value.shape[0] == rows for value in listed)
        return each_whole or any(map(is_found, _values(batch)))

    return rows if is_found(context.batch) else 0


MICRO_BATCHES = Feature(
    (
        (
            lambda context: is_named(context.model, {"DeepSpeedEngine"}),
            "DeepSpeed takes each backward pass for an accumulation step of its own",
        ),
        (_batch_statistics, "{} {!r} normalizes by the mean and variance of the rows that it is given"),
        (
            kind_of_first(_balances_experts),
            "the router's auxiliary loss is a product of means over the whole batch, so parts have another; "
            "output_router_logits=False leaves it out",
        ),
        (
            kind_of_first(lambda module: hasattr(module, "moe_eval_capacity_token_fraction")),  # NLLB's experts
            "{} drops tokens of the batch for which there is no room in training, and parts have more",
        ),
        (lambda context: without_rows(context.batch), NO_ROWS),
        (
            lambda context: min(PACKED & set(_keys(context.batch)), default=None),
            "the batch is packed (packing=True, padding_free=True): {} says where its texts begin, and parts begin "
            "elsewhere",
        ),
        (_positions_restart, "the batch is packed: its texts are in one row, where position_ids begin anew"),
        (lambda context: (rows,) if (rows := rows_of(context.batch)) in (0, 1) else None, "the batch has {} row"),
        (_other_rows, "{} has {} rows and the batch {}: which belong together is unknown"),
        (_ambiguous, "it is unknown whether a list of {0} tensors in the batch has one for each of its {0} rows"),
    ),
)
