"""Kernels of the user's own: signature, CUDA source, launch, and the op made of them."""
