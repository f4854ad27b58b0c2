"""Operators of a model in forms that need less memory and differ by rounding alone."""
