"""Blocks of code in which a lease is written or read.

As generators they would cost 20 us each with cold caches, a tenth of what storing an activation takes in Python.
"""

from __future__ import annotations

from collections.abc import Callable

from daf_core.memory.lease import Lease

Then = Callable[[Lease], None]
"""What is to be done at the end of a block."""


class Writing:
    """Inside, the planes of a lease are written.

    Args:
        lease: The lease.
        publish: Is called at the end.
        release: Is called then, where the block has raised an error.
    """

    __slots__ = ("_lease", "_publish", "_release")

    def __init__(self, lease: Lease, publish: Then, release: Then) -> None:
        self._lease, self._publish, self._release = lease, publish, release

    def __enter__(self) -> Lease:
        return self._lease

    def __exit__(self, kind: object, *_: object) -> None:
        self._publish(self._lease)
        if kind is not None:
            self._release(self._lease)


class Reading:
    """Inside, the pages and planes of a lease stay as they are.

    Args:
        lease: The lease.
        unpin: Is called at the end.
    """

    __slots__ = ("_lease", "_unpin")

    def __init__(self, lease: Lease, unpin: Then) -> None:
        self._lease, self._unpin = lease, unpin

    def __enter__(self) -> Lease:
        return self._lease

    def __exit__(self, *_: object) -> None:
        self._unpin(self._lease)
