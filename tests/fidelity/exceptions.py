"""What is known to be outside of the bounds, and why it stays so."""

from __future__ import annotations

_SURE = (
    "where every row is sure, or reads values that are almost equal, a softmax's gradient is what is left of terms "
    "that cancel; codes of its result keep the error of each probability, not that of their difference"
)

EXCEPTIONS: dict[str, str] = {
    "torch.ops.aten._safe_softmax.default": _SURE,
    "softmax, sure by 16": _SURE,
    **dict.fromkeys(("MultiheadAttention", "Transformer", "TransformerEncoder", "TransformerEncoderLayer"), _SURE),
    "TransformerDecoderLayer": _SURE,
}
"""Names of cases, or of their groups, and the reason."""
