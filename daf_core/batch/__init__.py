"""The rows of a batch, micro-batches, and how their losses add up."""
