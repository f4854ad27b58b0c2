"""What the engine's tests share: small models, training with and without DAF, and a look at what was packed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.autograd.sites import Site
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.memory.pager import Pager
from daf_core.readers.table import Reading
from tests.core.books import let_go

LARGE = (128, 64)
"""A shape that is compressed: 8192 elements in rows of 64."""

Loss = Callable[[nn.Module, int], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns normal numbers, the same every time, without touching torch's own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Returns int64 numbers below `high`, the same every time."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def saved_as(
    tensor: Tensor, form: TensorKind = TensorKind.LOSSY, op: str = "leaf", reading: Reading | None = None
) -> SavedTensor:
    """Returns what a codec is told of a tensor that an operator saves."""
    place = (Site("block", op, 0), None, reading, False, False)
    return SavedTensor(tensor, weakref.ref(tensor), tensor._version, tensor.grad_fn, form, *place, [])


class Scale(nn.Module):
    """One trainable number: ``t * weight`` saves exactly t."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * self.weight


class LoRA(nn.Module):
    """A frozen linear layer with a trainable low-rank one beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (LoRA(width, width) for _ in range(3))
        self.output, self.up, self.down = nn.Linear(width, width), LoRA(width, inner), LoRA(inner, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.output(self._attend(self.norm_1(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        split = [layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self._projections()]
        query, key, value = split
        weights = self.dropout((query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1))
        return (weights @ value).transpose(1, 2).flatten(2)

    def _projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


class Transformer(nn.Module):
    """Token embedding, two blocks and a head tied to the embedding."""

    def __init__(self, words: int = 50, width: int = 64, heads: int = 4, inner: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads, inner) for _ in range(2)))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)  # logits that a loss can live with

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def transformer_loss(model: nn.Module, step: int) -> Tensor:
    ids = integers(50, 4, 32, seed=step)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1))


def make_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.AvgPool2d(4),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10),
    )  # fmt: skip


def convnet_loss(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(model(normal(4, 3, 32, 32, seed=step)), integers(10, 4, seed=step))


def make_rnn() -> nn.Module:
    return nn.LSTM(32, 64, num_layers=2, dropout=0.2, batch_first=True)


def rnn_loss(model: nn.Module, step: int) -> Tensor:
    outputs, _ = model(normal(32, 9, 32, seed=step))
    return outputs.square().mean()


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 8))


def mlp_loss(model: nn.Module, step: int) -> Tensor:
    return model(normal(*LARGE, seed=step)).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "transformer": (Transformer, transformer_loss),
    "convnet": (make_convnet, convnet_loss),
    "rnn": (make_rnn, rnn_loss),
    "mlp": (make_mlp, mlp_loss),
}


def make_model(name: str) -> tuple[nn.Module, Loss]:
    """Returns a fresh model, initialized the same every time, and its loss."""
    make, loss = MODELS[name]
    torch.manual_seed(0)
    return make(), loss


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: nn.Module, loss_of: Loss, config: DAFConfig | None = None, steps: int = 3) -> list[Tensor]:
    """Trains a copy of a model and returns all that may differ: losses, gradients, weights, buffers, torch's generator.

    With DAF, each step must leave nothing behind.
    """
    model = copy.deepcopy(model)
    engine = ActivationEngine(model, config) if config else None
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    torch.manual_seed(1)
    record: list[Tensor] = []
    for step in range(steps):
        with engine.compress() if engine else nullcontext():
            loss = loss_of(model, step)
        loss.backward()
        record += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
        if engine:
            assert_empty(engine)
    return [*record, *(tensor.detach() for tensor in model.state_dict().values()), torch.get_rng_state()]


def gradients(model: nn.Module) -> list[Tensor]:
    """Returns copies of all gradients; every trainable parameter must have one."""
    return [parameter.grad.clone() for parameter in trainable(model)]


def backward(model: nn.Module, loss_of: Loss, engine: ActivationEngine | None = None, seed: int = 1) -> list[Tensor]:
    """Returns the gradients of one step, in the engine's scope if there is one."""
    model.zero_grad()
    torch.manual_seed(seed)
    with engine.compress() if engine else nullcontext():
        loss = loss_of(model, 0)
    loss.backward()
    return gradients(model)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Fails unless all tensors are bit-identical."""
    assert len(actual) == len(expected)
    different = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if not torch.equal(a, b)]
    assert not different, f"tensors {different} of {len(expected)} differ"


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the relative error of all tensors together."""
    total = sum(float((a - b).double().square().sum()) for a, b in zip(actual, expected, strict=True))
    return (total / sum(float(b.double().square().sum()) for b in expected)) ** 0.5


def assert_empty(engine: ActivationEngine) -> None:
    """Fails if an activation is still held: pages and the ledger of bytes must both be at zero."""
    assert (engine.leased_pages, engine.held_bytes) == (0, 0)


class Saved(NamedTuple):
    """A tensor that autograd saved, and the form that it was packed in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    requires_grad: bool
    form: str


def watch(engine: ActivationEngine, keep: Callable[[Any], None] = lambda packed: None) -> list[Saved]:
    """Records what the engine packs from now on: "parameter" where it passes through uncounted, else the codec."""
    pack, seen = engine._packer.pack_at, []
    take_the_full_way(engine)

    def record(tensor: Tensor, frame: Any) -> Any:
        packed = pack(tensor, frame)
        address = 0 if tensor.is_sparse else tensor.untyped_storage()._cdata
        seen.append(Saved(tuple(tensor.shape), tensor.dtype, address, tensor.requires_grad, form_of(packed)))
        keep(packed)
        return packed

    engine._packer.pack_at = record
    return seen


def take_the_full_way(engine: ActivationEngine) -> None:
    """Has an engine decide all anew in each pass, as it does in the first ones."""
    begin = engine._replays.own.begin
    engine._replays.own.begin = lambda treatments: begin(None)


def form_of(packed: Any) -> str:
    """Names the form of what the pack hook returned."""
    if isinstance(packed, RawActivation):
        return "raw" if packed.holder is not None else "parameter"
    return packed.stored.name


def forms(seen: list[Saved], *shape: int) -> list[str]:
    """Returns the forms of all saved tensors of one shape."""
    return [saved.form for saved in seen if saved.shape == shape]


def engine_for(model: nn.Module, precision: Any = 8, **options: Any) -> ActivationEngine:
    return ActivationEngine(model, DAFConfig(precision=precision, **options))


def watch_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the bytes that are held whenever they grow, on whatever thread."""
    count, take, seen = Pager._count, Pager.take, []

    def record(pager: Pager, size: int) -> None:
        count(pager, size)
        seen.append(pager.held_bytes)

    def record_taken(pager: Pager, *arguments: Any) -> Any:
        lease = take(pager, *arguments)
        seen.append(pager.held_bytes)
        return lease

    monkeypatch.setattr(Pager, "_count", record)
    monkeypatch.setattr(Pager, "take", record_taken)
    return seen


def pager_of(engine: ActivationEngine) -> Pager:
    """Returns the engine's pager for main memory."""
    return engine._pagers.on(torch.device("cpu"))


def outside_bytes(engine: ActivationEngine) -> int:
    """Returns the bytes of raw activations, which lie on no page."""
    return engine.held_bytes - engine.leased_pages * pager_of(engine).pool.page_bytes


def spill_all(engine: ActivationEngine) -> None:
    """Moves every page to the spill file, as a raw activation would that takes all that the budget leaves."""
    pager = pager_of(engine)
    assert pager.budget is not None
    room = pager.budget - outside_bytes(engine)
    pager.hold(room)
    assert engine.leased_pages == 0
    let_go(pager, room)


def wait_for_read_ahead(pager: Pager) -> None:
    """Waits until what is read ahead is there."""
    running = pager._read_ahead._running
    if running is not None:
        running.result(30)
