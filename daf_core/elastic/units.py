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

    Attributes:
        name: Qualified name of the module that they are in.
        stage: The gradient has to pass the blocks from this one on to reach them: the number of their block, or of
            the first one after them.
        outside: Whether they come before the block rather than being in it.
        share: Of a block's time in backward, the part that their own gradients take.
        parameters: Those that the user trains.
    """

    name: str
    stage: int
    outside: bool
    share: float
    parameters: tuple[nn.Parameter, ...]

    @property
    def elements(self) -> int:
        """Elements of the parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(frozen=True)
class Units:
    """What of a model is trained.

    Attributes:
        blocks: Its blocks in the order in which they run.
        units: What may be trained or not, from the output to the input.
        always: Parameters after the last block, which every step trains.
        whole: Whether layers in blocks are units of their own, as blocks are trained as a whole.
    """

    blocks: Sequence[Block]
    units: Sequence[Unit]
    always: Sequence[nn.Parameter]
    whole: bool

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
    places = _places(model, blocks, whole, calls)
    always: list[nn.Parameter] = []
    grouped: dict[tuple[int, str], list[nn.Parameter]] = {}
    for parameter in sorted(trained, key=lambda parameter: places[id(parameter)]):
        _, stage, name = places[id(parameter)]
        (always if stage == len(blocks) else grouped.setdefault((stage, name), [])).append(parameter)
    work = _Work(model, blocks, calls)
    units: list[Unit] = []
    for (stage, name), parameters in grouped.items():
        outside = not f"{name}.".startswith(f"{blocks[stage].name}.")
        share = 0.0 if outside else work.share(stage, parameters, trained)
        units.append(Unit(name, stage, outside, share, tuple(parameters)))
    units.sort(key=lambda unit: (-unit.stage, unit.outside))
    return Units(blocks, units, always, any(whole))


def _places(model: nn.Module, blocks: Sequence[Block], whole: Sequence[bool], calls: Calls) -> dict[int, _Place]:
    """Returns the first place of each parameter, by its id."""
    order = {name: number for number, name in enumerate(calls)}
    begins = [order.get(block.name, len(order)) for block in blocks]
    places: dict[int, _Place] = {}
    for name, module in model.named_modules():
        inside = next((number for number, block in enumerate(blocks) if f"{name}.".startswith(f"{block.name}.")), None)
        called = order.get(_called(name, calls), 0)
        stage = sum(begin <= called for begin in begins) if inside is None else inside
        place = _Place(called, stage, name if inside is None or whole[inside] else blocks[inside].name)
        for parameter in module.parameters(recurse=False):
            places[id(parameter)] = min(places.get(id(parameter), place), place)
    return places


def _called(name: str, calls: Calls) -> str:
    """Returns a module, or the one around it that was called: some read weights of what is inside by themselves."""
    while name and name not in calls:
        name = name.rpartition(".")[0]
    return name


class _Work:
    """Multiplications of each block's weights in a pass, which say how long their gradients take."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], calls: Calls) -> None:
        self._blocks = blocks
        self._multiplications: dict[int, float] = {}
        for name, module in model.named_modules():
            elements = calls.get(_called(name, calls), 0)
            for parameter in module.parameters(recurse=False):
                self._multiplications[id(parameter)] = _multiplications(parameter, elements, module)

    def share(self, stage: int, parameters: Sequence[nn.Parameter], trained: Sequence[nn.Parameter]) -> float:
        """Returns what part of a block's backward pass makes the gradients of these parameters.

        A matrix takes as many multiplications for the gradient of its input as for its own, where it is trained.
        """
        known = set(map(id, trained))
        everything = [
            self._multiplications[id(each)] * (2 if id(each) in known else 1)
            for each in self._blocks[stage].module.parameters()
        ]
        own = sum(self._multiplications[id(each)] for each in parameters)
        return own / sum(everything) if own else 0.0


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
