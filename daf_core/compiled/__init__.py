"""Saved activations inside graphs of torch.compile: encoded in the forward graph, decoded in the backward graph."""
