"""Benchmarks of training with compressed activations: speed, memory, gradients and accuracy.

``python -m benchmarks.training`` times whole training steps, ``python -m benchmarks.accuracy`` fine-tunes
a pre-trained encoder; both compare methods on the same seeds and write JSON.
"""
