"""The engine's kernels in other frameworks: one module a framework, imported only on demand."""
