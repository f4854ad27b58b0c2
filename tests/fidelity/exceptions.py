"""What is known to be outside of the bounds, and why it stays so."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {
    "nn.functional.rrelu": (
        "torch writes the noise after it has saved it, so that a hook that copies what it gets has what was in memory "
        "before: where that was zeros, also in exact mode"
    ),
}
"""Names of cases, or of their groups, and the reason."""
