"""Finds and follows the fastest way to run a training step within a memory budget."""
