"""Which features do not work with which models and batches, why, and what a user can do about it."""
