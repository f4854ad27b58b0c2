"""Training with DAF leaves in a model and its batches what training without it leaves, in every trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, VeloraConfig, get_peft_model
from torch import Tensor, nn
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.utils.data import DataLoader
from transformers import (
    CanineConfig,
    CanineForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
    SplinterConfig,
    SplinterForQuestionAnswering,
    Trainer,
    TrainingArguments,
)

import daf_integrations as daf
from daf_core import ConfigError, PlanError
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.hf_runs import daf_records

ROWS, STEPS = 32, 4


def row(number: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(number)
    return {"x": torch.randn(64, generator=numbers) + number, "labels": torch.tensor(number % 12)}


DATA = [row(number) for number in range(ROWS * STEPS)]


class Standardize(nn.Module):
    """Sets itself up with its first batch."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("deviation", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.mean.copy_(x.detach().mean(0))
            self.deviation.copy_(x.detach().std(0, correction=0) + 1)
            self.ready = True
        return (x - self.mean) / self.deviation


class Counting(nn.Module):
    """Counts its calls, notes their rows and keeps a moving average that it adds to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
        self.calls, self.rows = 0, [0]
        self.average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.rows.append(len(x))
            mean = x.detach().mean()
            self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return x + self.outer(torch.nn.functional.gelu(self.inner(x))) + (self.average or 0.0)


class Net(nn.Module):
    """Leaves traces wherever a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.standardize = Standardize()
        self.observer = MovingAverageMinMaxObserver()
        self.blocks = nn.Sequential(Counting(), Counting(), Counting())
        self.head = nn.Linear(64, 10)
        self.labels = [0]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.labels.append(int(labels.sum()))
            labels.clamp_(max=len(x) % 10 + 1)
        logits = self.head(self.blocks(self.observer(self.standardize(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def traces(self) -> list[Any]:
        """What it has noted."""
        counts: list[Any] = [[block.calls, block.rows, block.average] for block in self.blocks]
        ranges = [self.observer.min_val.item(), self.observer.max_val.item()]
        return [self.labels, self.standardize.mean.tolist(), self.standardize.deviation.tolist(), ranges, counts]


class Module(pl.LightningModule):
    """The same for Lightning."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, _index: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), max_steps=STEPS, report_to="none", disable_tqdm=True, use_cpu=True, **options)


def in_hf(net: nn.Module, options: dict[str, Any] | None, folder: Path, data: Any = DATA, rows: int = ROWS) -> None:
    args = arguments(folder, per_device_train_batch_size=rows)
    callbacks: list[Any] = [] if options is None else [DAFCallback(**options)]
    Trainer(net, args, train_dataset=data, callbacks=callbacks).train()


def in_lightning(net: Net, options: dict[str, Any] | None, folder: Path) -> None:
    strategy = "auto" if options is None else DAFStrategy(**options)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, strategy=strategy, enable_model_summary=False, **quiet
    )
    trainer.fit(Module(net), DataLoader(DATA, ROWS))  # pyright: ignore[reportArgumentType] a list is a dataset


def in_loop(net: Net, options: dict[str, Any] | None, folder: Path) -> None:
    model = net if options is None else daf.prepare(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for batch in DataLoader(DATA, ROWS):  # pyright: ignore[reportArgumentType] a list is a dataset
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def in_accelerate(net: Net, options: dict[str, Any] | None, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = net if options is None else daf.prepare(net, **options)
    optimizer, loader = torch.optim.SGD(net.parameters(), 0.01), DataLoader(DATA, ROWS)  # pyright: ignore[reportArgumentType] a list is a dataset
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


TRAINERS: dict[str, Callable[..., None]] = {
    "transformers": in_hf,
    "lightning": in_lightning,
    "loop": in_loop,
    "accelerate": in_accelerate,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"precision": "exact"},
    "exact in a budget": {"precision": "exact", "memory_budget": "50MB"},
    "exact and elastic": {"precision": "exact", "elastic": {"time": 0.9}},
    "auto": {},
    "auto in a budget": {"memory_budget": "50MB"},
    "4 bits": {"precision": 4},
}


def trained(trainer: Callable[..., None], options: dict[str, Any] | None, folder: Path) -> Net:
    torch.manual_seed(0)
    net = Net().train()
    trainer(net, options, folder)
    return net


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_traces_are_those_of_training_without(
    trainer: Callable[..., None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers, attributes and batches; in exact mode weights, too, where all of them are trained."""
    plain, net = trained(trainer, None, tmp_path), trained(trainer, OPTIONS[name], tmp_path)
    labels, *kept = net.traces()
    assert labels == plain.traces()[0]
    assert kept[:3] == plain.traces()[1:4]
    for found, expected in zip(kept[3], plain.traces()[4], strict=True):
        assert found[:2] == expected[:2]
    if name.startswith("exact") and "elastic" not in name:
        assert net.traces() == plain.traces()
        assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert not [record for record in daf_records(caplog) if "cannot measure" in record.message]


def test_a_batch_is_not_split_where_passes_are_counted() -> None:
    """Each part would count; nor is a block computed again that does."""
    model = daf.prepare(Net().train(), precision="exact", memory_budget="30KB")
    with pytest.raises(PlanError, match=r"each forward pass changes blocks\.0\.\w+"):
        daf.step(model, next(iter(DataLoader(DATA, ROWS))))  # pyright: ignore[reportArgumentType] a list is a dataset


class Lazy(nn.Module):
    """Has parameters that the first batch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(512), nn.GELU(), nn.LazyLinear(12))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


def in_lazy_loop(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = daf.prepare(Lazy(), **options) if options else Lazy()
    optimizer = None
    for batch in DataLoader(DATA, ROWS):  # pyright: ignore[reportArgumentType] a list is a dataset
        model(**batch).backward()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_parameters_of_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """They are made by the first real step, and audited from the second one on."""
    plain = in_lazy_loop()
    assert all(map(torch.equal, in_lazy_loop(precision="exact").parameters(), plain.parameters()))
    assert 0 < daf.metrics(in_lazy_loop(precision="auto"))["daf/gradient_error"] < 1
    assert not [record for record in daf_records(caplog) if "audits" in record.message]


@pytest.mark.parametrize("options", [{"memory_budget": "50MB"}, {"elastic": {"time": 0.5}}])
def test_what_is_measured_before_the_first_batch_needs_parameters(options: dict[str, Any]) -> None:
    """An error says what to do before training."""
    with pytest.raises(ConfigError, match=r"net\.0\.weight has no values before a first batch has run"):
        daf.prepare(Lazy(), **options)


class Centred(nn.Module):
    """A loss with a centre that moves, and a meter."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(10))
        self.meter, self.sum = Meter(), torch.zeros(())

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(logits.detach().mean(0))
        self.meter.calls += 1
        self.sum.add_(1)
        return nn.functional.cross_entropy(logits - self.centre, labels)

    def traces(self) -> list[Any]:
        return [self.centre.tolist(), self.meter.calls, float(self.sum)]


class Meter:
    """Counts."""

    def __init__(self) -> None:
        self.calls = 0


class CentredTrainer(Trainer):
    """Keeps a loss of its own."""

    criterion: Centred

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        return self.criterion(model(inputs["x"]), inputs["labels"] % 10)


@pytest.mark.parametrize("name", ["exact in a budget", "auto"])
def test_a_trainers_own_loss_has_no_traces(name: str, tmp_path: Path) -> None:
    """What it keeps is put back, too."""
    found: list[list[Any]] = []
    for options in (None, OPTIONS[name]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        args = arguments(tmp_path, per_device_train_batch_size=ROWS, remove_unused_columns=False)
        callbacks: list[Any] = [] if options is None else [DAFCallback(**options)]
        trainer = CentredTrainer(model, args, train_dataset=DATA, callbacks=callbacks)  # pyright: ignore[reportArgumentType]
        trainer.criterion = Centred()
        trainer.train()
        found.append(trainer.criterion.traces())
    assert found[1][1:] == found[0][1:] == [STEPS, float(STEPS)]
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05, abs=0.02)


@pytest.mark.parametrize("name", ["exact in a budget", "auto"])
def test_a_loss_function_has_no_traces(name: str) -> None:
    """What it refers to is put back, too."""
    found: list[list[Any]] = []
    for options in (None, OPTIONS[name]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        model, loss = model if options is None else daf.prepare(model, **options), Centred()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for batch in DataLoader(DATA, ROWS):  # pyright: ignore[reportArgumentType] a list is a dataset
            daf.step(model, batch, lambda rows, model=model, loss=loss: loss(model(rows["x"]), rows["labels"] % 10))
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.traces())
    assert found[1][1:] == found[0][1:] == [STEPS, float(STEPS)]
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05, abs=0.02)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


QA: dict[str, Callable[[], nn.Module]] = {
    "splinter": lambda: SplinterForQuestionAnswering(
        SplinterConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    ),
    "canine": lambda: CanineForQuestionAnswering(
        CanineConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, downsampling_rate=4
        )
    ),
}


@pytest.mark.parametrize("make", QA.values(), ids=QA)
@pytest.mark.parametrize("name", ["exact in a budget", "auto"])
def test_models_that_change_their_labels(make: Callable[[], nn.Module], name: str, tmp_path: Path) -> None:
    """They clamp positions of answers to the length of what they are given."""
    length = 128
    data = [
        {
            "input_ids": torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(row)),
            "start_positions": torch.tensor(row % length),
            "end_positions": torch.tensor(length - 1 - row % 3),
        }
        for row in range(8 * STEPS)
    ]
    models: list[nn.Module] = []
    for options in (None, OPTIONS[name]):
        torch.manual_seed(0)
        models.append(make())
        in_hf(models[-1], options, tmp_path, data, 8)
    if name.startswith("exact"):
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    else:
        torch.manual_seed(0)
        start = flat(make())
        updates = [flat(model) - start for model in models]
        assert torch.cosine_similarity(*updates, dim=0) > 0.9


def velora() -> nn.Module:
    size: dict[str, Any] = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    own = VeloraConfig(num_groups=4, init_type="batch_average_once")
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **size))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], velora_config=own))


@pytest.mark.parametrize("name", ["exact", "exact in a budget", "auto"])
def test_adapters_that_their_first_batch_sets_up(name: str, tmp_path: Path) -> None:
    """VeLoRA takes its projections from it, and trains nothing where they are zero."""
    ids = [torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(number)) for number in range(8 * STEPS)]
    data = [{"input_ids": each, "labels": each} for each in ids]
    models: list[nn.Module] = []
    for options in (None, OPTIONS[name]):
        torch.manual_seed(0)
        models.append(velora())
        in_hf(models[-1], options, tmp_path, data, 8)
    plain, found = (dict(model.named_buffers()) for model in models)
    assert [each for each in plain if "velora" in each]
    assert all(torch.equal(found[each], plain[each]) for each in plain)
    if name.startswith("exact"):
        assert torch.equal(flat(models[1]), flat(models[0]))
    torch.manual_seed(0)
    start = dict(velora().named_parameters())
    adapters = [(each, value) for each, value in models[1].named_parameters() if "lora_A" in each]
    assert len(adapters) == 4
    assert not any(torch.equal(value, start[each]) for each, value in adapters)
