"""The NumPy mirrors: one file per op, each the specification of the kernel of the same name."""

from engine.reference.rmsnorm import rmsnorm

__all__ = ["rmsnorm"]
