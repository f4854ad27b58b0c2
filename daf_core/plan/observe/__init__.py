"""Time and memory of each block in one pass."""
