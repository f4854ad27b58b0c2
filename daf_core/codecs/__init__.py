"""How an activation is stored: one form a file, in the order of `registry.CODECS`.

raw, verbatim, bitmask and narrow_int are exact; planes, logarithms and slopes are codes of few bits; shape, sides and
signs keep what one operator reads. product, normalized, sum, scaled, cast and attended follow from other activations.
"""

from daf_core.codecs.base import EncodeContext, StoredActivation, encode_first
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.gelu_derivative import GeluDerivativeActivation
from daf_core.codecs.logarithms import LogarithmsActivation
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import LossyStore, PlanesActivation
from daf_core.codecs.probed import ProbedActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import (
    CastActivation,
    ElementwiseActivation,
    NormalizedActivation,
    ProductActivation,
    ScaledActivation,
    SumActivation,
)
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.sides import SidesActivation
from daf_core.codecs.without_values import AttendedActivation, ShapeActivation

__all__ = [
    "AttendedActivation",
    "BitmaskActivation",
    "ByteCopyActivation",
    "CastActivation",
    "ElementwiseActivation",
    "EncodeContext",
    "GeluDerivativeActivation",
    "LogarithmsActivation",
    "LossyStore",
    "NarrowIntActivation",
    "NormalizedActivation",
    "PlanesActivation",
    "ProbedActivation",
    "ProductActivation",
    "RawActivation",
    "ReluOutputActivation",
    "ReluSignsActivation",
    "ScaledActivation",
    "ShapeActivation",
    "SidesActivation",
    "StoredActivation",
    "SumActivation",
    "encode_first",
]
