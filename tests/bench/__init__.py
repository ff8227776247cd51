"""Benchmarks: `python -m tests.bench OP [OP ...]` verifies, then reports; never a pass or fail."""
