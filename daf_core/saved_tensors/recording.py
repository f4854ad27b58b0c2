"""What is known of the tensors that the forward passes of a program save, but for their values.

The passes are kept as a tree: a node is a save, and below it are those that have come next in some pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.sites import ModuleCall, Site
from daf_core.autograd.torch_private import running_module, skip_nodes
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.common_row import RowBlocks
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import RECIPES
from daf_core.codecs.saved_tensor import DERIVABLE, VIEWS, TensorKind
from daf_core.codecs.scaling_groups import Grouping
from daf_core.codecs.tensor_layout import Geometry, geometry_of
from daf_core.codecs.without_values import AttendedActivation
from daf_core.model.treatments import Treatments
from daf_core.readers.places import Place, calling_function, is_written_late, may_write_late
from daf_core.readers.sharpness import may_change
from daf_core.readers.table import CHECKPOINT, Kind, Reading
from daf_core.readers.waiting import EXACT_MODE, Sighting
from daf_core.saved_tensors.classify import may_be_statistic
from daf_core.saved_tensors.handle import Handle, Packed

if TYPE_CHECKING:
    from daf_core.saved_tensors.direct import Direct

SHAPES = 128
"""Shapes of a save whose decisions are kept, of .4 kB each: batches of so many lengths may take turns."""

MOST_SAVES = 1 << 13
"""Saves in all trees, of 1 to 2 kB each. RoBERTa-base has 400; a program that never saves the same twice, as one with
experts, begins anew now and then."""

KINDS = 16
"""Kinds of passes whose trees are kept: treatments of a plan, three of elastic training, and heads of tasks, whose
parameters have other shapes, take turns."""


_CHECKPOINTS = CHECKPOINT.reader, "CheckpointFunctionBackward", "_NoopSaveInputsBackward"
"""The readers of what checkpoints keep, of both kinds; the last up to torch 2.11."""


class Look(NamedTuple):
    """What is found of a tensor before anything looks at its values."""

    form: TensorKind  # the form that it may take
    site: Site  # where it is saved
    sighting: Sighting  # what is known of its reader
    normalizes: bool  # whether a module that normalizes is saving it
    # Whether it stays as it is, whatever its form: so does what some modules save, or what is not written yet.
    kept: bool

    @property
    def reading(self) -> Reading | None:
        """What the reader reads of it; None where that is not known yet."""
        return self.sighting.reading

    @property
    def takes(self) -> TensorKind:
        """The form that it takes at the most: where its reader needs all bits, it loses none."""
        exact = self.reading is not None and self.reading.kind is Kind.EXACT
        return TensorKind.MASK if exact else self.form

    @property
    def reads_rows(self) -> bool:
        """Whether a normalization reads it, in a module of its own or written out; or a checkpoint, where one may."""
        reading = self.reading
        if reading is None:
            return self.normalizes
        return self.normalizes or reading.kind is Kind.NORMALIZED or reading.reader in _CHECKPOINTS


@dataclass(slots=True)
class Decision:
    """How a tensor of one shape was stored at a save."""

    kind: type[Any]  # class of what was stored
    shared: bool  # whether another tensor had stored it before
    geometry: Geometry  # how the tensor lies in memory
    device: torch.device  # where
    form: TensorKind  # the form that it may take
    beside: bool  # whether its form depends on how large others of the same call are, as it may be a statistic
    follows: bool  # whether it may follow from what is stored of others, or does
    behind: tuple[type, ...] = ()  # types of what made it, of which it depends whether it follows; () for `made_by`
    groups: Grouping | None = None  # its scaling groups, once they are known
    direct: Direct | None = None  # what the next one is stored with in one call; None where that takes more

    @classmethod
    def of(cls, tensor: Tensor, look: Look, kind: type[Any], shared: bool) -> Decision:
        """Returns the decision that a tensor is stored as it says, of which nothing else is known yet."""
        geometry = geometry_of(tuple(tensor.shape), tuple(tensor.stride()))
        beside = look.form is not TensorKind.RAW and may_be_statistic(tensor)
        lossy, node = look.form is TensorKind.LOSSY, tensor.grad_fn
        follows = lossy and (kind is AttendedActivation or _may_be_derived(tensor))
        # Nothing looks for what a raw one may follow from in exact mode; another time that may be there.
        several = node is not None and lossy and (node.name() in VIEWS or (follows and kind is RawActivation))
        behind = made_of(tensor) if several else ()
        return cls(kind, shared, geometry, tensor.device, look.form, beside, follows, behind)


class Save:
    """A save after those above it.

    Attributes:
        following: The saves that have come next, the latest to be met first.
        look: What was found of the last tensor here that was looked at; None where they are parameters.
        small: Whether the tensors are too small to be stored otherwise than as they are.
        dtype: Their type.
        made_by: Type of the autograd node that makes them.
        op: Its name where its type does not tell it, else None.
        codes: Code of the two innermost functions that were running; empty where nobody asks who reads.
        instructions: Where they were.
        module: Returns the innermost module of the model that was running, if it still exists. Others, as an
            activation that a model makes anew each time, are another one in each pass. None where nobody asks.
        begun: Names of the modules that had begun since the save above, of those that are followed in each pass.
        calls: Numbers and names of the calls of modules that were running, the outermost first.
        call: Number of the innermost of them.
        checked: Of `Readers.changes`, when the reading was looked at last.
        kept: See `Look`.
        late: Whether the last tensor was to be written yet, where some are; None elsewhere.
        changing: Place and reading of what is looked at again now and then, as a softmax's result; None elsewhere.
        had_codes: Whether codes have stored one of the tensors.
        decisions: By shape.
        epoch: That of the store in which it was measured last what rows share.
    """

    __slots__ = (
        "begun", "call", "calls", "changing", "checked", "codes", "decisions", "dtype", "epoch", "following",
        "had_codes", "instructions", "kept", "late", "look", "made_by", "module", "op", "small",
    )  # fmt: skip

    def __init__(
        self, calls: Sequence[ModuleCall] = (), tensor: Tensor | None = None, look: Look | None = None,
        small: bool = False, frame: FrameType | None = None, followed: Container[int] | None = None,
        begun: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.following: list[Save] = []
        self.begun = [*begun]
        self.look = look
        self.small = small
        self.calls = [(call.number, call.name) for call in calls]
        self.call = self.calls[-1][0] if calls else -1
        self.checked = self.epoch = -1
        self.kept = look is not None and look.kept
        self.late = is_written_late(tensor, frame) if tensor is not None and may_write_late(frame) else None
        self.had_codes = False
        self.decisions: dict[tuple[int, ...], Decision] = {}
        node = None if tensor is None else tensor.grad_fn
        self.dtype = None if tensor is None else tensor.dtype
        self.made_by = type(node)
        self.op = None if node is None or look is None or self.made_by.__name__ == look.site.op else look.site.op
        self.codes: tuple[CodeType | None, CodeType | None] | None = None
        self.changing: tuple[Place, Reading] | None = None
        self.module: Callable[[], object] | None = None
        if look is not None and frame is not None and followed is not None:
            module = running_module(frame, followed)
            self.module = _no_module if module is None else weakref.ref(module)
        # In exact mode nobody asks who reads; but an operator may write what is new, and has saved, only later.
        known = look is None or look.form is not TensorKind.LOSSY or (look.sighting is EXACT_MODE and node is not None)
        if not known and frame is not None:
            inner = calling_function(frame)
            outer = None if inner is None else calling_function(inner.f_back)
            self.codes = None if inner is None else inner.f_code, None if outer is None else outer.f_code
            self.instructions = 0 if inner is None else inner.f_lasti, 0 if outer is None else outer.f_lasti

    def is_at(self, frame: FrameType, followed: Container[int]) -> bool:
        """Says whether the instructions are running that have saved the tensors, in the same of the model's modules."""
        if self.codes is None:
            return self._is_in_module(frame, followed)
        inner, code = self.codes
        if inner is None:
            return calling_function(frame) is None and self._is_in_module(frame, followed)
        if frame.f_code is not inner or frame.f_lasti != self.instructions[0]:
            return False
        outer = frame.f_back
        if code is None or outer is None:
            same = code is None and calling_function(outer) is None
        else:
            same = outer.f_code is code and outer.f_lasti == self.instructions[1]
        return same and self._is_in_module(outer, followed)

    def _is_in_module(self, frame: FrameType | None, followed: Container[int]) -> bool:
        return self.module is None or running_module(frame, followed) is self.module()

    def learn(self, tensor: Tensor, look: Look, packed: object, shared: bool) -> None:
        """Keeps how a tensor was stored, if that can be replayed."""
        if self.look is not None and self.look.reading != look.reading:  # then others take other bits, too
            self.decisions.clear()
        self.look = look
        place, reading = look.sighting.place, look.reading
        self.changing = (place, reading) if place and reading and may_change(reading) else None
        always_raw = self.small or self.kept or tensor.is_complex()
        decision = _decide(tensor, look, packed, shared) if always_raw or look.form is not TensorKind.RAW else None
        if decision is None:
            self.decisions.pop(tensor.shape, None)
        else:
            self.keep(tensor.shape, decision)

    def regroup(self, shares_rows: bool) -> bool:
        """Forgets all decisions where rows share something or did; returns whether there was nothing to forget."""
        groups = [each.groups for each in self.decisions.values()]
        shared = (each is not None and isinstance(each.beside, RowBlocks) for each in groups)
        if shares_rows or any(shared):
            self.decisions.clear()
            return False
        return True

    def keep(self, shape: torch.Size, decision: Decision) -> None:
        """Keeps how a tensor of a shape is stored; the latest stands last."""
        self.decisions.pop(shape, None)
        if len(self.decisions) >= SHAPES:
            del self.decisions[next(iter(self.decisions))]
        self.decisions[shape] = decision


def _decide(tensor: Tensor, look: Look, packed: object, shared: bool) -> Decision | None:
    """Returns how a tensor was stored; None where that is looked at anew each time."""
    if type(tensor) is not Tensor or not look.sighting.is_expected or not isinstance(packed, Packed):
        return None
    if look.form is TensorKind.INTEGER:  # how many bits it takes depends on its values
        return None
    stored = packed.stored
    if isinstance(packed, Handle) and isinstance(stored, RawActivation):  # until its reader is known
        return None
    kind = type(stored)
    return Decision.of(tensor, look, kind, shared) if shared or kind in REPLAYED else None


def _no_module() -> None:
    """Stands for a reference to what is running outside of modules."""


REPLAYED = RawActivation, PlanesActivation, BitmaskActivation, AttendedActivation, *RECIPES


def made_of(tensor: Tensor) -> tuple[type, ...]:
    """Returns the types of the nodes that have made a tensor, and what that was made of first, but for views."""
    node = skip_nodes(tensor.grad_fn, VIEWS)
    source = skip_nodes(node.next_functions[0][0], VIEWS) if node is not None and node.next_functions else None
    return type(node), type(source)


def _may_be_derived(tensor: Tensor) -> bool:
    """Says whether a tensor follows from others where those are stored otherwise than they were."""
    node = skip_nodes(tensor.grad_fn, VIEWS)
    return node is not None and node.name() in DERIVABLE - VIEWS


class Recordings:
    """The trees of a model's passes, by the treatments of its parts and the shapes of its parameters."""

    def __init__(self) -> None:
        self._roots: list[tuple[tuple[Treatments, Hashable], Save]] = []
        self._saves = 0

    def root(self, treatments: Treatments, others: Hashable) -> Save:
        """Returns the tree of passes with some treatments, and other things that are the same for all of them."""
        if self._saves > MOST_SAVES:
            self._roots, self._saves = [], 0
        kind = treatments, others
        found = next((root for known, root in self._roots if known == kind), None)
        if found is None:
            found = Save()
            self._roots = [(kind, found), *self._roots[: KINDS - 1]]
        return found

    def add(self, above: Save, save: Save) -> Save:
        """Returns a save, which has come after another one."""
        if save.calls == above.calls:
            save.calls = above.calls
        above.following.insert(0, save)
        self._saves += 1
        return save
