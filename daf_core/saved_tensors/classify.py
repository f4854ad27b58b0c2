"""Is anything saved, is a saved tensor an activation, and which form may it take?"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from itertools import chain

import torch
from torch import Tensor, UntypedStorage, nn

from daf_core.autograd.torch_private import TELLS_WHO_SAVES, number_of, skip_nodes, storage_id, tensors_of
from daf_core.codecs.planes import DTYPES
from daf_core.codecs.saved_tensor import LOW_PRECISION, TensorKind
from daf_core.errors import ConfigError, NothingToTrainError, UnsupportedTorchError, shown
from daf_core.readers.table import STATISTIC_SHARE

LEAST_ELEMENTS = 4096
"""Smaller tensors stay as they are: at 4 bits their header and three planes take four pages, as much as themselves."""

_WIDE = (torch.float32, torch.float64)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_INTEGERS = (torch.int64, torch.int32, torch.int16)
_ROWS = "UnbindBackward0"
"""What takes a tensor apart row by row."""

_VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0")


class Eligibility:
    """Tells activations from parameters, their casts and small exact things.

    Tensors with fewer than `least_elements` stay as they are.
    """

    def __init__(self, model: nn.Module, least_elements: int = LEAST_ELEMENTS) -> None:
        self._model = model
        self.least_elements = least_elements
        # Those of parameters and buffers, by their `storage_id`.
        self.storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._numbers: list[int] = []
        self.shapes: Hashable = None  # those of parameters, on which the form of activations depends
        self._shapes: dict[torch.dtype, set[torch.Size]] = {}  # of parameters and buffers, by their type
        self._others: dict[torch.dtype, set[tuple[int, ...]]] = {}  # see `_shapes_of_others`

    def refresh(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Looks up the storages of parameters and buffers, or of these; they may have moved since the last step."""
        found = [*chain(*tensors_of(self._model))] if tensors is None else tensors
        plain = [each for each in found if type(each) in _PLAIN and each.layout is torch.strided and not each.is_nested]
        numbers = [number_of(each.untyped_storage()) for each in plain]
        if numbers == self._numbers and all(storage() is not None for storage in self.storages.values()):
            return  # a number is that of one storage as long as it exists
        # An activation may get the number of a storage that FSDP frees while a pass runs.
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in plain]
        self._numbers, self.storages = numbers, dict(zip(numbers, storages, strict=True))
        self._shapes, self._others = {}, {}
        for tensor in plain:
            self._shapes.setdefault(tensor.dtype, set()).add(tensor.shape)
        self.shapes = frozenset((dtype, frozenset(shapes)) for dtype, shapes in self._shapes.items())

    def form(self, tensor: Tensor, largest: int) -> TensorKind:
        """Returns the form that a saved tensor may take, as autograd saves it.

        `largest` are the elements of the largest activation saved so far in the same module call.
        """
        if not is_plain(tensor) or _is_parameter(tensor) or self.is_of_parameter(tensor):
            return TensorKind.PARAMETER
        if self._is_cast(tensor):
            return TensorKind.PARAMETER
        # The memory of what torch negates lazily holds the negative of its values, and zero tensors, such as tangents
        # of what has none, have no memory.
        if tensor.numel() < self.least_elements or tensor.is_neg() or tensor._is_zerotensor():
            return TensorKind.RAW
        if tensor.dtype in _INTEGERS:
            return TensorKind.INTEGER
        if tensor.dtype not in DTYPES or _is_statistic(tensor, largest) or self._is_vector_like_parameters(tensor):
            return TensorKind.RAW if tensor.is_complex() else TensorKind.MASK
        return TensorKind.LOSSY

    def is_of_parameter(self, tensor: Tensor) -> bool:
        """Says whether a tensor lies in the storage of a parameter or buffer."""
        found = self.storages.get(storage_id(tensor))
        return found is not None and found() is not None

    def may_be_cast(self, tensor: Tensor) -> bool:
        """Says whether a tensor has a shape of parameters that are of another precision, in any order."""
        others = self._others.get(tensor.dtype)
        if others is None:
            others = self._others[tensor.dtype] = self._shapes_of_others(tensor.dtype)
        return bool(others) and tuple(sorted(tensor.shape)) in others

    def _shapes_of_others(self, dtype: torch.dtype) -> set[tuple[int, ...]]:
        """Returns the sorted shapes of parameters of the wide types, for a narrow one, or the other way round."""
        others = _WIDE if dtype in LOW_PRECISION else LOW_PRECISION if dtype in _WIDE else ()
        return {tuple(sorted(shape)) for other in others for shape in self._shapes.get(other, ())}

    def _is_vector_like_parameters(self, tensor: Tensor) -> bool:
        """Recognizes what is computed of a normalization's weight alone, as ``1 + weight``, by its shape.

        It is kilobytes, and its error would reach every layer below.
        """
        return tensor.dim() == 1 and any(tensor.shape in shapes for shapes in self._shapes.values())

    def _is_cast(self, tensor: Tensor) -> bool:
        """Recognizes the copy of a parameter that autocast makes, or ``weight.float()``, and that linear layers save.

        It frees nothing to compress it, as autocast may cache it, and its error would reach every layer below. A wrong
        guess costs memory, never correctness: the tensor is kept as it is. Whether autocast is on cannot be asked:
        torch switches it off while the operator runs.
        """
        if not self.may_be_cast(tensor):
            return False
        node = skip_nodes(tensor.grad_fn, _VIEWS)
        if node is None:
            return not tensor.requires_grad
        source = node.next_functions[0][0] if node.name() == "ToCopyBackward0" else None
        return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def check_trainable(model: object) -> None:
    """Checks that a model has parameters to train, and that this torch tells who reads activations.

    Raises:
        UnsupportedTorchError: It does not: all activations would stay as they are.
        ConfigError: It is no module.
        NothingToTrainError: No parameter requires a gradient.
    """
    if not TELLS_WHO_SAVES:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} is installed, and DAF works with torch 2.10 and newer: an older one does not "
            "tell who has saved an activation, so that all of them would stay as they are. pip install 'torch>=2.10'"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model is a torch.nn.Module, got {shown(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToTrainError(
            f"{type(model).__name__} has no parameter that requires a gradient, so nothing is saved for backward; "
            "set requires_grad on the parameters to train, for example with peft.get_peft_model"
        )


def is_plain(tensor: Tensor) -> bool:
    """Says whether a tensor has a storage of its own to look at: no subclass with a layout of its own, not sparse."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _is_parameter(tensor: Tensor) -> bool:
    """Recognizes a plain parameter by its type: FSDP brings its shards together elsewhere while a forward pass runs."""
    # Asking `isinstance` of a parameter's class runs Python code, 0.7 us; a plain tensor's type says it at once.
    return type(tensor) is nn.Parameter or (tensor._base is not None and isinstance(tensor._base, nn.Parameter))


def _is_statistic(tensor: Tensor, largest: int) -> bool:
    if tensor.shape[-1] == 1 and tensor.shape[-2:] != (1, 1):  # the latter is a map of one position
        return True
    return may_be_statistic(tensor) and tensor.numel() * STATISTIC_SHARE <= largest


def may_be_statistic(tensor: Tensor) -> bool:
    """Says whether a tensor is a statistic where it is small: it has no gradient, or is a later result of an operator.

    The mean and deviation of a group normalization claim a gradient; they are its second and third result. The rows of
    a batch, of which a loop takes one after the other, are none.
    """
    if not tensor.requires_grad:
        return True
    return tensor.output_nr > 0 and tensor.grad_fn is not None and tensor.grad_fn.name() != _ROWS
