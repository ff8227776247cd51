"""Helpers for tests and benchmarks of kernels, shipped for use with your own kernels."""
