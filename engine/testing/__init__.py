"""Helpers for tests and benchmarks, shipped so that you can use them for your own kernels."""
