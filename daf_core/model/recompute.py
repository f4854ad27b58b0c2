"""Blocks that save only their input for backward and run once more there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from daf_core.autograd import hook_stack
from daf_core.autograd.torch_private import in_backward
from daf_core.model.blocks import Block
from daf_core.model.caches import as_it_is, is_cache, is_left_empty, layers_of
from daf_core.model.forward_patch import ForwardPatch
from daf_core.snapshots.random_numbers import RandomNumbers, generators_of
from daf_core.snapshots.settings import Settings, Written
from daf_core.snapshots.step import Buffers

if TYPE_CHECKING:
    from daf_core.snapshots.random_numbers import RandomGenerator


class _Running(threading.local):
    """Whether this thread is inside of a block that is recomputed."""

    in_block = False


_running = _Running()


def in_recomputed_block() -> bool:
    """Says whether a block is running in this thread whose activations are not kept; it may be its second run."""
    return _running.in_block


class RecomputedBlock:
    """A block that saves the tensors among its positional arguments and runs once more in backward, until `remove`.

    Hooks for saved tensors see these arguments and nothing of what is inside. The second run repeats the random numbers
    of the first and has its settings, such as active adapters. It changes no buffers, such as running statistics.
    `watch` is told when a recomputation begins (True) and when it ends (False).
    """

    def __init__(self, block: Block, watch: Callable[[bool], None] | None = None) -> None:
        self._module = block.module
        self._layers = layers_of(block.module)
        self._writes_caches = not getattr(block.module, "_can_checkpoint_with_cache", False)  # of transformers
        self._generators = generators_of(block.module)
        self._written: Written = set()
        self._waiting = WeakSet[SecondRun]()  # those that backward may still ask for
        self._watch = watch
        self._patch = ForwardPatch(block.module, self._around)

    def remove(self) -> None:
        """Lets the block save its activations again; not between a forward pass and its backward pass."""
        self._patch.remove()

    def _around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes tensors as positional arguments, wherever they are: the checkpoint saves only those.

        Keywords that need no gradient stay where they are: blocks share masks and the angles of rotary embeddings.
        """
        if not torch.is_grad_enabled():
            settings = Settings(self._module, self._written) if self._waiting else None
            output = forward(*args, **kwargs)
            if settings is not None:
                settings.end_pass()
            return output
        args, kwargs = self._without_empty_caches(args, kwargs)
        # What is given twice, as a list of which a block reads one and writes the other, is one in later runs, too.
        given = {id(value): value for value in (*args, *kwargs.values())}
        order, of_args, of_kwargs = list(given), list(map(id, args)), {name: id(each) for name, each in kwargs.items()}
        leaves, structure = tree_flatten(list(given.values()), is_leaf=is_cache)
        inputs = len(tree_flatten([given[each] for each in dict.fromkeys(of_args)], is_leaf=is_cache)[0])
        # The first run writes to the lists and caches that the caller reads afterwards, later ones to copies of what
        # was there.
        first = [(args, kwargs)]
        caches = [place for place, leaf in enumerate(leaves) if self._writes_caches and is_cache(leaf)]
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (place < inputs or leaf.requires_grad)
        ]

        def again(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            for place in caches:
                filled[place] = as_it_is(leaves[place], self._layers)
            made = dict(zip(order, tree_unflatten(filled, structure), strict=True))
            return tuple(made[each] for each in of_args), {name: made[each] for name, each in of_kwargs.items()}

        def with_tensors(*tensors: Tensor) -> Any:
            watch = self._watch if in_backward() else None
            if watch is not None:
                watch(True)
            outside, _running.in_block = _running.in_block, True
            try:
                inner_args, inner_kwargs = first.pop() if first else again(tensors)
                return forward(*inner_args, **inner_kwargs)
            finally:
                _running.in_block = outside
                if watch is not None:
                    watch(False)

        tensors = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None
        for place in caches:
            leaves[place] = as_it_is(leaves[place], self._layers)
        return checkpoint(with_tensors, *tensors, use_reentrant=False, context_fn=self._contexts)

    def _without_empty_caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leaves out the caches that nobody reads: to fill them keeps what is not to be kept."""
        if not self._writes_caches:
            return args, kwargs

        def kept(value: Any) -> Any:
            return None if is_cache(value) and is_left_empty(value, self._module, self._layers) else value

        args, kwargs = tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}
        if "use_cache" in kwargs and not any(map(is_cache, (*args, *kwargs.values()))):
            kwargs["use_cache"] = False
        return args, kwargs

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # The checkpoint itself repeats the random numbers of devices.
        again = SecondRun(self._module, self._written, generators=self._generators)
        self._waiting.add(again)
        return again.after(hook_stack.keeping_nothing()), again


class SecondRun:
    """Repeats the random numbers and the settings of a first run, which begins now, any number of times.

    What a second run draws, from `generators` as well, and what it writes to buffers, is taken back. For `written` see
    `Settings`.
    """

    def __init__(
        self,
        module: nn.Module,
        written: Written,
        devices: Collection[torch.device] = (),
        generators: Collection[RandomGenerator] = (),
    ) -> None:
        self._module, self._sources = module, (devices, generators)  # of random numbers
        self._numbers, self._settings = RandomNumbers(*self._sources), Settings(module, written)

    @contextmanager
    def after(self, scope: AbstractContextManager[None]) -> Generator[None]:
        """The scope of the first run, inside of another one."""
        with scope:
            yield
        self._settings.end_pass()

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.callback(RandomNumbers(*self._sources).restore)
        self._stack.callback(Buffers(self._module).restore)
        self._stack.enter_context(self._settings.again())
        self._numbers.restore()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
