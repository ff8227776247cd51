"""Benchmarks: `python -m tests.bench OP [OP ...]` verifies, then times; no pass or fail."""
