"""Offline quantization: write a checkpoint with 8-bit or 4-bit weights."""
