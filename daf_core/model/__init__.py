"""What DAF does to a model: its blocks, recomputation, patched forwards."""
