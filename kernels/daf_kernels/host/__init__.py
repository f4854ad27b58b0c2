"""A GPU's activations, packed by the CPU."""
