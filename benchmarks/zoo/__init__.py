"""Models that benchmarks train."""
