"""Where pages go when the budget is short: pinned host memory, disk."""
