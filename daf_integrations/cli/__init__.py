"""The command ``daf``."""
