"""Where the tests of the Triton kernels run: on a GPU, compiled, or interpreted on a machine that has none."""

from __future__ import annotations

import torch

from daf_kernels.triton.backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = TritonBackend()
PAGE_BYTES = 4096
"""Of an interpreted program, 40 ms are spent whatever its size: pages large enough for few programs."""
