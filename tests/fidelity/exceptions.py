"""What is known to be outside of the bounds, and why it stays so."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {}
"""Names of cases, or of their groups, and the reason: none at present."""
