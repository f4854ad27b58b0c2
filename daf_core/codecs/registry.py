"""The codecs, in the order in which they are asked for a saved tensor."""

from __future__ import annotations

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.gelu_derivative import GeluDerivativeActivation
from daf_core.codecs.logarithms import LogarithmsActivation, ProbabilitiesActivation
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.sides import SidesActivation
from daf_core.codecs.without_values import ShapeActivation

CODECS: tuple[type[StoredActivation], ...] = (
    ShapeActivation,
    NarrowIntActivation,
    BitmaskActivation,
    SidesActivation,
    ReluSignsActivation,
    ReluOutputActivation,
    LogarithmsActivation,
    ProbabilitiesActivation,
    GeluDerivativeActivation,
    PlanesActivation,
    ByteCopyActivation,
)
"""A tensor that none of them takes stays as it is (`RawActivation`)."""


def calibrated_codecs() -> list[type[PlanesActivation]]:
    """Returns the codecs that a site takes only where a calibration has found their error to be less."""
    return [codec for codec in CODECS if issubclass(codec, PlanesActivation) and codec.only_reader]
