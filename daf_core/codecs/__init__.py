"""How an activation is stored.

raw, verbatim, bitmask and narrow_int are exact, planes and rectified are lossy, product and normalized are not stored
themselves but follow from others. rehearsed is any of the lossy ones, tried out.
"""

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.derived import NormalizedActivation, ProductActivation
from daf_core.codecs.lossy import LossyActivation, lossy_codec
from daf_core.codecs.narrow_int import NarrowIntActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.rectified import RectifiedActivation
from daf_core.codecs.rehearsed import RehearsedActivation
from daf_core.codecs.verbatim import VerbatimActivation

__all__ = [
    "BitmaskActivation",
    "LossyActivation",
    "NarrowIntActivation",
    "NormalizedActivation",
    "PlanesActivation",
    "ProductActivation",
    "RawActivation",
    "RectifiedActivation",
    "RehearsedActivation",
    "StoredActivation",
    "VerbatimActivation",
    "lossy_codec",
]
