"""The kernels of a call without what the host does around them."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from daf_kernels.triton import backend


def kernels_of(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a call that launches the kernels of a call of the Triton backend again, with the same arguments.

    What the backend does before and after, such as uploading the addresses of pages and waiting for an answer, is left
    out.

    Args:
        call: Called twice: the first time the backend may measure which kernels are the fastest.
    """
    recorded: list[Callable[[], object]] = []

    def recording(launch: Callable[..., None]) -> Callable[..., None]:
        def record(*arguments: object, **constants: object) -> None:
            recorded.append(partial(launch, *arguments, **constants))
            launch(*arguments, **constants)

        return record

    call()
    names = ("launch", "launch_over_blocks")
    with patch.multiple(backend, **{name: recording(getattr(backend, name)) for name in names}):
        call()

    def repeat() -> None:
        for launch in recorded:
            launch()

    return repeat
