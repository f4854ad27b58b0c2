"""Benchmarks of training with compressed activations: speed, memory, gradients and accuracy.

``daf bench benchmarks/zoo/models.py:NAME`` times whole training steps, ``python -m benchmarks.accuracy`` fine-tunes a
pre-trained encoder or trains a task of the DAF paper; both compare methods on the same seeds and write JSON.
``python -m benchmarks.kernels`` times the kernels alone, and ``benchmarks/gpu.sh`` runs all that there is to measure on
a GPU.
"""
