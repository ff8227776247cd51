"""The catalog of ops: NumPy arrays run the mirror, CuPy arrays the CUDA kernel."""

from engine.kernels.rmsnorm import rmsnorm

__all__ = ["rmsnorm"]
