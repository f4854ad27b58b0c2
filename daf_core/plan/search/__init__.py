"""The fastest plan that fits."""
