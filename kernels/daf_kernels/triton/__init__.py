"""Triton kernels: NVIDIA and AMD GPUs, and, interpreted, a machine that has neither."""
