"""Elastic training: in each step only that is trained which reduces the loss most for its cost."""
