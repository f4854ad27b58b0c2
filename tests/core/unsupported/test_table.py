"""Each limitation in the table has a model or batch that trips it, and each feature one with which it works."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router

import daf_core
import daf_integrations
from daf_core.rewrites.causal_lm import LOSSES_WITHOUT_LOGITS
from daf_core.rewrites.loss_option import CHUNKED_LOSS
from daf_core.unsupported import elastic, models
from daf_core.unsupported.elastic import ELASTIC, ELASTIC_FIRST_STEP, ELASTIC_OPTIMIZERS, ELASTIC_UNITS, FirstStep
from daf_core.unsupported.micro_batches import MICRO_BATCHES
from daf_core.unsupported.models import _REPLICATE, AUDITS, PLANS, RERUNS
from daf_core.unsupported.table import Context, Feature, unsupported_reasons
from tests.core.rewrites.steps import gpt2
from tests.core.unsupported.conformance import check_limitations, check_works, features_in

ROWS = {"x": torch.zeros(4, 4)}
IDS = torch.zeros(4, 6, dtype=torch.long)
DDP = {"backend": "gloo", "rank": 0, "world_size": 1}


class DeepSpeedEngine(nn.Linear):
    """Has the name of a class that shards."""


def on(model: nn.Module, **options: Any) -> Context:
    return Context(model, **{"batch": ROWS, "blocks": 2, **options})


def plain(**options: Any) -> Context:
    return on(nn.Linear(4, 4), **options)


def configured(**config: Any) -> Context:
    model = nn.Linear(4, 4)
    model.config = SimpleNamespace(**config)
    return on(nn.Sequential(model))


def sharded_tensors() -> Context:
    context = plain()
    next(context.model.parameters()).placements = ()
    return context


def hooked() -> Context:
    context = plain()
    next(context.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return context


def compiled() -> Context:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    return on(model)


def wrapped(**options: Any) -> Context:
    return on(DistributedDataParallel(nn.Linear(4, 4), **options))


def joined() -> Context:
    """As inside of torch's `Join`, which takes several processes."""
    context = wrapped(find_unused_parameters=True)
    context.model._join_config = context.model._join_config._replace(enable=True)
    return context


def replicated() -> Context:
    """As torch's `replicate` leaves a module."""
    return on(type("DDPLinear", (type("DDP", (), {"__module__": _REPLICATE}), nn.Linear), {})(4, 4))


def communicating() -> Context:
    context = wrapped()
    context.model.register_comm_hook(None, lambda state, bucket: bucket)
    return context


def reentrant() -> Context:
    context = plain()
    context.model.gradient_checkpointing = True
    context.model._gradient_checkpointing_func = partial(print, use_reentrant=True)
    return context


def language_model(change: Callable[[Any], object]) -> nn.Module:
    model = gpt2()
    change(model)
    return model


def with_head(head: nn.Module) -> nn.Module:
    return language_model(lambda model: model.set_output_embeddings(head))


def narrowed() -> nn.Linear:
    head = nn.Linear(8, 8)
    head.out_features = 9
    return head


def fused(_model: object) -> None:
    """Stands for a forward of another package."""


fused.__module__ = "liger_kernel.transformers"

HOOKED_HEAD = nn.Linear(8, 8)
HOOKED_HEAD.register_forward_hook(lambda *_: None)
LBFGS = torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])

CASES: dict[str, tuple[Feature, Callable[[], Any], list[tuple[Callable[[], Any], str]]]] = {
    "RERUNS": (
        RERUNS,
        plain,
        [
            (hooked, "hook on a parameter"),
            (lambda: on(DeepSpeedEngine(4, 4)), "DeepSpeedEngine spreads each parameter"),
            (lambda: on(nn.Sequential(nn.SyncBatchNorm(4))), "SyncBatchNorm communicates"),
            (lambda: on(nn.Embedding(4, 4, sparse=True)), "Embedding has sparse gradients"),
            (communicating, "communication hook"),
        ],
    ),
    "PLANS": (
        PLANS,
        plain,
        [
            (sharded_tensors, "DTensor spreads each parameter"),
            (lambda: on(nn.Sequential(nn.SyncBatchNorm(4))), "SyncBatchNorm communicates"),
            (replicated, "DDPLinear averages gradients"),
            (lambda: wrapped(static_graph=True), "DistributedDataParallel(static_graph=True)"),
            (lambda: on(nn.LazyLinear(4)), "has no values before a first batch"),
            (lambda: on(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))), "several devices"),
            (compiled, "Linear is compiled"),
        ],
    ),
    "AUDITS": (
        AUDITS,
        plain,
        [
            (compiled, "torch.compile"),
            (sharded_tensors, "DTensor spreads each parameter"),
            (lambda: on(DeepSpeedEngine(4, 4)), "DeepSpeedEngine counts each pass"),
        ],
    ),
    "MICRO_BATCHES": (
        MICRO_BATCHES,
        plain,
        [
            (lambda: on(DeepSpeedEngine(4, 4)), "DeepSpeed takes"),
            (lambda: on(nn.Sequential(nn.BatchNorm1d(4))), "BatchNorm1d '0' normalizes"),
            (lambda: configured(num_experts=8, aux_loss_coef=0.1), "router's auxiliary loss"),
            (lambda: on(nn.Sequential(NllbMoeTop2Router(NllbMoeConfig(d_model=4)))), "NllbMoeTop2Router drops tokens"),
            (lambda: plain(batch=[]), "type list"),
            (lambda: plain(batch={"input_ids": IDS, "max_seqlen": 4}), "max_seqlen says"),
            (lambda: plain(batch={"position_ids": torch.tensor([[0, 1, 0, 1]])}), "position_ids begin anew"),
            (lambda: plain(batch={"x": torch.zeros(1, 4)}), "has 1 row"),
            (lambda: plain(batch={"x": IDS, "y": IDS, "pixels": torch.zeros(30, 9)}), "pixels has 30 rows"),
            (lambda: plain(batch={"x": IDS, "views": [torch.zeros(4, 2)] * 4}), "a list of 4 tensors"),
        ],
    ),
    "ELASTIC": (
        ELASTIC,
        lambda: wrapped(find_unused_parameters=True),
        [
            (lambda: on(nn.LazyLinear(4)), "has no values before a first batch"),
            (lambda: plain(blocks=1), "Linear has 1 blocks"),
            (plain, "there are several processes"),
            (lambda: configured(layerdrop=0.5), "config.layerdrop=0.5 of Linear"),
            (lambda: on(DeepSpeedEngine(4, 4)), "DeepSpeedEngine spreads each parameter"),
            (compiled, "Linear is compiled"),
            (joined, "torch's Join"),
            (lambda: wrapped(static_graph=True), "DistributedDataParallel(static_graph=True)"),
            (wrapped, "find_unused_parameters=True"),
            (reentrant, '={"use_reentrant": False}'),
        ],
    ),
    "ELASTIC_UNITS": (
        ELASTIC_UNITS,
        lambda: SimpleNamespace(is_choice=True),
        [(lambda: SimpleNamespace(is_choice=False), "nothing to choose from")],
    ),
    "ELASTIC_FIRST_STEP": (
        ELASTIC_FIRST_STEP,
        lambda: FirstStep(["a", "b"], {"a", "b"}, {"c"}),
        [
            (lambda: FirstStep(["a", "b"], {"a"}, {"b"}), "b ran without recording"),
            (lambda: FirstStep(["a", "b"], {"a"}, {"c"}), "b did not run"),
        ],
    ),
    "ELASTIC_OPTIMIZERS": (ELASTIC_OPTIMIZERS, list, [(lambda: [LBFGS], "LBFGS moves")]),
    "LOSSES_WITHOUT_LOGITS": (
        LOSSES_WITHOUT_LOGITS,
        gpt2,
        [
            (lambda: with_head(nn.Sequential()), "is a Sequential"),
            (lambda: with_head(HOOKED_HEAD), "hooks or a forward of its own"),
            (lambda: with_head(narrowed()), "no plain parameter"),
            (lambda: language_model(lambda model: setattr(model, "forward", fused)), "fused loss"),
            (lambda: language_model(lambda model: setattr(model, "loss_function", fused)), "another than"),
        ],
    ),
    "CHUNKED_LOSS": (
        CHUNKED_LOSS,
        lambda: on(gpt2()),
        [
            (lambda: on(type("Sharded", (nn.Linear,), {"__module__": "torch.distributed.fsdp._x"})(4, 4)), "by torch"),
            (lambda: on(language_model(lambda model: model.compile(backend="eager"))), "torch.compile compiles it"),
            (lambda: on(with_head(nn.Sequential())), "is a Sequential"),
            (plain, "no language model"),
        ],
    ),
}

NOWHERE_ELSE = ("obstacle", "unplannable", "refuse", "unsupported_reason")
"""How functions were called that gave such reasons in places of their own."""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One process that takes itself for several."""
    dist.init_process_group(init_method=f"file://{tmp_path}/store", **DDP)
    for module in (models, elastic):
        monkeypatch.setattr(module, "several", lambda: True)
    monkeypatch.setattr(elastic, "exchanging", lambda model: isinstance(model, DistributedDataParallel))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", CASES)
def test_each_limitation(name: str) -> None:
    feature, works, trips = CASES[name]
    check_works(feature, works())
    check_limitations(feature, trips)


def test_every_feature_of_the_core_is_here() -> None:
    assert features_in(Path(daf_core.__file__).parent) == CASES.keys()
    assert len({id(feature) for feature, _, _ in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("feature", [RERUNS, PLANS])
def test_one_process_communicates_with_none(feature: Feature) -> None:
    for made in (lambda: on(DeepSpeedEngine(4, 4)), lambda: on(nn.SyncBatchNorm(4)), sharded_tensors):
        assert unsupported_reasons(feature, made()) == []


def test_reasons_are_given_by_the_table_alone() -> None:
    folders = [Path(package.__file__).parent for package in (daf_core, daf_integrations)]
    found = [
        f"{path.name}: {node.name}"
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(NOWHERE_ELSE)
    ]
    assert found == ["table.py: unsupported_reasons"]
