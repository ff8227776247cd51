"""Helpers for tests and benchmarks, shipped so that your own kernel can use them too."""
