"""What is trained or not as a whole."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core.elastic.units import Unit, Units
from tests.core.elastic.runs import DecoderFirst, assumed_units, deep_gpt2, make, trained, units_in_order, with_adapters
from tests.core.plan import nets

ORDER = {
    "gpt2": ["transformer.h.1", "transformer.h.0"],
    "llama": ["model.layers.1", "model.layers.0"],
    "roberta": ["roberta.encoder.layer.1", "roberta.encoder.layer.0"],
    "bart": [f"model.{side}.layers.{number}" for side in ("decoder", "encoder") for number in (1, 0)],
    "t5": [f"{side}.block.{number}" for side in ("decoder", "encoder") for number in (1, 0)],
}


def named(units: Units, name: str) -> Unit:
    return next(unit for unit in units.units if unit.name == name)


def all_parameters(units: Units) -> list[nn.Parameter]:
    return [*units.always, *(parameter for unit in units.units for parameter in unit.parameters)]


@pytest.mark.parametrize("kind", ORDER)
def test_all_adapters_of_a_block_are_one_unit(kind: str) -> None:
    model, batch, loss = make(kind)
    units = units_in_order(model, batch, loss)
    assert [unit.name for unit in units.units] == [f"base_model.model.{name}" for name in ORDER[kind]]
    assert [unit.stage for unit in units.units] == [*reversed(range(len(ORDER[kind])))]
    assert not any(unit.outside for unit in units.units)
    for unit in units.units:
        inside = [p for name, p in model.named_parameters() if name.startswith(f"{unit.name}.") and p.requires_grad]
        assert sorted(map(id, unit.parameters)) == sorted(map(id, inside))
        assert 0 < unit.share < 0.15
    heads = {id(p) for name, p in model.named_parameters() if "modules_to_save" in name and p.requires_grad}
    assert {id(parameter) for parameter in units.always} == heads
    assert bool(heads) == (kind == "roberta")


def test_modules_that_are_trained_beside_adapters() -> None:
    model = with_adapters(nets.gpt2(), "gpt2", modules_to_save=["wpe", "ln_f"])
    units = units_in_order(model, *nets.make("gpt2")[1:])
    assert [(unit.stage, unit.outside) for unit in units.units] == [(1, False), (0, False), (0, True)]
    assert ".wpe." in units.units[-1].name
    assert units.units[-1].share == 0
    assert sorted(each.numel() for each in units.always) == [64, 64]  # ln_f, behind the last block


@pytest.mark.parametrize("kind", ["gpt2", "llama", "roberta", "bart", "t5", "encoder", "resnet"])
def test_models_that_are_trained_as_a_whole(kind: str) -> None:
    model, batch, loss = make(kind, adapters=False)
    for units in (assumed_units(model), units_in_order(model, batch, loss)):
        assert sorted(map(id, all_parameters(units))) == sorted(map(id, trained(model)))  # each once
        assert sum(each.numel() for each in all_parameters(units)) == sum(each.numel() for each in trained(model))
        assert units.trained_share(units.everything) == 1.0
        assert [(-u.stage, u.outside) for u in units.units] == sorted((-u.stage, u.outside) for u in units.units)
        assert len({unit.name for unit in units.units}) == len(units.units)
        for stage in range(len(units.blocks)):
            inside = [unit for unit in units.units if unit.stage == stage and not unit.outside]
            assert len(inside) > 3  # single layers
            assert sum(unit.share for unit in inside) == pytest.approx(0.5)


def test_tied_embeddings_count_where_they_are_used_first() -> None:
    model, batch, loss = make("gpt2", adapters=False)
    units = units_in_order(model, batch, loss)
    tied = model.get_input_embeddings().weight
    assert tied is model.get_output_embeddings().weight
    unit = named(units, "transformer.wte")
    assert unit.stage == 0
    assert unit.outside
    assert [*unit.parameters] == [tied]
    assert all(parameter is not tied for parameter in units.always)
    assert {id(each) for each in units.always} == {id(each) for each in model.transformer.ln_f.parameters()}


def test_a_layer_that_is_never_called_by_itself() -> None:
    """Attention of torch reads the weights of its last layer, and normalizations end the block."""
    model, batch, loss = make("encoder", adapters=False)
    units = units_in_order(model, batch, loss)
    for stage in range(2):
        unit = named(units, f"encoder.layers.{stage}.self_attn.out_proj")
        assert (unit.stage, unit.outside) == (stage, False)
        assert unit.share > 0.01
        assert named(units, f"encoder.layers.{stage}.norm2").share == 0


class Tail(nn.Module):
    """A head that reads the weights of a layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


def test_a_layer_behind_the_blocks_that_is_never_called_by_itself() -> None:
    model = nn.Sequential(Tail(), nets.FeedForward(), nets.FeedForward())
    model.forward = lambda x: model[0](model[2](model[1](x)))
    units = units_in_order(model, nets.make("encoder")[1], nets.MODELS["encoder"][2])
    assert {id(parameter) for parameter in units.always} == {id(parameter) for parameter in model[0].parameters()}


def test_blocks_that_are_registered_in_another_order_than_they_run() -> None:
    model = DecoderFirst()
    assert [block.name for block in assumed_units(model).blocks] == ["later.0", "later.1", "earlier.0", "earlier.1"]
    units = units_in_order(model, nets.make("encoder")[1], nets.MODELS["encoder"][2])
    assert [block.name for block in units.blocks] == ["earlier.0", "earlier.1", "later.0", "later.1"]
    assert [unit.name.rpartition(".")[0] for unit in units.units[::2]] == [
        "later.1",
        "later.0",
        "earlier.1",
        "earlier.0",
    ]


def test_what_lies_between_blocks_needs_those_after_it() -> None:
    """The encoder's last normalization is reached through the decoder alone."""
    model, batch, loss = make("t5", adapters=False)
    units = units_in_order(model, batch, loss)
    unit = named(units, "encoder.final_layer_norm")
    assert (unit.stage, unit.outside) == (2, True)


def test_an_odd_share_of_a_block_that_is_trained_makes_layers_units() -> None:
    model = deep_gpt2(2)
    units = assumed_units(model)
    assert len(units.units) == 2
    for parameter in model.base_model.model.transformer.h[1].parameters():
        parameter.requires_grad_(True)
    names = [unit.name for unit in assumed_units(model).units]
    assert names[-1] == "base_model.model.transformer.h.0"
    assert len(names) > 5
    assert all(".h.1." in name for name in names[:-1])
