"""The model and the batch that commands run."""
