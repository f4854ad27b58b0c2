"""Torch's private interface, the stack of saved-tensor hooks, and where in a model a tensor is saved."""
