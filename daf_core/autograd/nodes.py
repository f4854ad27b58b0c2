"""Names of autograd nodes that DAF looks for."""

from __future__ import annotations

import torch

VIEWS = frozenset(
    ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0", "AliasBackward0")
)
"""Nodes that keep the order of a dense tensor's elements, as long as their number is the same."""

CAST = "ToCopyBackward0"
"""The node that changes a tensor's type, and perhaps its device."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types of half precision, which autocast casts to."""

PRODUCT = "MulBackward0"
"""The node of a product, element by element."""

DROPOUTS = frozenset((PRODUCT, "NativeDropoutBackward0"))
"""Nodes of dropouts in training: that of CPUs is a product with a mask that it draws, that of GPUs saves bools."""

ACTIVATIONS = frozenset(("GeluBackward0", "HardswishBackward0", "MishBackward0", "SiluBackward0"))
"""Nodes of activation functions that save their argument, and whose slopes are at most 1.2."""

DERIVABLE = VIEWS | DROPOUTS | ACTIVATIONS | {"ReluBackward0", "NativeLayerNormBackward0", CAST}
"""Nodes whose results may follow from what is stored (`daf_core.saved_tensors.derive`)."""
