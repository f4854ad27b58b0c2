"""A training step in parts, micro-batches, whose losses and gradients add up to those of the batch."""
