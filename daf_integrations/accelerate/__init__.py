"""Accelerate: DAF by its configuration file, or ``accelerate launch -m daf_integrations.accelerate``."""
