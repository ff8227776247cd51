"""LLM inference without PyTorch: hand-written CUDA C kernels, each with a NumPy mirror."""
