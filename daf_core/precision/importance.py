"""What a plane of an activation is worth: the error that its loss adds, per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

from daf_kernels import PRECISIONS


def plane_importances(relative_range: float, elements: int, plane_bytes: Sequence[int]) -> list[float]:
    """Returns the growth of the squared rounding error when each plane is dropped, per byte that this frees.

    Rounding to b bits has steps of range / 2**b. Dropping the plane between b and B bits makes the squared step of each
    element grow by range**2 * (4**-b - 4**-B). Errors are counted in units of the values' variance: what follows an
    activation often undoes its scale. With errors as they are, tensors of small values lost all their bits first, and
    gradients of a perceptron with layer norms grew by a factor of 7 to 20 instead of 1 to 3 at the same budgets.

    Args:
        relative_range: Squared range of the scaling groups over their variance.
        elements: Elements of the activation.
        plane_bytes: Bytes that each plane occupies.

    Returns:
        One number of 0 or more for each plane; infinite where the range is not finite.
    """
    if not math.isfinite(relative_range):
        return [math.inf] * len(plane_bytes)
    squared_steps = [relative_range * 4.0**-bits for bits in (0, *PRECISIONS)]
    return [
        elements * (squared_steps[plane] - squared_steps[plane + 1]) / size for plane, size in enumerate(plane_bytes)
    ]
