"""How an activation is stored.

raw, verbatim, bitmask and narrow_int are exact, planes and slopes are lossy, product, normalized, sum and attended are
not stored themselves but follow from others; signs are all that a ReLU asks of its result, which is rectified where
others ask for more. rehearsed are planes or slopes, tried out.
"""

from daf_core.codecs.attended import AttendedActivation
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.gelu_derivative import GeluDerivativeActivation
from daf_core.codecs.kept import KeptActivation
from daf_core.codecs.logarithms import LogarithmsActivation
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.probed import ProbedActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import NormalizedActivation, ProductActivation, SumActivation
from daf_core.codecs.relu_output import ReluOutputActivation
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.shape import ShapeActivation
from daf_core.codecs.sides import SidesActivation

__all__ = [
    "AttendedActivation",
    "BitmaskActivation",
    "ByteCopyActivation",
    "GeluDerivativeActivation",
    "KeptActivation",
    "LogarithmsActivation",
    "NarrowIntActivation",
    "NormalizedActivation",
    "PlanesActivation",
    "ProbedActivation",
    "ProductActivation",
    "RawActivation",
    "ReluOutputActivation",
    "ReluSignsActivation",
    "ShapeActivation",
    "SidesActivation",
    "StoredActivation",
    "SumActivation",
]
