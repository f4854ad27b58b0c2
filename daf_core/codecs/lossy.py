"""Which lossy codec an activation takes."""

from __future__ import annotations

from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.rectified import RectifiedActivation

LossyActivation = PlanesActivation | RectifiedActivation


def lossy_codec(op: str) -> type[LossyActivation]:
    """Returns the codec for the result of an operator.

    Args:
        op: Name of the autograd node that made the activation.
    """
    return RectifiedActivation if op.startswith("ReluBackward") else PlanesActivation
