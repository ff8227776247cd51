"""Tools for kernels: the public CUDA headers, checks, benchmarks and profiles."""
