"""The numerics in plain torch."""
