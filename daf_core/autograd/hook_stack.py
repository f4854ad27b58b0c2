"""Saved-tensor hooks as a strict stack: only the innermost pair applies, so DAF refuses to share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from daf_core.autograd.torch_private import HookPair, drop_innermost_hooks, innermost_hooks, push_hooks
from daf_core.errors import HooksActiveError

_REMEDIES = {
    "torch.utils.checkpoint": "DAF's scope was entered inside a checkpointed function, where it would switch the "
    "checkpoint off. Enter it outside: DAF then compresses the inputs that the checkpoint keeps",
}
_DEFAULT_REMEDY = (
    "Torch applies only the innermost pair, so one of the two would do nothing. Leave the other scope first "
    "(save_on_cpu, activation offloading, another DAF engine), or do not use DAF here"
)


def check_no_foreign_hooks(own: Callable[[Tensor], Any] | None = None) -> None:
    """Checks that no saved-tensor hooks are active; those whose pack hook is `own` are removed.

    Two interrupts can leave `own` behind.

    Raises:
        HooksActiveError: Hooks are active; the message names their owner.
    """
    active = innermost_hooks()
    while active is not None and active[0] == own:
        drop_innermost_hooks()
        active = innermost_hooks()
    if active is not None:
        pack = _pack_of(active)
        owner = getattr(pack, "__module__", None) or type(pack).__module__
        raise HooksActiveError(
            f"saved-tensor hooks of {owner} ({_name_of(active)}) are already active. "
            f"{_REMEDIES.get(owner, _DEFAULT_REMEDY)}"
        )


@contextmanager
def installed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Generator[None]:
    """Installs the only pair of hooks; whatever ends the scope, no hooks stay installed.

    Raises:
        HooksActiveError: Hooks that were entered inside were not left.
    """
    leftover = None
    try:
        try:
            push_hooks(pack, unpack)
            yield
        finally:
            leftover = _remove_all(pack)
    finally:
        _remove_all(pack)  # an interrupt, such as Ctrl-C, may have ended the first call early
    if leftover is not None:
        raise HooksActiveError(
            f"saved-tensor hooks ({_name_of(leftover)}) were entered inside DAF's scope "
            "and not left before it ended. Use them as a with block inside the forward pass"
        )


class _Told(threading.local):
    """Who is told of what is saved in this thread and not kept, as long as this pair of hooks is the innermost."""

    tell: Callable[[Tensor], object] | None = None
    pair: HookPair | None = None


_told = _Told()


@contextmanager
def telling(tell: Callable[[Tensor], object]) -> Generator[None]:
    """Has `tell` called with each tensor that this thread saves inside of `keeping_nothing`."""
    before = _told.tell, _told.pair
    _told.tell, _told.pair = tell, innermost_hooks()
    try:
        yield
    finally:
        _told.tell, _told.pair = before


def keeping_nothing() -> AbstractContextManager[None]:
    """Returns a scope that is entered where hooks are active that keep nothing, as those of a checkpoint.

    Nobody is told where other hooks than those of `telling` are active now: plain training keeps nothing there either.
    """
    tell = _told.tell
    return nullcontext() if tell is None or innermost_hooks() != _told.pair else _noticing(tell)


@contextmanager
def _noticing(tell: Callable[[Tensor], object]) -> Generator[None]:
    pair = innermost_hooks()
    assert pair is not None
    pack, unpack = pair

    def noted(tensor: Tensor) -> Any:
        tell(tensor)
        return pack(tensor)

    with saved_tensors_hooks(noted, unpack):
        yield


def _remove_all(pack: Callable[[Tensor], Any]) -> HookPair | None:
    """Returns the outermost pair above that of `pack`; None where there was none."""
    leftover = None
    while (active := innermost_hooks()) is not None:
        drop_innermost_hooks()
        leftover = leftover if active[0] == pack else active
    return leftover


def _pack_of(pair: HookPair) -> Any:
    """Returns the pack hook of a pair; of a pair for graphs the one that gets what is saved outside of them."""
    return getattr(pair[0], "outside_of_graphs", pair[0])


def _name_of(pair: HookPair) -> object:
    pack = _pack_of(pair)
    return getattr(pack, "__qualname__", pack)
