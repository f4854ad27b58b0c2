"""Kernels that numba compiles."""
