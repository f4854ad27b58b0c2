"""What is trained or not as a whole: the adapters of a block, or a layer in a block of a model trained as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import getLogger
from typing import NamedTuple

from torch import Tensor, nn

from daf_core.model.blocks import Block

log = getLogger("daf")

WHOLE = 0.5
"""Part of a block's parameters that is trained from which on its layers are units of their own: adapters are a few
percent, and to train one of a pair without the other teaches it nothing (LoRA's first matrix while the second is 0)."""

Calls = Mapping[str, int]
"""Names of modules in the order in which they were first called, with the elements of what each returned; 0 unknown."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are trained together.

    The gradient has to pass the blocks from `stage` on to reach them: it is the number of their block, or of the first
    one after them.
    """

    name: str  # of the module that they are in
    stage: int
    outside: bool  # whether they come before the block rather than being in it
    share: float  # of a block's time in backward, the part that their own gradients take
    parameters: tuple[nn.Parameter, ...]  # those that the user trains

    @property
    def elements(self) -> int:
        """Elements of the parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(frozen=True)
class Units:
    """What of a model is trained."""

    blocks: Sequence[Block]  # in the order in which they run
    units: Sequence[Unit]  # what may be trained or not, from the output to the input
    always: Sequence[nn.Parameter]  # after the last block, which every step trains
    whole: bool  # whether layers in blocks are units of their own, as blocks are trained as a whole

    @property
    def everything(self) -> frozenset[int]:
        """Numbers of all units."""
        return frozenset(range(len(self.units)))

    @property
    def is_choice(self) -> bool:
        """Whether steps can train different units."""
        return len({unit.stage for unit in self.units}) >= 2 or bool(self.units and self.always)

    def least(self, among: frozenset[int]) -> frozenset[int]:
        """Returns what the cheapest step trains: no unit if something is always trained, else one in the last block."""
        return frozenset() if self.always else frozenset(among and {min(among)})

    def depth(self, on: Collection[int]) -> int:
        """Returns the number of the lowest block that builds a graph; how many there are where only the head does."""
        return min((self.units[number].stage for number in on), default=len(self.blocks))

    @cached_property
    def parts(self) -> list[float]:
        """The part of all trained elements that each unit has; the rest is always trained."""
        always = sum(each.numel() for each in self.always)
        sizes = [unit.elements for unit in self.units]
        return [size / (always + sum(sizes)) for size in sizes]

    def trained_share(self, on: Collection[int]) -> float:
        """Returns the part of all trained elements that a step with these units trains."""
        return 1.0 - sum(part for number, part in enumerate(self.parts) if number not in on)


def warn_of_deepest(units: Units) -> None:
    """Names units with adapters before the first block: the user may not expect that they wait."""
    deepest = [unit.name for unit in units.units if unit.outside and unit.stage == 0]
    if deepest and not units.whole:
        log.warning(
            "%s comes before the first block: whatever trains it builds a graph through the whole model. Elastic "
            "training trains it only in steps that train everything",
            ", ".join(deepest),
        )


def registered_calls(model: nn.Module) -> Calls:
    """Returns the order in which modules are registered, to be assumed before they were seen to be called."""
    return {name: 0 for name, _ in model.named_modules()}


class _Place(NamedTuple):
    """Where a parameter is used: the first of several is the least."""

    called: int
    stage: int
    unit: str


def units_of(model: nn.Module, blocks: Sequence[Block], trained: Sequence[nn.Parameter], calls: Calls) -> Units:
    """Returns the units of a model, given its blocks, the parameters that the user trains, and how modules were called.

    A parameter with several places, as tied embeddings have, counts where it is used first.
    """
    order = {name: number for number, name in enumerate(calls)}
    blocks = sorted(blocks, key=lambda block: order.get(block.name, len(order)))
    known = set(map(id, trained))
    sizes = [[(each.numel(), id(each) in known) for each in block.module.parameters()] for block in blocks]
    whole = [sum(size for size, on in each if on) > WHOLE * sum(size for size, _ in each) for each in sizes]
    places, work = _uses(model, blocks, whole, calls)
    always: list[nn.Parameter] = []
    grouped: dict[tuple[int, str], list[nn.Parameter]] = {}
    for parameter in sorted(trained, key=lambda parameter: places[id(parameter)]):
        _, stage, name = places[id(parameter)]
        (always if stage == len(blocks) else grouped.setdefault((stage, name), [])).append(parameter)
    units: list[Unit] = []
    for (stage, name), parameters in grouped.items():
        outside = not f"{name}.".startswith(f"{blocks[stage].name}.")
        own = 0.0 if outside else sum(work[id(each)] for each in parameters)
        # A matrix takes as many multiplications for the gradient of its input as for its own, where it is trained.
        everything = [work[id(each)] * (2 if id(each) in known else 1) for each in blocks[stage].module.parameters()]
        units.append(Unit(name, stage, outside, own / sum(everything) if own else 0.0, tuple(parameters)))
    units.sort(key=lambda unit: (-unit.stage, unit.outside))
    return Units(blocks, units, always, any(whole))


def _uses(
    model: nn.Module, blocks: Sequence[Block], whole: Sequence[bool], calls: Calls
) -> tuple[dict[int, _Place], dict[int, float]]:
    """Returns the first place of each parameter, and its multiplications in a pass, by its id."""
    order = {name: number for number, name in enumerate(calls)}
    begins = [order.get(block.name, len(order)) for block in blocks]
    places: dict[int, _Place] = {}
    work: dict[int, float] = {}
    for name, module in model.named_modules():
        inside = next((number for number, block in enumerate(blocks) if f"{name}.".startswith(f"{block.name}.")), None)
        caller = name  # or the module around it that was called: some read weights of what is inside by themselves
        while caller and caller not in calls:
            caller = caller.rpartition(".")[0]
        called = order.get(caller, 0)
        stage = sum(begin <= called for begin in begins) if inside is None else inside
        place = _Place(called, stage, name if inside is None or whole[inside] else blocks[inside].name)
        for parameter in module.parameters(recurse=False):
            places[id(parameter)] = min(places.get(id(parameter), place), place)
            work[id(parameter)] = _multiplications(parameter, calls.get(caller, 0), module)
    return places, work


def _multiplications(parameter: nn.Parameter, elements: int, module: nn.Module) -> float:
    """Returns the multiplications of a pass; where nothing was seen, those of one position."""
    if parameter.dim() < 2 or isinstance(module, nn.Embedding):
        return 0.0
    bias = getattr(module, "bias", None)
    width = bias.numel() if isinstance(bias, Tensor) else parameter.shape[0]
    return parameter.numel() * max(elements / width, 1.0)


def renumbered(on: Collection[int], before: Units, after: Units) -> frozenset[int]:
    """Returns the numbers, in another order, of the units that a step has trained.

    What was taken to come after the last block was trained too, wherever it turns out to be.
    """
    trained = [*before.always, *(parameter for number in on for parameter in before.units[number].parameters)]
    known = set(map(id, trained))
    numbered = enumerate(after.units)
    return frozenset(number for number, unit in numbered if not known.isdisjoint(map(id, unit.parameters)))
