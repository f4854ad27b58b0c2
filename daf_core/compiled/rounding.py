"""Numbers of half the bits that are kept beside codes."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(values: Tensor) -> Tensor:
    """Returns float32 numbers in bfloat16, as they come back from memory also where they are read at once.

    Inductor takes a cast to fewer bits and back for none where both are in one loop. Codes were then worked out beside
    other numbers than decode them: at 8 bits the mean of a group was off by a fourth of a step, and the gradient of a
    small convolution by .07 in place of .008.
    """
    bits = values.view(torch.int32)
    found = ((bits + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), found, values).bfloat16()
