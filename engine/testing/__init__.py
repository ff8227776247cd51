"""Helpers to test and measure kernels, yours too; `configs/`: the sizes `engine plan` knows."""
